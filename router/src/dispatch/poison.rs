//! Requests that kill engines: one that was in flight when an engine died is a *suspect*. It is tried again, alone among suspects on its replica until its
//! engine has given the first tokens; with a second death it is refused everywhere. So those that only died with a killer are told apart from it.
//!
//! Where the suspects that wait could not all be tried within seconds (`trials::ALL_BEGUN`), several are on trial together. A death then convicts nobody, but
//! each of them is tried among at most half as many the next time. What follows holds for a request of which only one copy runs, within `poison_for`, for
//! any number of routers of which no two try suspects on one replica at the same moment:
//!
//! - one that kills before its first tokens kills two engines; where it is first tried among g, `2 + floor(log2 g)`, five at most;
//! - one that kills later kills two, if nobody else is on trial or has passed there. Else it is spared, twice; then its trial lasts as long as its answer, up
//!   to 30 s, and nobody is tried beside it: four, and where it strikes while it is tried among g, `floor(log2 g)` more, seven at most;
//! - one that kills nothing is refused if it was there when four engines died, or two, of which the second had no other suspect to blame: it alone was on
//!   trial, or there. No killer that strikes within its trial brings that about;
//! - a trial begins within `ALL_BEGUN` and the length of a trial, where the replicas that answer can try all who wait in that time, eight at once. One that was
//!   there at further deaths may wait longer, since it is tried among fewer.
//!
//! The tests prove it on a model of a fleet. The dispatch asks and tells what it sees; sessions tell what agents report, which is how several routers share
//! what they know. An agent's word is believed so far: whatever number of deaths the agents of one node tell of, they are one death of a request that this
//! router has not sent there.

mod record;
mod table;
mod trials;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hostler_proto::agent::v1 as wire;
use hostler_proto::lane::only_keeps_alive;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128_with_seed};

use crate::fleet::Replica;
pub(super) use table::Bars;
pub use table::{Ban, Fingerprint};
use table::{Life, Standing, Table};
use trials::Crowd;
pub(super) use trials::Expected;

/// Suspects that may wait for a replica; further ones are refused with 429.
const MOST_WAITING: usize = 4096;

/// While a suspect waits, places are looked for this often even if nothing was heard: replicas come back and trials run out of time silently.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Those that wait and are woken when a trial has ended: a few more than may begin then. The others look by themselves.
const MOST_WOKEN: usize = 2 * trials::MOST_TOGETHER;

/// Tokens, about, after which a stream's trial has ended. What kills an engine does so when its front-end or its grammar reads the request, while its images
/// are encoded, in its prefill, or in the first steps that sample from it. That is concluded from where vLLM does what depends on a request, not measured.
const TRIAL_EVENTS: usize = 3;

/// Names a request by its content and its tenant, so that no tenant can have another's request refused; `None` for one without a body, which asks
/// nothing that kills. All routers with the same key file agree, since tenants are known by name.
#[must_use]
pub(super) fn fingerprint(tenant: u64, path: &str, body: &[u8]) -> Option<Fingerprint> {
    (!body.is_empty()).then(|| xxh3_128_with_seed(body, xxh3_64_with_seed(path.as_bytes(), tenant)))
}

/// The one record of suspects of a router.
#[derive(Debug)]
pub struct Poison {
    table: Mutex<Table>,
    /// Those in the table: nobody looks further while there are none.
    suspects: AtomicUsize,
    waiting: AtomicUsize,
    /// A trial has ended, or somebody's standing has changed.
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
        let named = death.requests.iter().take(table::MOST_OF_A_DEATH);
        let requests: Vec<Fingerprint> = named.copied().map(Fingerprint::from).collect();
        let refused = self.change(|table| table.reported(&life, &requests, at, now));
        refused.iter().for_each(|(fingerprint, ban)| warn_of(*fingerprint, ban));
    }

    /// Requests with a death to their name, for the metrics.
    #[must_use]
    pub fn suspects(&self) -> usize {
        self.look(|table| table.suspects())
    }

    /// Watches a request that is about to be sent.
    pub(super) fn watch(self: &Arc<Self>, fingerprint: Option<Fingerprint>) -> Watched {
        let fingerprint = fingerprint.filter(|_| !self.window.is_zero());
        Watched { poison: self.clone(), fingerprint, trial: None, is_answered: false, sent: Instant::now() }
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
        let waiting = self.waiting.load(Ordering::Relaxed);
        (0..waiting.min(MOST_WOKEN)).for_each(|_| self.news.notify_one());
        changed
    }
}

fn warn_of(fingerprint: Fingerprint, ban: &Ban) {
    let replicas: Vec<&str> = ban.deaths.iter().map(|(replica, _)| &**replica).collect();
    tracing::warn!(
        request = format!("{fingerprint:032x}"),
        ?replicas,
        seconds = ban.remaining.as_secs(),
        "a request is refused from now on: engines have died with it"
    );
}

/// What the record says to a request that wants to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Clearance {
    /// It may go where it likes.
    Free,
    /// It may go where a trial may begin.
    Suspect,
    /// The same request is being tried.
    Later,
}

/// A request as the record sees it, from before its first attempt to its last byte. Dropped before its engine has answered
/// anything, it keeps its place on trial for a while.
#[derive(Debug)]
pub struct Watched {
    poison: Arc<Poison>,
    fingerprint: Option<Fingerprint>,
    trial: Option<u64>,
    /// Its engine has begun to answer.
    is_answered: bool,
    /// When its attempt under way was sent.
    sent: Instant,
}

impl Watched {
    /// Whether it may go now.
    ///
    /// # Errors
    /// When it is refused.
    pub(super) fn clearance(&self) -> Result<Clearance, Ban> {
        let Some(fingerprint) = self.fingerprint.filter(|_| self.poison.any()) else { return Ok(Clearance::Free) };
        let now = Instant::now();
        self.poison.look(|table| match table.standing(fingerprint, now) {
            Standing::Clear => Ok(Clearance::Free),
            Standing::Refused(ban) => Err(ban),
            Standing::Suspect if !table.is_tried(fingerprint, now) => Ok(Clearance::Suspect),
            Standing::Suspect => Ok(Clearance::Later),
        })
    }

    /// Where a suspect may be tried now, if there are so many replicas that it could go to at all; it may have `waited` for it.
    pub(super) fn bars(&self, eligible: usize, waited: Option<&Waiting>) -> Bars {
        let now = Instant::now();
        let waiting = self.poison.waiting.load(Ordering::Relaxed).max(1);
        let waited = waited.map_or(Duration::ZERO, |waiting| now.saturating_duration_since(waiting.since));
        let crowd = Crowd { waiting, eligible, waited };
        self.poison.table.lock().bars(self.fingerprint.unwrap_or_default(), crowd, now)
    }

    /// Begins its trial at a replica, if that is still possible.
    pub(super) fn begin_trial(&mut self, replica: &Replica, expected: Expected) -> bool {
        let Some(fingerprint) = self.fingerprint else { return true };
        self.trial = self.poison.table.lock().begin_trial(fingerprint, &life(replica), expected, Instant::now());
        self.trial.is_some()
    }

    /// Leave to wait for a trial.
    ///
    /// # Errors
    /// When as many wait as may.
    pub(super) fn queue(&self) -> Result<Waiting, Crowded> {
        if self.poison.waiting.fetch_add(1, Ordering::Relaxed) >= MOST_WAITING {
            self.poison.waiting.fetch_sub(1, Ordering::Relaxed);
            return Err(Crowded);
        }
        Ok(Waiting { poison: self.poison.clone(), since: Instant::now() })
    }

    /// It is sent now.
    pub(super) fn sent(&mut self, now: Instant) {
        self.sent = now;
    }

    /// Its engine is lost: the connection broke, or the engine says that its core is dead. Whether others are to blame: it may be tried again then, however
    /// often it was.
    pub(super) fn lost(&mut self, replica: &Replica) -> bool {
        let Some(fingerprint) = self.fingerprint else { return false };
        let now = Instant::now();
        let blamed = self.poison.change(|table| {
            let blamed = table.blame(fingerprint, &life(replica), self.sent, now);
            if let Some(trial) = self.trial.take() {
                table.trials().end(trial, fingerprint, false, now);
            }
            blamed
        });
        blamed.ban.iter().for_each(|ban| warn_of(fingerprint, ban));
        blamed.is_excused
    }

    /// Its engine has begun to answer: it does not hang.
    pub(super) fn answered(&mut self) {
        self.is_answered = true;
        if let Some(trial) = self.trial {
            self.poison.table.lock().trials().answered(trial, Instant::now());
        }
    }

    /// What ends the trial of a stream when it has given its first tokens, if it is on trial.
    pub(super) fn passage(&self, token: &'static [u8]) -> Option<Passage> {
        self.trial.map(|trial| Passage { poison: self.poison.clone(), trial, token, left: TRIAL_EVENTS })
    }

    /// It was answered, whole.
    pub(super) fn survived(&mut self) {
        if let Some(fingerprint) = self.fingerprint.filter(|_| self.trial.is_some() || self.poison.any()) {
            let now = Instant::now();
            let trial = self.trial.take();
            let cleared = self.poison.look(|table| {
                trial.iter().for_each(|trial| table.trials().end(*trial, fingerprint, true, now));
                table.clear(fingerprint, now)
            });
            if cleared || trial.is_some() {
                self.poison.change(|_| ());
            }
        }
    }

    /// The trial has ended, and nothing is known by it.
    pub(super) fn end_trial(&mut self) {
        if let (Some(trial), Some(fingerprint)) = (self.trial.take(), self.fingerprint) {
            self.poison.change(|table| table.trials().end(trial, fingerprint, false, Instant::now()));
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if self.is_answered {
            self.end_trial();
        } else if let (Some(trial), Some(fingerprint)) = (self.trial.take(), self.fingerprint) {
            self.poison.change(|table| table.trials().give_up(trial, fingerprint, Instant::now()));
        }
    }
}

/// Counts the first tokens of a stream that is on trial.
#[derive(Debug)]
pub(super) struct Passage {
    poison: Arc<Poison>,
    trial: u64,
    /// What each event with a token has.
    token: &'static [u8],
    left: usize,
}

impl Passage {
    /// Takes in a piece of the stream; whether the trial is over.
    pub(super) fn look(&mut self, piece: &[u8]) -> bool {
        if only_keeps_alive(piece) {
            return false;
        }
        self.left = self.left.saturating_sub(memchr::memmem::find_iter(piece, self.token).count());
        if self.left == 0 {
            self.poison.change(|table| table.trials().pass(self.trial, Instant::now()));
        }
        self.left == 0
    }
}

impl Bars {
    /// How many may be on trial together.
    pub(in crate::dispatch) fn together(&self) -> usize {
        self.together
    }

    /// Whether the suspect may be tried there.
    pub(in crate::dispatch) fn admit(&self, replica: &Replica) -> bool {
        let is = |life: &Life| life.replica == replica.id && life.epoch == replica.epoch;
        self.only.as_ref().map_or_else(|| !self.closed.contains(&replica.id), is) && !self.fallen.iter().any(is)
    }

    /// Whether others of which one may yet kill run there.
    pub(in crate::dispatch) fn is_occupied(&self, replica: &Replica) -> bool {
        self.only.is_none() && self.occupied.contains(&replica.id)
    }
}

fn life(replica: &Replica) -> Life {
    Life { replica: replica.id.clone(), epoch: replica.epoch }
}

/// As many suspects wait as may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Crowded;

/// Counts one that waits for its trial.
#[derive(Debug)]
pub(super) struct Waiting {
    poison: Arc<Poison>,
    since: Instant,
}

impl Waiting {
    /// Waits for a moment at which it may be worth while to ask again.
    pub(super) async fn moment(&self) {
        let _ = timeout(LOOK_INTERVAL, self.poison.news.notified()).await;
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.poison.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Display for Ban {
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
