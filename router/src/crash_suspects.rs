//! Finds requests that crash engines: one that was in flight when an engine crashed is a *suspect*.
//!
//! A suspect is tried again, alone among suspects on its replica until its engine has given the
//! first tokens. With a second crash it is refused everywhere. This distinguishes the request that
//! is the cause from those that only ran beside it.
//!
//! If the waiting suspects could not all be tried within seconds (`trials::TRIAL_START_TARGET`),
//! several are on trial together. A crash then bans nobody, but each of them is tried among at most
//! half as many the next time. The following bounds hold for a request of which only one copy runs,
//! within `crash_suspect_ttl`, for any number of routers of which no two try suspects on one
//! replica at the same moment:
//!
//! - A request that kills before its first tokens kills two engines; if it is first tried among g,
//!   `2 + floor(log2 g)`, five at most.
//! - A request that kills later kills two, if nobody else is on trial or has passed there.
//!   Otherwise it is spared, twice; then its trial lasts as long as its answer, up to 30 s, and
//!   nobody is tried beside it: four, and if it strikes while it is tried among g, `floor(log2 g)`
//!   more, seven at most.
//! - A request that kills nothing is refused if it was there when four engines crashed, or two, of
//!   which the second had no other suspect to blame: it alone was on trial, or there. No request
//!   that kills engines within its trial causes that.
//! - A trial begins within `TRIAL_START_TARGET` and the length of a trial, if the answering
//!   replicas can try all waiting suspects in that time, eight at once. A suspect that was there at
//!   further crashes may wait longer, because it is tried among fewer.
//!
//! A tenant whose requests have crashed three engines within that time is *confined*: all its
//! requests for a model go to one replica (`tenant_crashes`).
//!
//! The tests prove these bounds on a model of a fleet. The dispatch asks and records its
//! observations; sessions record agents' reports, which is how several routers share their
//! knowledge. An agent's word is believed only so far: however many crashes the agents of one node
//! report, they are one crash of a request that this router has not sent there.

mod standing;
mod suspect_record;
mod suspect_table;
mod tenant_crashes;
mod trials;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hostler_proto::lane::is_keep_alive_comment;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::engine_life::EngineLife;
use crate::event_log::EventLog;
use standing::SuspectStanding;
pub(crate) use standing::{Ban, Fingerprint};
pub(crate) use suspect_table::MAX_REQUESTS_PER_CRASH;
use suspect_table::SuspectTable;
pub(crate) use suspect_table::TrialConstraints;
pub(crate) use tenant_crashes::{Confinement, ConfinementChoices};
use trials::TrialDemand;
pub(crate) use trials::TrialEstimate;

/// Most suspects queued for a trial; further ones are refused with 429.
const MAX_QUEUED_SUSPECTS: usize = 4096;

/// How often a waiting suspect looks for a place without being woken. Replicas come back and trials
/// time out silently.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Waiting suspects that are woken when a trial ends: a few more than may begin then. The others
/// poll.
const MAX_WOKEN: usize = 2 * trials::MAX_CONCURRENT_TRIALS;

/// About how many tokens end a stream's trial.
///
/// A request kills an engine while the front-end or its grammar reads it, while its images are
/// encoded, in its prefill, or in the first steps that sample from it. This is concluded from
/// vLLM's source, not measured.
const TRIAL_TOKENS: usize = 3;

/// Names a request by its tenant, in the upper half, and its content.
///
/// Thus no tenant can have another's request refused. `None` for a request without a body, which
/// asks nothing that kills. All routers with the same key file agree, because tenants are known by
/// name.
#[must_use]
pub(crate) fn fingerprint(tenant: u64, path: &str, body: &[u8]) -> Option<Fingerprint> {
    let content = || xxh3_64_with_seed(body, xxh3_64_with_seed(path.as_bytes(), tenant));
    (!body.is_empty()).then(|| Fingerprint::from(tenant) << 64 | Fingerprint::from(content()))
}

/// An engine's crash as its agent reports it.
#[derive(Debug)]
pub(crate) struct ReportedCrash {
    pub epoch: u64,
    pub age: Duration,
    /// The requests that were in flight; none if no request is to blame.
    pub requests: Vec<Fingerprint>,
}

#[derive(Debug)]
pub(crate) struct CrashSuspects {
    table: Mutex<SuspectTable>,
    /// Records in the table. Nobody looks further while there are none.
    suspect_count: AtomicUsize,
    /// Confined tenants. Nobody looks further while there are none.
    confined_count: AtomicUsize,
    queued_count: AtomicUsize,
    /// Notified when a trial has ended or a suspect's standing has changed.
    change_notify: Notify,
    ttl: Duration,
    events: EventLog,
}

impl CrashSuspects {
    /// Creates a record in which a crash counts for `ttl`. Zero keeps no record.
    #[must_use]
    pub(crate) fn new(ttl: Duration, events: EventLog) -> Arc<Self> {
        Arc::new(Self {
            table: Mutex::new(SuspectTable::new(ttl, Instant::now())),
            suspect_count: AtomicUsize::new(0),
            confined_count: AtomicUsize::new(0),
            queued_count: AtomicUsize::new(0),
            change_notify: Notify::new(),
            ttl,
            events,
        })
    }

    /// Records an agent's report of the crash of one of `replica`'s engines.
    pub(crate) fn record_reported_crash(&self, replica: &str, crash: &ReportedCrash) {
        if self.ttl.is_zero() {
            return;
        }
        let now = Instant::now();
        // A clock that began later knows no such moment: the crash was too long ago.
        let Some(at) = now.checked_sub(crash.age) else { return };
        let life = EngineLife { replica: replica.into(), epoch: crash.epoch };
        if crash.requests.is_empty() {
            self.update_table(|table| table.excuse_crash(&life, at, now));
            return;
        }
        let refused = self.update_table(|table| table.record_reported_crash(&life, &crash.requests, at, now));
        refused.iter().for_each(|(fingerprint, ban)| self.note_ban(*fingerprint, ban));
    }

    /// How many requests are charged with a crash, for the metrics.
    #[must_use]
    pub(crate) fn suspect_count(&self) -> usize {
        self.with_table(|table| table.suspect_count())
    }

    /// How many tenants are confined to one replica, for the metrics.
    #[must_use]
    pub(crate) fn confined_count(&self) -> usize {
        self.with_table(|table| table.confined_count(Instant::now()))
    }

    pub(crate) fn watch(self: &Arc<Self>, fingerprint: Option<Fingerprint>) -> CrashWatch {
        let fingerprint = fingerprint.filter(|_| !self.ttl.is_zero());
        CrashWatch { crash_suspects: self.clone(), fingerprint, trial_id: None, is_answered: false, sent_at: Instant::now() }
    }

    fn has_suspects(&self) -> bool {
        self.suspect_count.load(Ordering::Relaxed) > 0
    }

    /// Reads or changes the table after removing expired entries.
    fn with_table<T>(&self, inspect: impl FnOnce(&mut SuspectTable) -> T) -> T {
        let mut table = self.table.lock();
        table.sweep(Instant::now());
        let seen = inspect(&mut table);
        self.suspect_count.store(table.suspect_count(), Ordering::Relaxed);
        self.confined_count.store(table.confined_count(Instant::now()), Ordering::Relaxed);
        seen
    }

    /// Changes the table, and wakes waiting suspects.
    fn update_table<T>(&self, change: impl FnOnce(&mut SuspectTable) -> T) -> T {
        let changed = self.with_table(change);
        let waiting = self.queued_count.load(Ordering::Relaxed);
        (0..waiting.min(MAX_WOKEN)).for_each(|_| self.change_notify.notify_one());
        changed
    }

    fn note_ban(&self, fingerprint: Fingerprint, ban: &Ban) {
        let replicas: Vec<&str> = ban.crashes.iter().map(|(replica, _)| &**replica).collect();
        tracing::warn!(
            event = "request_banned",
            request = format!("{fingerprint:032x}"),
            ?replicas,
            seconds = ban.remaining.as_secs(),
            "a request is refused from now on: engines have crashed with it"
        );
        let words = format!("a request is refused from now on: engines have crashed with it, on {}", replicas.join(", "));
        self.events.record("request_banned", "", &words, true);
    }
}

/// Whether a request may be sent now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clearance {
    /// The request may go to any replica.
    Free,
    /// The request may go only to a replica where a trial may begin.
    NeedsTrial,
    /// The request must wait: the same request is on trial.
    Wait,
}

/// Follows a request for the crash suspects, from before its first attempt to its last byte. A
/// watch dropped on trial, before the engine has answered anything, keeps its place there for a
/// while.
#[derive(Debug)]
pub(crate) struct CrashWatch {
    crash_suspects: Arc<CrashSuspects>,
    fingerprint: Option<Fingerprint>,
    trial_id: Option<u64>,
    is_answered: bool,
    sent_at: Instant,
}

impl CrashWatch {
    pub(crate) fn clearance(&self) -> Result<Clearance, Ban> {
        let Some(fingerprint) = self.fingerprint.filter(|_| self.crash_suspects.has_suspects()) else { return Ok(Clearance::Free) };
        let now = Instant::now();
        self.crash_suspects.with_table(|table| match table.standing(fingerprint, now) {
            SuspectStanding::Clear => Ok(Clearance::Free),
            SuspectStanding::Banned(ban) => Err(ban),
            SuspectStanding::Suspect if !table.is_on_trial(fingerprint, now) => Ok(Clearance::NeedsTrial),
            SuspectStanding::Suspect => Ok(Clearance::Wait),
        })
    }

    /// Whether the tenant's requests may go only to one replica.
    pub(crate) fn is_confined(&self) -> bool {
        let fingerprint = self.fingerprint.filter(|_| self.crash_suspects.confined_count.load(Ordering::Relaxed) > 0);
        fingerprint.is_some_and(|fingerprint| self.crash_suspects.with_table(|table| table.is_confined(fingerprint, Instant::now())))
    }

    /// Where the request may go for this `model` if its tenant is confined.
    pub(crate) fn confine(&self, model: Option<&str>, choices: &ConfinementChoices) -> Option<Confinement> {
        let fingerprint = self.fingerprint?;
        self.crash_suspects.with_table(|table| table.confine(fingerprint, model, choices, Instant::now()))
    }

    /// Where a suspect may be tried now, given how many replicas it could go to and how long it has
    /// `waited`.
    pub(crate) fn trial_constraints(&self, eligible: usize, waited: Option<&TrialWaiter>) -> TrialConstraints {
        let now = Instant::now();
        let waiting = self.crash_suspects.queued_count.load(Ordering::Relaxed).max(1);
        let waited = waited.map_or(Duration::ZERO, |waiting| now.saturating_duration_since(waiting.waiting_since));
        let demand = TrialDemand { waiting, eligible, waited };
        self.crash_suspects.table.lock().trial_constraints(self.fingerprint.unwrap_or_default(), demand, now)
    }

    /// Begins the request's trial at a replica; `false` if that is no longer possible.
    pub(crate) fn begin_trial(&mut self, life: &EngineLife, expected: TrialEstimate) -> bool {
        let Some(fingerprint) = self.fingerprint else { return true };
        self.trial_id = self.crash_suspects.table.lock().begin_trial(fingerprint, life, expected, Instant::now());
        self.trial_id.is_some()
    }

    pub(crate) fn queue_for_trial(&self) -> Result<TrialWaiter, TrialQueueFull> {
        if self.crash_suspects.queued_count.fetch_add(1, Ordering::Relaxed) >= MAX_QUEUED_SUSPECTS {
            self.crash_suspects.queued_count.fetch_sub(1, Ordering::Relaxed);
            return Err(TrialQueueFull);
        }
        Ok(TrialWaiter { crash_suspects: self.crash_suspects.clone(), waiting_since: Instant::now() })
    }

    pub(crate) fn mark_sent(&mut self, now: Instant) {
        self.sent_at = now;
        self.is_answered = false;
    }

    /// Records the loss of the request's engine: the connection broke, or the engine reports that
    /// its core is dead. Returns `true` if others are to blame: the request may then be retried,
    /// however often this happens.
    pub(crate) fn record_engine_loss(&mut self, life: &EngineLife) -> bool {
        let Some(fingerprint) = self.fingerprint else { return false };
        let now = Instant::now();
        let blamed = self.crash_suspects.update_table(|table| {
            let blamed = table.blame(fingerprint, life, self.sent_at, now);
            if let Some(trial) = self.trial_id.take() {
                table.trials().end(trial, fingerprint, false, now);
            }
            blamed
        });
        blamed.ban.iter().for_each(|ban| self.crash_suspects.note_ban(fingerprint, ban));
        blamed.is_excused
    }

    /// Records that the engine has begun to answer, so it does not hang.
    pub(crate) fn mark_answered(&mut self) {
        self.is_answered = true;
        if let Some(trial) = self.trial_id {
            self.crash_suspects.table.lock().trials().mark_answered(trial, Instant::now());
        }
    }

    /// Ends the trial of a stream after its first tokens; `None` if it is not on trial.
    pub(crate) fn trial_progress(&self, token_marker: &'static [u8]) -> Option<TrialProgress> {
        self.trial_id.map(|trial_id| TrialProgress {
            crash_suspects: self.crash_suspects.clone(),
            trial_id,
            token_marker,
            remaining_tokens: TRIAL_TOKENS,
        })
    }

    /// Records that the request was answered to the end, so it is no suspect.
    pub(crate) fn clear_suspicion(&mut self) {
        if let Some(fingerprint) = self.fingerprint.filter(|_| self.trial_id.is_some() || self.crash_suspects.has_suspects()) {
            let now = Instant::now();
            let trial = self.trial_id.take();
            let cleared = self.crash_suspects.with_table(|table| {
                trial.iter().for_each(|trial| table.trials().end(*trial, fingerprint, true, now));
                table.acquit(fingerprint, now)
            });
            if cleared || trial.is_some() {
                self.crash_suspects.update_table(|_| ());
            }
        }
    }

    /// Ends the trial without a verdict.
    pub(crate) fn end_trial(&mut self) {
        if let (Some(trial), Some(fingerprint)) = (self.trial_id.take(), self.fingerprint) {
            self.crash_suspects.update_table(|table| table.trials().end(trial, fingerprint, false, Instant::now()));
        }
    }
}

impl Drop for CrashWatch {
    fn drop(&mut self) {
        if self.is_answered {
            self.end_trial();
        } else if let (Some(trial), Some(fingerprint)) = (self.trial_id.take(), self.fingerprint) {
            self.crash_suspects.update_table(|table| table.trials().abandon(trial, fingerprint, Instant::now()));
        }
    }
}

/// Counts the first tokens of a stream that is on trial.
#[derive(Debug)]
pub(crate) struct TrialProgress {
    crash_suspects: Arc<CrashSuspects>,
    trial_id: u64,
    /// Text that occurs in each event with a token.
    token_marker: &'static [u8],
    remaining_tokens: usize,
}

impl TrialProgress {
    /// Counts the tokens of a piece. Returns `true` once the trial is over.
    pub(crate) fn observe_chunk(&mut self, piece: &[u8]) -> bool {
        if is_keep_alive_comment(piece) {
            return false;
        }
        self.remaining_tokens = self.remaining_tokens.saturating_sub(memchr::memmem::find_iter(piece, self.token_marker).count());
        if self.remaining_tokens == 0 {
            self.crash_suspects.update_table(|table| table.trials().pass(self.trial_id, Instant::now()));
        }
        self.remaining_tokens == 0
    }
}

impl TrialConstraints {
    pub(crate) fn max_concurrent(&self) -> usize {
        self.max_concurrent
    }

    pub(crate) fn is_allowed(&self, engine: &EngineLife) -> bool {
        let is_open = || !self.closed_replicas.contains(&engine.replica);
        self.required_engine.as_ref().map_or_else(is_open, |only| only == engine) && !self.crashed_engines.contains(engine)
    }

    /// Whether requests run there, one of which may still crash the engine.
    pub(crate) fn is_occupied(&self, replica: &Arc<str>) -> bool {
        self.required_engine.is_none() && self.occupied_replicas.contains(replica)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TrialQueueFull;

/// A suspect that waits for its trial, counted until this is dropped.
#[derive(Debug)]
pub(crate) struct TrialWaiter {
    crash_suspects: Arc<CrashSuspects>,
    waiting_since: Instant,
}

impl TrialWaiter {
    /// Waits until asking again may be worthwhile.
    pub(crate) async fn wait_for_change(&self) {
        let _ = timeout(POLL_INTERVAL, self.crash_suspects.change_notify.notified()).await;
    }
}

impl Drop for TrialWaiter {
    fn drop(&mut self) {
        self.crash_suspects.queued_count.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
