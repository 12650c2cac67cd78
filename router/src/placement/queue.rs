//! Late binding: holds requests whose replica has no room, or is still to come.
//!
//! A request waits here and not in that engine's queue, so it still goes where it is answered
//! soonest when its turn comes. One task wakes waiting requests in turn. The order is that of the
//! placement crate's queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hostler_boot::Shutdown;
use hostler_placement::queue::{Queue, QueueFull, QueueKey, SlotQuota, TurnFactors};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep, timeout};

use super::{ChosenReplica, Placer, Prompt};
use crate::background::BackgroundTasks;
use crate::fleet::Arrival;

/// How often replicas are scanned for waiting requests without a notification. Reports come at most
/// every 10 ms.
const SCAN_INTERVAL: Duration = Duration::from_millis(10);

/// Shortest pause between two scans. Each scan tries to place up to `SCAN_DEPTH` requests.
const MIN_SCAN_PAUSE: Duration = Duration::from_millis(1);

/// Requests that one scan looks at, in queue order. A request whose replica is busy keeps its turn
/// and delays nobody behind it. The simulator's figures use the same number.
const SCAN_DEPTH: usize = 32;

/// How long a woken request may take to be placed before the next one is woken anyway.
const TURN_TIMEOUT: Duration = Duration::from_millis(100);

/// How often a request that has waited for long checks whether there is a replica at all.
const ABSENCE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Most unserved models for which requests wait while engines load, and most bytes of their names:
/// clients choose the names.
const MAX_UNSERVED_MODELS: usize = 256;
const MAX_UNSERVED_NAME_BYTES: usize = 256;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Overload {
    /// The queue is full, for all or for the tenant.
    Full(QueueFull),
    Stopping,
    /// The first token would come too late.
    TooLate {
        /// Predicted seconds until the first token.
        predicted: f64,
        /// Allowed seconds.
        allowed: f64,
    },
}

/// The queues of waiting requests, one per model. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct RequestQueue(Arc<QueueState>);

#[derive(Debug)]
struct QueueState {
    placer: Arc<Placer>,
    queues: Mutex<ModelQueues>,
    /// Counts the scans, so that each begins with another model.
    scan_count: AtomicUsize,
    waiting_count: AtomicUsize,
    /// Queue slots in use, by requests that wait and by those that may have to.
    slot_count: AtomicUsize,
    limits: QueueLimits,
    change_notify: Notify,
    shutdown: Shutdown,
}

#[derive(Debug)]
struct ModelQueues {
    /// The queues, one for each model that ever had to wait.
    ///
    /// An emptied queue is kept, because places are unique within a queue and it remembers what it
    /// has released for whom. Only served models and a few others get here, so there are few
    /// queues.
    by_model: FxHashMap<String, Queue<QueuedRequest>>,
    /// Slots that all queues share.
    slots: SlotQuota,
}

/// Most bytes of all waiting requests' bodies, equal to the limit on bodies being read at once.
pub(crate) const MAX_QUEUED_BYTES: u64 = 1 << 30;

#[derive(Debug, Clone, Copy)]
pub(crate) struct QueueLimits {
    pub max_requests: usize,
    /// Most bytes of their bodies.
    pub max_bytes: u64,
    /// Longest predicted time to a first token, and longest wait for a replica to come.
    pub max_wait: Duration,
}

/// A request's tenant and size, for a queue slot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueueShare {
    /// The hash that requests share turns by.
    pub tenant: u64,
    /// The tenant's share against others'.
    pub weight: f64,
    /// Bytes of the request's body.
    pub bytes: u64,
}

/// How soon a request would be answered, by the last choice of a replica. Keeping the whole choice
/// would keep a fleet view for each waiting request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WaitEstimate {
    pub first_token_seconds: f64,
    /// Seconds that all candidates together need for one token of earlier prompts.
    pub seconds_per_token: f64,
}

#[derive(Debug)]
struct QueuedRequest {
    prompt: Arc<Prompt>,
    /// Replicas that the request may not go to.
    tried: Vec<Arc<str>>,
    turn_sender: oneshot::Sender<(Option<ChosenReplica>, DispatchTurn)>,
}

/// The right to be sent now. Dropping it wakes the next request.
#[derive(Debug)]
pub(crate) struct DispatchTurn(#[allow(dead_code, reason = "dropping it is the message")] oneshot::Sender<()>);

/// Room for one waiting request, until dropped. It is taken before the prompt is read, so a flood
/// causes reading only of prompts whose requests may wait.
#[derive(Debug)]
pub(crate) struct QueueSlot {
    queue: Arc<QueueState>,
    share: QueueShare,
}

impl Drop for QueueSlot {
    fn drop(&mut self) {
        self.queue.slot_count.fetch_sub(1, Ordering::Relaxed);
        self.queue.queues.lock().slots.release(self.share.tenant, self.share.bytes);
    }
}

/// A position in the queue, given up on drop.
struct QueueEntryGuard<'a> {
    queue: &'a QueueState,
    model: &'a str,
    /// `None` once the request has been taken out.
    place: Option<QueueKey>,
    /// Dropped last.
    _slot: QueueSlot,
}

impl Drop for QueueEntryGuard<'_> {
    fn drop(&mut self) {
        self.queue.waiting_count.fetch_sub(1, Ordering::Relaxed);
        if let Some(place) = self.place
            && let Some(queue) = self.queue.queues.lock().by_model.get_mut(self.model)
        {
            queue.remove(place);
        }
    }
}

impl ModelQueues {
    fn has_waiting(&self, model: &str) -> bool {
        self.by_model.get(model).is_some_and(|queue| !queue.is_empty())
    }
}

impl RequestQueue {
    /// Starts the task that wakes requests.
    #[must_use]
    pub(crate) fn start(placer: Arc<Placer>, limits: QueueLimits, tasks: &BackgroundTasks, shutdown: Shutdown) -> Self {
        let shared = QueueState {
            placer,
            queues: Mutex::new(ModelQueues {
                by_model: FxHashMap::default(),
                slots: SlotQuota::new(limits.max_requests, limits.max_bytes),
            }),
            scan_count: AtomicUsize::new(0),
            waiting_count: AtomicUsize::new(0),
            slot_count: AtomicUsize::new(0),
            limits,
            change_notify: Notify::new(),
            shutdown,
        };
        let queue = Self(Arc::new(shared));
        let waking = queue.clone();
        tasks.spawn(async move { waking.run().await });
        queue
    }

    #[must_use]
    pub(crate) fn waiting_count(&self) -> usize {
        self.0.waiting_count.load(Ordering::Relaxed)
    }

    #[must_use]
    pub(crate) fn has_waiting(&self, model: Option<&str>) -> bool {
        self.waiting_count() > 0 && self.0.queues.lock().has_waiting(model.unwrap_or_default())
    }

    /// Waiting requests for a model of this name.
    #[must_use]
    pub(crate) fn waiting_count_of(&self, model: &str) -> usize {
        if self.waiting_count() == 0 { 0 } else { self.0.queues.lock().by_model.get(model).map_or(0, Queue::len) }
    }

    /// How soon a request without a replica would be answered, if one is coming and may be waited
    /// for.
    #[must_use]
    pub(crate) fn estimate_arrival(&self, prompt: &Prompt) -> Option<WaitEstimate> {
        let (shared, view) = (&self.0, self.0.placer.fleet.view());
        let is_bounded = |name: &str| {
            let queues = &shared.queues.lock().by_model;
            queues.contains_key(name)
                || view.replicas.iter().any(|replica| replica.serves(Some(name)))
                || view.expectation(Some(name)).is_some()
                || queues.len() < MAX_UNSERVED_MODELS && name.len() <= MAX_UNSERVED_NAME_BYTES
        };
        // A request that only one engine can answer has nothing to wait for: another life of it
        // could not.
        if prompt.required_engine().is_some() || !prompt.model().is_none_or(is_bounded) {
            return None;
        }
        let arrival = view.arrival(prompt.model(), Instant::now());
        let left = shared.time_to_wait(arrival)?;
        Some(WaitEstimate { first_token_seconds: left.as_secs_f64(), seconds_per_token: 0.0 })
    }

    /// Whether a request that has no replica may wait for one to arrive.
    #[must_use]
    pub(crate) fn may_wait_for(&self, arrival: Arrival) -> bool {
        self.0.time_to_wait(arrival).is_some()
    }

    /// The longest wait.
    #[must_use]
    pub(crate) fn max_wait(&self) -> Duration {
        self.0.limits.max_wait
    }

    /// Takes a queue slot for a request whose prompt is still to be read, if others already wait. A
    /// refusal then comes at once and costs next to nothing.
    ///
    /// # Errors
    /// If others wait for its model and no slot is free.
    pub(crate) fn take_slot_if_contended(&self, model: Option<&str>, share: QueueShare) -> Result<Option<QueueSlot>, Overload> {
        if self.0.slot_count.load(Ordering::Relaxed) == 0 {
            return Ok(None);
        }
        match self.take_slot(share) {
            Ok(slot) => Ok(Some(slot)),
            Err(full) if self.has_waiting(model) => Err(full),
            // Only another model's requests wait; this one may find room.
            Err(_) => Ok(None),
        }
    }

    pub(crate) fn take_slot(&self, share: QueueShare) -> Result<QueueSlot, Overload> {
        self.0.queues.lock().slots.reserve(share.tenant, share.weight, share.bytes).map_err(Overload::Full)?;
        self.0.slot_count.fetch_add(1, Ordering::Relaxed);
        Ok(QueueSlot { queue: self.0.clone(), share })
    }

    /// Counts a request that did not have to wait for its tenant, like those that did.
    pub(crate) fn record_bypass(&self, model: Option<&str>, waiting: &TurnFactors, now: f64) {
        if let Some(queue) = self.0.queues.lock().by_model.get_mut(model.unwrap_or_default()) {
            queue.record_unqueued(waiting, now);
        }
    }

    /// Signals that a request has ended or begun to be answered, so there may be room.
    pub(crate) fn notify_change(&self) {
        if self.waiting_count() > 0 {
            self.0.change_notify.notify_one();
        }
    }

    /// Waits for the request's turn for a replica that was not `tried`.
    ///
    /// The turn comes with the replica that has room, or without one if all have gone and none is
    /// coming or has come in time. `outlook` is that of the replica where the request would go.
    ///
    /// # Errors
    /// If the request may not wait.
    pub(crate) async fn wait_for_turn(
        &self,
        (prompt, tried): (&Arc<Prompt>, &[Arc<str>]),
        waiting: TurnFactors,
        slot: QueueSlot,
        outlook: WaitEstimate,
    ) -> Result<(Option<ChosenReplica>, DispatchTurn), Overload> {
        let shared = &self.0;
        let model = prompt.model().unwrap_or_default();
        let (sender, turn) = oneshot::channel();
        let mut holding = {
            let mut lines = shared.queues.lock();
            let queues = &mut lines.by_model;
            if !queues.contains_key(model) {
                queues.insert(model.to_owned(), Queue::new(shared.limits.max_requests));
            }
            let queue = queues.get_mut(model).expect("it was made where it was missing");
            let longest = shared.limits.max_wait.as_secs_f64();
            let ahead = tokens(queue.uncached_tokens_ahead(&waiting, shared.placer.fleet.view().seconds(Instant::now())));
            let predicted = outlook.first_token_seconds + outlook.seconds_per_token * ahead;
            if predicted > longest {
                return Err(Overload::TooLate { predicted, allowed: longest });
            }
            let queued = QueuedRequest { prompt: prompt.clone(), tried: tried.to_vec(), turn_sender: sender };
            let place = queue.push(waiting, queued).map_err(|_| Overload::Full(QueueFull::Requests))?;
            shared.waiting_count.fetch_add(1, Ordering::Relaxed);
            QueueEntryGuard { queue: shared, model, place: Some(place), _slot: slot }
        };
        shared.change_notify.notify_one();
        let turn = tokio::select! {
            biased;
            turn = turn => turn,
            () = shared.wait_out_absence(prompt.model()) => {
                let (ended, _) = oneshot::channel();
                return Ok((None, DispatchTurn(ended)));
            }
        };
        // The turn has come, so the request was taken out of the queue.
        holding.place = None;
        drop(holding);
        turn.map_err(|_| Overload::Stopping)
    }

    async fn run(&self) {
        loop {
            if self.waiting_count() == 0 {
                self.0.change_notify.notified().await;
            } else {
                let _ = timeout(SCAN_INTERVAL, self.0.change_notify.notified()).await;
            }
            while let Some(done) = self.wake_one() {
                // The next request must see the load of this one.
                let _ = timeout(TURN_TIMEOUT, done).await;
            }
            sleep(MIN_SCAN_PAUSE).await;
        }
    }

    /// Wakes the first request whose replica has room, or one whose replicas have all gone, so that
    /// it learns so. Models that share replicas are scanned by their highest priority, and in turn
    /// among equals.
    fn wake_one(&self) -> Option<oneshot::Receiver<()>> {
        let shared = &self.0;
        let now = Instant::now();
        let view = shared.placer.fleet.view();
        let mut lines = shared.queues.lock();
        let mut models: Vec<(&String, &mut Queue<QueuedRequest>)> =
            lines.by_model.iter_mut().filter(|(_, queue)| !queue.is_empty()).collect();
        let turn = shared.scan_count.fetch_add(1, Ordering::Relaxed) % models.len().max(1);
        models.rotate_left(turn);
        models.sort_by_key(|(_, queue)| queue.lowest_priority());
        for (model, queue) in models {
            let name = Some(model.as_str()).filter(|model| !model.is_empty());
            // Most scans end here, at the cost of one comparison for each replica.
            if shared.placer.is_full(&view, name, now) {
                continue;
            }
            let is_absent = view.eligible(name, &[]).next().is_none();
            if is_absent && shared.time_to_wait(view.arrival(name, now)).is_some() {
                continue;
            }
            if let Some(done) = wake_first(&shared.placer, queue, view.seconds(now), now) {
                return Some(done);
            }
        }
        None
    }
}

impl QueueState {
    /// How long a request without a replica waits for one, as far as known. `None` if none is
    /// coming, or not soon enough, or the router leaves.
    fn time_to_wait(&self, arrival: Arrival) -> Option<Duration> {
        match arrival {
            _ if self.shutdown.is_draining() => None,
            Arrival::Within(left) => Some(left).filter(|left| *left <= self.limits.max_wait),
            Arrival::Starting => Some(Duration::ZERO),
            Arrival::Unknown => None,
        }
    }

    /// Resolves when `model` still has no replica after the longest wait for one.
    async fn wait_out_absence(&self, model: Option<&str>) {
        sleep(self.limits.max_wait).await;
        while self.placer.fleet.view().eligible(model, &[]).next().is_some() {
            sleep(ABSENCE_CHECK_INTERVAL).await;
        }
    }
}

/// Wakes the first request of a queue whose replica has room.
fn wake_first(placer: &Placer, queue: &mut Queue<QueuedRequest>, seconds: f64, now: Instant) -> Option<oneshot::Receiver<()>> {
    let mut chosen = None;
    while let Some((_, queued)) = queue.pop_where(seconds, SCAN_DEPTH, |waiting, queued| {
        chosen = placer.choose(&queued.prompt, &queued.tried, now);
        let Some(chosen) = &chosen else { return true };
        waiting.uncached_tokens = chosen.uncached_tokens();
        chosen.has_room()
    }) {
        let (ended, done) = oneshot::channel();
        // A client that has left meanwhile has given up its turn.
        if queued.turn_sender.send((chosen.take(), DispatchTurn(ended))).is_ok() {
            return Some(done);
        }
    }
    None
}

#[allow(clippy::cast_precision_loss, reason = "a sum of prompt lengths is far below 2^52")]
fn tokens(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests;
