//! Order of engine starts on one node.
//!
//! The first engine warms the compile cache alone, and the others then follow together. Engines
//! that share a GPU start one after another, because each measures the free memory. One
//! `StartOrder` serves all supervisors of an agent. A supervisor waits for its start permit before
//! each spawn, and gives it up when its engine is ready or has failed.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::host::{EngineProgram, ReplicaPlan};
use crate::vllm::CommandLine;

/// How long the others wait for the engine that warms the compile cache.
///
/// Loading and compiling take one to three minutes. A model that takes longer spends the time on
/// reading weights, where waiting gains nothing more.
const MAX_WARM_WAIT: Duration = Duration::from_secs(5 * 60);

/// Start permits of one agent's engines.
#[derive(Debug)]
pub struct StartOrder {
    shared: Arc<StartOrderShared>,
}

#[derive(Debug)]
struct StartOrderShared {
    queue: Mutex<StartQueue>,
    changed: Notify,
}

/// Permission for an engine to start, given up when dropped.
#[derive(Debug)]
pub(crate) struct StartPermit {
    shared: Arc<StartOrderShared>,
    ticket: u64,
}

impl StartOrder {
    /// Creates the order for replicas on these GPUs.
    ///
    /// The names only have to be equal for the same GPU. With `warm_first`, one replica starts
    /// alone until the compile cache is warm. `limit` is how long a start may take: an older permit
    /// blocks nobody.
    pub fn new(devices: Vec<Vec<String>>, warm_first: bool, limit: Duration) -> Self {
        let order = StartQueue {
            devices,
            limit,
            compile_cache: if warm_first { CompileCacheState::Cold } else { CompileCacheState::Warm },
            ..StartQueue::default()
        };
        Self { shared: Arc::new(StartOrderShared { queue: Mutex::new(order), changed: Notify::new() }) }
    }

    /// Creates the order for a node's engines.
    ///
    /// Warming alone is for several engines that compile; simulated ones share nothing.
    pub fn for_replicas(engine: &EngineProgram, replicas: &[ReplicaPlan], command: Option<&CommandLine>, limit: Duration) -> Self {
        if matches!(engine, EngineProgram::Simulated { .. } | EngineProgram::Attached { .. }) {
            return Self::unordered();
        }
        let eager = |argument: &OsString| argument.to_str().is_some_and(|argument| argument.replace('_', "-") == "--enforce-eager");
        let compiles = command.is_some_and(|command| !command.arguments.iter().any(eager));
        let devices = replicas.iter().map(|replica| replica.gpus.iter().map(|gpu| gpu.uuid.clone()).collect());
        Self::new(devices.collect(), compiles && replicas.len() > 1, limit)
    }

    /// Grants permits without a wait, for engines that share nothing.
    pub fn unordered() -> Self {
        Self::new(Vec::new(), false, Duration::MAX)
    }

    /// Waits until this replica may start. Fair: first come, first served.
    pub(crate) async fn acquire(&self, index: u32) -> StartPermit {
        let ticket = self.shared.queue.lock().push(index);
        // From here on the ticket is given back, however this ends.
        let permit = StartPermit { shared: Arc::clone(&self.shared), ticket };
        loop {
            // Register before the check, so that no change is missed between the two.
            let changed = self.shared.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let wake_at = {
                let mut order = self.shared.queue.lock();
                if order.try_start(ticket, Instant::now()) {
                    break;
                }
                order.next_expiry()
            };
            tokio::select! {
                () = &mut changed => {}
                () = sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => {}
            }
        }
        permit
    }

    /// Obstacle for a replica that waits for its permit, in words; `None` if it does not wait.
    pub(crate) fn blocked_by(&self, index: u32) -> Option<String> {
        self.shared.queue.lock().blocked_by(index)
    }
}

impl StartPermit {
    /// Marks the compile cache as warm, so the others need not wait any longer.
    pub(crate) fn mark_cache_warm(&self) {
        self.shared.queue.lock().compile_cache = CompileCacheState::Warm;
        self.shared.changed.notify_waiters();
    }

    /// Gives the permit up, because the engine is ready; the cache is then warm, too.
    pub(crate) fn finish(self) {
        self.mark_cache_warm();
    }
}

impl Drop for StartPermit {
    fn drop(&mut self) {
        self.shared.queue.lock().remove(self.ticket);
        self.shared.changed.notify_waiters();
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum CompileCacheState {
    /// No engine has warmed the cache yet.
    Cold,
    /// The engine with this ticket warms the cache.
    WarmedBy(u64),
    /// No engine waits for the cache.
    #[default]
    Warm,
}

/// Queue of waiting and starting engines. The queue reads no clock and waits for nothing.
#[derive(Debug, Default)]
struct StartQueue {
    devices: Vec<Vec<String>>,
    limit: Duration,
    compile_cache: CompileCacheState,
    next_ticket: u64,
    waiting: VecDeque<QueuedStart>,
    starting: Vec<ActiveStart>,
}

#[derive(Debug)]
struct QueuedStart {
    ticket: u64,
    index: u32,
}

#[derive(Debug)]
struct ActiveStart {
    ticket: u64,
    index: u32,
    since: Instant,
}

impl StartQueue {
    fn push(&mut self, index: u32) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.waiting.push_back(QueuedStart { ticket, index });
        ticket
    }

    /// Lets a waiting replica start if nothing is in the way.
    fn try_start(&mut self, ticket: u64, now: Instant) -> bool {
        self.remove_expired(now);
        let Some(at) = self.waiting.iter().position(|waiting| waiting.ticket == ticket) else {
            return false;
        };
        let index = self.waiting[at].index;
        if matches!(self.compile_cache, CompileCacheState::WarmedBy(_))
            || (self.compile_cache == CompileCacheState::Cold && at > 0)
            || self.conflicting_replica(at).is_some()
        {
            return false;
        }
        if self.compile_cache == CompileCacheState::Cold {
            self.compile_cache = CompileCacheState::WarmedBy(ticket);
        }
        self.waiting.remove(at);
        self.starting.push(ActiveStart { ticket, index, since: now });
        true
    }

    fn remove(&mut self, ticket: u64) {
        self.waiting.retain(|waiting| waiting.ticket != ticket);
        self.starting.retain(|starting| starting.ticket != ticket);
        if self.compile_cache == CompileCacheState::WarmedBy(ticket) {
            self.compile_cache = CompileCacheState::Cold;
        }
    }

    /// Drops permits beyond their limit: the holder has forgotten the permit, or its engine hangs.
    fn remove_expired(&mut self, now: Instant) {
        let limit = self.limit;
        self.starting.retain(|starting| now.duration_since(starting.since) < limit);
        if let CompileCacheState::WarmedBy(ticket) = self.compile_cache {
            let warms = |starting: &ActiveStart| starting.ticket == ticket && now.duration_since(starting.since) < MAX_WARM_WAIT;
            if !self.starting.iter().any(warms) {
                tracing::warn!("the first engine takes long to compile; the others start without waiting for it");
                self.compile_cache = CompileCacheState::Warm;
            }
        }
    }

    /// Time when the next permit expires.
    fn next_expiry(&self) -> Option<Instant> {
        let limit = if matches!(self.compile_cache, CompileCacheState::WarmedBy(_)) { self.limit.min(MAX_WARM_WAIT) } else { self.limit };
        self.starting.iter().filter_map(|starting| starting.since.checked_add(limit)).min()
    }

    /// Replica that starts, or has waited longer, on a GPU that the one at this place of the queue
    /// needs.
    fn conflicting_replica(&self, at: usize) -> Option<u32> {
        let index = self.waiting[at].index;
        let starting = self.starting.iter().map(|starting| starting.index);
        let before = self.waiting.iter().take(at).map(|waiting| waiting.index);
        starting.chain(before).find(|other| self.shares_gpu(*other, index))
    }

    fn shares_gpu(&self, one: u32, other: u32) -> bool {
        let devices = |index: u32| self.devices.get(index as usize).map_or(&[][..], Vec::as_slice);
        one != other && devices(one).iter().any(|device| devices(other).contains(device))
    }

    fn blocked_by(&self, index: u32) -> Option<String> {
        let at = self.waiting.iter().position(|waiting| waiting.index == index)?;
        if let CompileCacheState::WarmedBy(ticket) = self.compile_cache {
            let warms = self.starting.iter().find(|starting| starting.ticket == ticket)?;
            return Some(format!("waits until replica {} of this node has warmed the compile cache", warms.index));
        }
        match self.conflicting_replica(at) {
            Some(rival) => Some(format!("waits for replica {rival}, which starts on the same GPU")),
            None => Some("waits for its turn to start".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests;
