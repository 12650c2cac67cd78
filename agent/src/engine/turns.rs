//! Who may start now: of the engines of one node, the first warms the compile cache alone and the others then follow together, except
//! that engines which share a GPU start one after another, because each measures what memory is free. One `Turns` serves all drivers
//! of an agent; a driver waits for its turn before each spawn and gives it up when its engine is ready or has failed.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::host::{ReplicaPlan, Resolved};
use crate::vllm::CommandLine;

/// How long the others wait for the one that warms the compile cache. Loading and compiling take one to three minutes; a model that
/// takes longer spends the time on reading weights, where waiting gains nothing more.
const WARM_LIMIT: Duration = Duration::from_secs(5 * 60);

/// The turns of one agent's engines.
#[derive(Debug)]
pub struct Turns {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    order: Mutex<Order>,
    changed: Notify,
}

/// A turn to start an engine; given up when dropped.
#[derive(Debug)]
pub struct Turn {
    shared: Arc<Shared>,
    ticket: u64,
}

impl Turns {
    /// Turns for replicas whose GPUs these are, by any name that is the same for the same GPU. With `warm_first`, one of them starts
    /// alone until the compile cache is warm. `limit` is how long a start may take: a turn older than that holds nobody up.
    pub fn new(devices: Vec<Vec<String>>, warm_first: bool, limit: Duration) -> Self {
        let order = Order { devices, limit, warmth: if warm_first { Warmth::Cold } else { Warmth::Warm }, ..Order::default() };
        Self { shared: Arc::new(Shared { order: Mutex::new(order), changed: Notify::new() }) }
    }

    /// Turns for the engines of a node. Warming up alone is for several engines that compile; simulated ones share nothing.
    pub fn among(engine: &Resolved, replicas: &[ReplicaPlan], command: Option<&CommandLine>, limit: Duration) -> Self {
        if matches!(engine, Resolved::Simulated { .. }) {
            return Self::at_once();
        }
        let eager = |argument: &OsString| argument.to_str().is_some_and(|argument| argument.replace('_', "-") == "--enforce-eager");
        let compiles = command.is_some_and(|command| !command.arguments.iter().any(eager));
        let devices = replicas.iter().map(|replica| replica.gpus.iter().map(|gpu| gpu.uuid.clone()).collect());
        Self::new(devices.collect(), compiles && replicas.len() > 1, limit)
    }

    /// Turns that never wait, for engines that share nothing.
    pub fn at_once() -> Self {
        Self::new(Vec::new(), false, Duration::MAX)
    }

    /// Waits until this replica may start. Fair: first come, first served.
    pub(crate) async fn turn(&self, index: u32) -> Turn {
        let ticket = self.shared.order.lock().enter(index);
        // From here on the ticket is given back however this ends.
        let turn = Turn { shared: Arc::clone(&self.shared), ticket };
        loop {
            // Registered before the look, so that no change falls between the two.
            let changed = self.shared.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let wake_at = {
                let mut order = self.shared.order.lock();
                if order.begin(ticket, Instant::now()) {
                    break;
                }
                order.wake_at()
            };
            tokio::select! {
                () = &mut changed => {}
                () = sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => {}
            }
        }
        turn
    }

    /// What a replica that waits for its turn waits for, in words; `None` if it does not wait.
    pub(crate) fn waits_for(&self, index: u32) -> Option<String> {
        self.shared.order.lock().waits_for(index)
    }
}

impl Turn {
    /// The compile cache is warm: the others need not wait for it any longer.
    pub(crate) fn warmed(&self) {
        self.shared.order.lock().warmth = Warmth::Warm;
        self.shared.changed.notify_waiters();
    }

    /// The engine is ready, so the cache is warm, too; ends the turn.
    pub(crate) fn ready(self) {
        self.warmed();
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.shared.order.lock().leave(self.ticket);
        self.shared.changed.notify_waiters();
    }
}

/// What is known of the compile cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Warmth {
    /// Nobody has warmed it yet.
    Cold,
    /// The engine with this ticket does.
    By(u64),
    /// Nobody waits for it.
    #[default]
    Warm,
}

/// Who waits and who starts. It reads no clock and waits for nothing.
#[derive(Debug, Default)]
struct Order {
    /// The GPUs of each replica.
    devices: Vec<Vec<String>>,
    limit: Duration,
    warmth: Warmth,
    next: u64,
    waiting: VecDeque<Waiting>,
    starting: Vec<Starting>,
}

#[derive(Debug)]
struct Waiting {
    ticket: u64,
    index: u32,
}

#[derive(Debug)]
struct Starting {
    ticket: u64,
    index: u32,
    since: Instant,
}

impl Order {
    fn enter(&mut self, index: u32) -> u64 {
        let ticket = self.next;
        self.next += 1;
        self.waiting.push_back(Waiting { ticket, index });
        ticket
    }

    /// Lets a waiting replica start if nothing speaks against it.
    fn begin(&mut self, ticket: u64, now: Instant) -> bool {
        self.forget_old(now);
        let Some(at) = self.waiting.iter().position(|waiting| waiting.ticket == ticket) else {
            return false;
        };
        let index = self.waiting[at].index;
        if matches!(self.warmth, Warmth::By(_)) || (self.warmth == Warmth::Cold && at > 0) || self.rival(at).is_some() {
            return false;
        }
        if self.warmth == Warmth::Cold {
            self.warmth = Warmth::By(ticket);
        }
        self.waiting.remove(at);
        self.starting.push(Starting { ticket, index, since: now });
        true
    }

    fn leave(&mut self, ticket: u64) {
        self.waiting.retain(|waiting| waiting.ticket != ticket);
        self.starting.retain(|starting| starting.ticket != ticket);
        if self.warmth == Warmth::By(ticket) {
            self.warmth = Warmth::Cold;
        }
    }

    /// A turn beyond its limit holds nobody up: whoever holds it has forgotten it, or its engine hangs.
    fn forget_old(&mut self, now: Instant) {
        let limit = self.limit;
        self.starting.retain(|starting| now.duration_since(starting.since) < limit);
        if let Warmth::By(ticket) = self.warmth {
            let warms = |starting: &Starting| starting.ticket == ticket && now.duration_since(starting.since) < WARM_LIMIT;
            if !self.starting.iter().any(warms) {
                tracing::warn!("the first engine takes long to compile; the others start without waiting for it");
                self.warmth = Warmth::Warm;
            }
        }
    }

    /// When the next turn loses its hold.
    fn wake_at(&self) -> Option<Instant> {
        let limit = if matches!(self.warmth, Warmth::By(_)) { self.limit.min(WARM_LIMIT) } else { self.limit };
        self.starting.iter().filter_map(|starting| starting.since.checked_add(limit)).min()
    }

    /// The replica that starts, or waits for longer, on a GPU of the one at this place of the queue.
    fn rival(&self, at: usize) -> Option<u32> {
        let index = self.waiting[at].index;
        let starting = self.starting.iter().map(|starting| starting.index);
        let before = self.waiting.iter().take(at).map(|waiting| waiting.index);
        starting.chain(before).find(|other| self.shares_gpu(*other, index))
    }

    fn shares_gpu(&self, one: u32, other: u32) -> bool {
        let devices = |index: u32| self.devices.get(index as usize).map_or(&[][..], Vec::as_slice);
        one != other && devices(one).iter().any(|device| devices(other).contains(device))
    }

    fn waits_for(&self, index: u32) -> Option<String> {
        let at = self.waiting.iter().position(|waiting| waiting.index == index)?;
        if let Warmth::By(ticket) = self.warmth {
            let warms = self.starting.iter().find(|starting| starting.ticket == ticket)?;
            return Some(format!("waits until replica {} of this node has warmed the compile cache", warms.index));
        }
        match self.rival(at) {
            Some(rival) => Some(format!("waits for replica {rival}, which starts on the same GPU")),
            None => Some("waits for its turn to start".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests;
