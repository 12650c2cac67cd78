//! Requests that kill engines: one that was in flight when an engine died is a suspect and is tried again only alone among suspects; with
//! a second death it is refused everywhere. So it costs a fleet two engines, and those that only died with it are told apart from it.
//!
//! The dispatch asks and tells what it sees; sessions tell what agents report, which is how several routers share what they know.

mod table;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hostler_proto::agent::v1 as wire;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128_with_seed};

use crate::fleet::Replica;
pub(super) use table::Barred;
pub use table::{Fingerprint, Sentence};
use table::{Life, Standing, Table};

/// Suspects that may wait for a replica; further ones are refused with 429.
const MOST_WAITING: usize = 4096;

/// While a suspect waits, places are looked for this often even if nothing was heard: replicas come back and trials run out of time silently.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Names a request by its content; `None` for one without a body, which asks nothing that kills.
#[must_use]
pub(super) fn fingerprint(path: &str, body: &[u8]) -> Option<Fingerprint> {
    (!body.is_empty()).then(|| xxh3_128_with_seed(body, xxh3_64(path.as_bytes())))
}

/// The one record of suspects of a router.
#[derive(Debug)]
pub struct Poison {
    table: Mutex<Table>,
    /// Those in the table: nobody looks further while there are none.
    suspects: AtomicUsize,
    waiting: AtomicUsize,
    /// A trial has ended, or a standing has changed.
    news: Notify,
    window: Duration,
}

impl Poison {
    /// A record in which a death counts for `window`; zero keeps none.
    #[must_use]
    pub fn new(window: Duration) -> Arc<Self> {
        Arc::new(Self {
            table: Mutex::new(Table::new(window, Instant::now())),
            suspects: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            news: Notify::new(),
            window,
        })
    }

    /// An agent has reported the death of one of `replica`'s engines.
    pub fn reported(&self, replica: &str, death: &wire::Death) {
        if self.window.is_zero() || death.requests.is_empty() {
            return;
        }
        let now = Instant::now();
        // A clock that began after that knows no such moment: then it was long ago, and too long.
        let Some(at) = now.checked_sub(Duration::from_millis(death.age_ms)) else { return };
        let life = Life { replica: replica.into(), epoch: death.epoch };
        let requests: Vec<Fingerprint> = death.requests.iter().copied().map(Fingerprint::from).collect();
        let refused = self.change(|table| table.reported(&life, &requests, at, now));
        refused.iter().for_each(|(fingerprint, sentence)| warn_of(*fingerprint, sentence));
    }

    /// Requests with a death to their name, for the metrics.
    #[must_use]
    pub fn suspects(&self) -> usize {
        self.look(|table| table.suspects())
    }

    /// Watches a request that is about to be sent.
    pub(super) fn watch(self: &Arc<Self>, fingerprint: Option<Fingerprint>) -> Watched {
        let fingerprint = fingerprint.filter(|_| !self.window.is_zero());
        Watched { poison: self.clone(), fingerprint, seat: None, is_answered: false, sent: Instant::now() }
    }

    fn any(&self) -> bool {
        self.suspects.load(Ordering::Relaxed) > 0
    }

    /// Looks at the table.
    fn look<T>(&self, look: impl FnOnce(&mut Table) -> T) -> T {
        let mut table = self.table.lock();
        table.sweep(Instant::now());
        let seen = look(&mut table);
        self.suspects.store(table.suspects(), Ordering::Relaxed);
        seen
    }

    /// Changes the table, and tells those who wait.
    fn change<T>(&self, change: impl FnOnce(&mut Table) -> T) -> T {
        let changed = self.look(change);
        self.news.notify_waiters();
        changed
    }
}

fn warn_of(fingerprint: Fingerprint, sentence: &Sentence) {
    let replicas: Vec<&str> = sentence.deaths.iter().map(|(replica, _)| &**replica).collect();
    tracing::warn!(
        request = format!("{fingerprint:032x}"),
        ?replicas,
        seconds = sentence.remaining.as_secs(),
        "a request is refused from now on: engines have died with it"
    );
}

/// What the record says to a request that wants to be sent.
#[derive(Debug)]
pub(super) enum Leave {
    /// It may go where it likes.
    Free,
    /// It may go, but not to these replicas.
    Alone(Vec<Barred>),
    /// The same request is being tried.
    Later,
}

/// A request as the record sees it, from before its first attempt to its last byte. Dropped before its engine has answered
/// anything, it keeps its place on trial for a while.
#[derive(Debug)]
pub struct Watched {
    poison: Arc<Poison>,
    fingerprint: Option<Fingerprint>,
    seat: Option<u64>,
    /// Its engine has begun to answer.
    is_answered: bool,
    /// When its attempt under way was sent.
    sent: Instant,
}

impl Watched {
    /// Where it may go now.
    ///
    /// # Errors
    /// When it is refused.
    pub(super) fn leave(&self) -> Result<Leave, Sentence> {
        let Some(fingerprint) = self.fingerprint.filter(|_| self.poison.any()) else { return Ok(Leave::Free) };
        let now = Instant::now();
        self.poison.look(|table| match table.standing(fingerprint, now) {
            Standing::Clear => Ok(Leave::Free),
            Standing::Refused(sentence) => Err(sentence),
            Standing::Suspect if !table.is_tried(fingerprint, now) => Ok(Leave::Alone(table.barred(now).collect())),
            Standing::Suspect => Ok(Leave::Later),
        })
    }

    /// Takes the place on trial at a replica, if it is still free; `eligible` is the number of replicas that it could have gone to.
    #[allow(clippy::cast_precision_loss, reason = "counts of replicas and of waiting requests are small")]
    pub(super) fn sit(&mut self, replica: &Replica, eligible: usize) -> bool {
        let Some(fingerprint) = self.fingerprint else { return true };
        let share = eligible as f64 / (self.poison.waiting.load(Ordering::Relaxed) + 1) as f64;
        self.seat = self.poison.table.lock().sit(fingerprint, &life(replica), share, Instant::now());
        self.seat.is_some()
    }

    /// Leave to wait for a place.
    ///
    /// # Errors
    /// When as many wait as may.
    pub(super) fn queue(&self) -> Result<Waiting, Crowded> {
        if self.poison.waiting.fetch_add(1, Ordering::Relaxed) >= MOST_WAITING {
            self.poison.waiting.fetch_sub(1, Ordering::Relaxed);
            return Err(Crowded);
        }
        Ok(Waiting(self.poison.clone()))
    }

    /// It is sent now.
    pub(super) fn sent(&mut self, now: Instant) {
        self.sent = now;
    }

    /// Its engine is lost: the connection broke, or the engine says that its core is dead.
    pub(super) fn lost(&mut self, replica: &Replica) {
        if let Some(fingerprint) = self.fingerprint {
            let refused = self.poison.change(|table| table.blame(fingerprint, &life(replica), self.sent, Instant::now()));
            refused.iter().for_each(|sentence| warn_of(fingerprint, sentence));
        }
        self.rise();
    }

    /// Its engine has begun to answer: it does not hang.
    pub(super) fn answered(&mut self) {
        self.is_answered = true;
    }

    /// It was answered, whole.
    pub(super) fn survived(&mut self) {
        if let Some(fingerprint) = self.fingerprint.filter(|_| self.poison.any()) {
            let cleared = self.poison.look(|table| table.clear(fingerprint, Instant::now()));
            if cleared {
                self.poison.news.notify_waiters();
            }
        }
        self.rise();
    }

    /// The trial has ended.
    pub(super) fn rise(&mut self) {
        if let Some(seat) = self.seat.take() {
            self.poison.change(|table| table.rise(seat));
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if self.is_answered {
            self.rise();
        } else if let Some(seat) = self.seat.take() {
            self.poison.change(|table| table.give_up(seat, Instant::now()));
        }
    }
}

impl Barred {
    /// Whether this is the replica.
    pub(in crate::dispatch) fn is(&self, replica: &Replica) -> bool {
        self.replica == replica.id && self.epoch.is_none_or(|epoch| epoch == replica.epoch)
    }
}

fn life(replica: &Replica) -> Life {
    Life { replica: replica.id.clone(), epoch: replica.epoch }
}

/// As many suspects wait as may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Crowded;

/// Counts one that waits for a place.
#[derive(Debug)]
pub(super) struct Waiting(Arc<Poison>);

impl Waiting {
    /// Waits for a moment at which it may be worth while to ask again.
    pub(super) async fn moment(&self) {
        let _ = timeout(LOOK_INTERVAL, self.0.news.notified()).await;
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Display for Sentence {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.deaths.len();
        write!(
            formatter,
            "this request is refused for another {} s: it was in flight when {count} engines died (",
            self.remaining.as_secs().max(1)
        )?;
        for (index, (replica, ago)) in self.deaths.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(formatter, "{comma}{replica} {} s ago", ago.as_secs())?;
        }
        formatter.write_str("). It is known by its exact content; do not send it again unchanged")
    }
}

#[cfg(test)]
mod tests;
