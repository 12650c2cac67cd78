//! Late binding: a request whose replica has no room waits here, not in that engine's queue, so that it still goes where it is answered
//! soonest when its turn comes. One task wakes those that wait, one after the other; the order is the placement crate's queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hostler_placement::cost::has_room;
use hostler_placement::hold::{Place, Queue, Waiting};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::{Chosen, Placer, Prompt, candidate};

/// While somebody waits, replicas are looked at this often even if nothing was heard: reports come every 10 ms at most.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// And no more often than this, however much is heard: a look places up to `LOOKED_AT` requests in thought.
const LOOK_PAUSE: Duration = Duration::from_millis(1);

/// Requests that are looked at, in the order of their turns. One whose replica is busy keeps its turn and holds up nobody behind it. The
/// simulator's figures are for the same number.
const LOOKED_AT: usize = 32;

/// How long a request that was woken may take to be placed before the next one is woken all the same.
const TURN_DEADLINE: Duration = Duration::from_millis(100);

/// Why a request may not wait.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Overload {
    /// As many wait as may.
    Full,
    /// The router stops.
    Stopping,
    /// Its first token would come later than is allowed.
    TooLate {
        /// Seconds until then, as predicted.
        predicted: f64,
        /// Seconds that are allowed.
        allowed: f64,
    },
}

/// The requests that wait, for each model. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Hold(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    placer: Arc<Placer>,
    /// One for each model that had to wait once; an emptied one is kept, since places are unique within a queue and it remembers what it
    /// has released for whom. Only models that are served get here, so there are few.
    queues: Mutex<FxHashMap<String, Queue<Held>>>,
    /// Counts the looks, so that each begins with another model.
    looks: AtomicUsize,
    waiting: AtomicUsize,
    most: usize,
    /// Longest predicted time to a first token, in seconds.
    longest: f64,
    news: Notify,
}

/// A request that waits.
#[derive(Debug)]
struct Held {
    prompt: Arc<Prompt>,
    turn: oneshot::Sender<(Option<Chosen>, Turn)>,
}

/// The right to be sent now, until dropped: then the next request is woken.
#[derive(Debug)]
pub struct Turn(#[allow(dead_code, reason = "dropping it is the message")] oneshot::Sender<()>);

/// A place in the queue that is given up when dropped.
struct Holding<'a> {
    shared: &'a Shared,
    model: &'a str,
    place: Place,
}

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
        if let Some(queue) = self.shared.queues.lock().get_mut(self.model) {
            queue.remove(self.place);
        }
    }
}

impl Hold {
    /// Starts the task that wakes; it ends with `end`. At most `most` requests wait, and none whose first token is predicted to come
    /// after more than `longest`.
    #[must_use]
    pub fn start(placer: Arc<Placer>, most: usize, longest: Duration, end: CancellationToken) -> Self {
        let shared = Shared {
            placer,
            queues: Mutex::default(),
            looks: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            most,
            longest: longest.as_secs_f64(),
            news: Notify::new(),
        };
        let hold = Self(Arc::new(shared));
        let waking = hold.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = waking.wake() => {}
                () = end.cancelled() => {}
            }
        });
        hold
    }

    /// Requests that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.waiting.load(Ordering::Relaxed)
    }

    /// Whether requests for this model wait, so that a new one may not overtake them.
    #[must_use]
    pub fn is_held(&self, model: Option<&str>) -> bool {
        self.waiting() > 0 && self.0.queues.lock().get(model.unwrap_or_default()).is_some_and(|queue| !queue.is_empty())
    }

    /// Something has ended or begun to be answered: there may be room.
    pub fn news(&self) {
        if self.waiting() > 0 {
            self.0.news.notify_one();
        }
    }

    /// Waits for the request's turn, which comes with the replica that has room for it, or without one when all have gone. `chosen` is
    /// where it would go now.
    ///
    /// # Errors
    /// When it may not wait.
    pub async fn turn(&self, prompt: &Arc<Prompt>, waiting: Waiting, chosen: &Chosen) -> Result<(Option<Chosen>, Turn), Overload> {
        let shared = &self.0;
        let model = prompt.model().unwrap_or_default();
        let (sender, turn) = oneshot::channel();
        let holding = {
            let mut queues = shared.queues.lock();
            if shared.waiting.load(Ordering::Relaxed) >= shared.most {
                return Err(Overload::Full);
            }
            let queue = queues.entry(model.to_owned()).or_insert_with(|| Queue::new(shared.most));
            let ahead = tokens(queue.uncached_ahead(&waiting, waiting.since));
            let predicted = chosen.first_token() + chosen.seconds_per_token() * ahead;
            if predicted > shared.longest {
                return Err(Overload::TooLate { predicted, allowed: shared.longest });
            }
            let held = Held { prompt: prompt.clone(), turn: sender };
            let place = queue.push(waiting, held).map_err(|_| Overload::Full)?;
            shared.waiting.fetch_add(1, Ordering::Relaxed);
            Holding { shared, model, place }
        };
        shared.news.notify_one();
        let turn = turn.await;
        drop(holding);
        turn.map_err(|_| Overload::Stopping)
    }

    async fn wake(&self) {
        loop {
            if self.waiting() == 0 {
                self.0.news.notified().await;
            } else {
                let _ = timeout(LOOK_INTERVAL, self.0.news.notified()).await;
            }
            while let Some(done) = self.wake_one() {
                // The next one must see what this one takes.
                let _ = timeout(TURN_DEADLINE, done).await;
            }
            sleep(LOOK_PAUSE).await;
        }
    }

    /// Wakes the first request whose replica has room; or one whose replicas have all gone, so that it is told so. Models that share
    /// replicas are looked at by their most urgent band, and among equals in turns.
    fn wake_one(&self) -> Option<oneshot::Receiver<()>> {
        let shared = &self.0;
        let now = Instant::now();
        let view = shared.placer.fleet.view();
        let mut queues = shared.queues.lock();
        let mut models: Vec<(&String, &mut Queue<Held>)> = queues.iter_mut().filter(|(_, queue)| !queue.is_empty()).collect();
        let turn = shared.looks.fetch_add(1, Ordering::Relaxed) % models.len().max(1);
        models.rotate_left(turn);
        models.sort_by_key(|(_, queue)| queue.band());
        for (model, queue) in models {
            let mut eligible = view.eligible(Some(model.as_str()).filter(|model| !model.is_empty()), &[]).peekable();
            // Most looks end here: they cost a glance at each replica.
            if eligible.peek().is_some() && !eligible.any(|(_, replica)| has_room(&candidate(&view, replica, now))) {
                continue;
            }
            if let Some(done) = wake_first(&shared.placer, queue, view.seconds(now), now) {
                return Some(done);
            }
        }
        None
    }
}

/// Wakes the first of a queue whose replica has room.
fn wake_first(placer: &Placer, queue: &mut Queue<Held>, seconds: f64, now: Instant) -> Option<oneshot::Receiver<()>> {
    let mut chosen = None;
    while let Some((_, held)) = queue.pop_where(seconds, LOOKED_AT, |waiting, held| {
        chosen = placer.choose(&held.prompt, &[], now);
        let Some(chosen) = &chosen else { return true };
        waiting.uncached = chosen.uncached();
        chosen.has_room()
    }) {
        let (ended, done) = oneshot::channel();
        // Whoever has left meanwhile has given up its turn.
        if held.turn.send((chosen.take(), Turn(ended))).is_ok() {
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
