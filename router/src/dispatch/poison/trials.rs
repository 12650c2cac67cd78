//! Which suspects are on trial where, and whether another one may begin there: a pure table, with time as an argument.

use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;
use tokio::time::Instant;

use super::table::{Fingerprint, Life};

/// Suspects that are on trial together at most. A death among so many leaves four more engines at risk at most, each costs minutes of a GPU; and with
/// eight at a time, five hundred take nine rounds on seven engines.
pub(super) const MOST_TOGETHER: usize = 8;

/// Suspects are tried one at a time on each replica as long as the trials of all have begun after about this time, and together where not.
pub(super) const ALL_BEGUN: Duration = Duration::from_secs(3);

/// A trial lasts no longer: longer than a hang takes to be noticed (10 s, unless the agent is told otherwise).
pub(super) const LONGEST_TRIAL: Duration = Duration::from_secs(30);

/// Beyond twice the predicted time to the first token, so much longer an engine may take before it looks as if it hung, and a plain answer, which shows its
/// first token with its last, is on trial.
const MARGIN: Duration = Duration::from_secs(1);

/// After its first byte, an answer is on trial no longer than this, whether or not its client reads on.
const AFTER_FIRST_BYTE: Duration = Duration::from_secs(1);

/// One that was given up on trial, before its engine had answered anything, keeps its place for so long at most: the engine may hang, and who comes
/// next would be blamed for it. An agent notices a hang after 10 s, unless told otherwise.
const LINGERS: Duration = Duration::from_secs(15);

/// A suspect that wants to be tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entrant {
    pub(super) fingerprint: Fingerprint,
    /// The most that may be on trial together with it, itself included.
    pub(super) limit: usize,
    /// Its trial lasts as long as its answer: it may be one that kills late.
    pub(super) is_long: bool,
}

/// How many want to be tried, and where.
#[derive(Debug, Clone, Copy)]
pub(super) struct Crowd {
    /// Suspects that wait.
    pub(super) waiting: usize,
    /// Replicas that they may go to.
    pub(super) eligible: usize,
    /// How long this one has waited.
    pub(super) waited: Duration,
}

/// What a trial begins with.
#[derive(Debug, Clone, Copy)]
pub(in crate::dispatch) struct Expected {
    /// Predicted time to the first token.
    pub(in crate::dispatch) first_token: Duration,
    /// Whether it shows each token when it is there.
    pub(in crate::dispatch) streams: bool,
    /// How many may be on trial together.
    pub(in crate::dispatch) together: usize,
}

/// A suspect whose answer has not ended.
#[derive(Debug)]
struct Trial {
    number: u64,
    life: Life,
    entrant: Entrant,
    begun: Instant,
    /// When an engine that does not hang has answered.
    due: Instant,
    /// When it has passed, unless something else is known before.
    until: Instant,
    /// Whoever had it has left.
    is_left: bool,
}

/// Who was at an engine when it died.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Scene {
    /// Those on trial.
    pub(super) undecided: Vec<Fingerprint>,
    /// Those that had passed their trial and ran on, in order.
    pub(super) passed: Vec<Fingerprint>,
    /// How many suspects an agent says were there; one where it has not said it.
    pub(super) named: usize,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Trials {
    /// Those that have not passed.
    open: Vec<Trial>,
    /// Those that have, by request, as long as their answers last.
    passed: FxHashMap<Fingerprint, Vec<Trial>>,
    next: u64,
    /// How long trials last, on average over the last few.
    pace: Option<Duration>,
}

impl Trial {
    fn is_open(&self, now: Instant) -> bool {
        self.until > now
    }
}

impl Trials {
    /// How many may be on trial together, for all that wait to have begun in time.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "small numbers; `as` saturates"
    )]
    pub(super) fn together(&self, crowd: Crowd) -> usize {
        let Some(pace) = self.pace else { return 1 };
        let left = ALL_BEGUN.saturating_sub(crowd.waited).as_secs_f64();
        // Rounds in what is left of the time, this one included.
        let rounds = 1.0 + (left / pace.as_secs_f64().max(0.001)).floor();
        if left == 0.0 {
            return MOST_TOGETHER;
        }
        let group = crowd.waiting as f64 / (crowd.eligible.max(1) as f64 * rounds);
        (group.ceil() as usize).clamp(1, MOST_TOGETHER)
    }

    /// The replicas where this one may not begin, as the others there stand.
    pub(super) fn closed_to(&self, entrant: Entrant, together: usize, now: Instant) -> Vec<Arc<str>> {
        let open = || self.open.iter().filter(|trial| trial.is_open(now));
        let mut closed: Vec<Arc<str>> = Vec::new();
        for trial in open() {
            let replica = &trial.life.replica;
            if !closed.contains(replica) && !self.may_begin(entrant, replica, together, now) {
                closed.push(replica.clone());
            }
        }
        closed
    }

    fn may_begin(&self, entrant: Entrant, replica: &Arc<str>, together: usize, now: Instant) -> bool {
        let (mut beside, mut most) = (0, entrant.limit.min(together));
        for trial in self.open.iter().filter(|trial| trial.is_open(now) && trial.life.replica == *replica) {
            beside += 1;
            most = most.min(trial.entrant.limit);
            // Beside one that an engine should have answered by now there is nothing to be gained.
            if trial.due <= now {
                most = 0;
            }
        }
        beside == 0 || beside < most
    }

    /// Replicas where some that have passed run on, if there may be others: one of them may be one that kills late.
    pub(super) fn occupied(&self, replicas: usize) -> Vec<Arc<str>> {
        if self.passed.len() >= replicas {
            return Vec::new();
        }
        self.passed.values().flatten().map(|trial| trial.life.replica.clone()).collect()
    }

    /// Whether the same request is on trial.
    pub(super) fn is_tried(&self, fingerprint: Fingerprint, now: Instant) -> bool {
        self.open.iter().any(|trial| trial.entrant.fingerprint == fingerprint && trial.is_open(now))
    }

    /// Where the same request has passed its trial and runs on: nowhere else may another copy of it go for a while, lest one that kills late kill several.
    pub(super) fn bound_to(&self, fingerprint: Fingerprint, now: Instant) -> Option<&Life> {
        let running = self.passed.get(&fingerprint)?.iter();
        running.filter(|trial| trial.begun + LONGEST_TRIAL > now).map(|trial| &trial.life).next()
    }

    /// Begins a trial, unless it may not begin there.
    pub(super) fn begin(&mut self, entrant: Entrant, life: &Life, expected: Expected, now: Instant) -> Option<u64> {
        self.settle(now);
        let bound = self.bound_to(entrant.fingerprint, now).map(|bound| bound == life);
        let has_passed = bound == Some(true);
        let may_begin = has_passed || self.may_begin(entrant, &life.replica, expected.together, now);
        if bound == Some(false) || self.is_tried(entrant.fingerprint, now) || !may_begin {
            return None;
        }
        let wait = (expected.first_token * 2 + MARGIN).min(LONGEST_TRIAL);
        self.pace.get_or_insert(expected.first_token);
        self.next += 1;
        let until = now + if expected.streams || entrant.is_long { LONGEST_TRIAL } else { wait };
        let trial = Trial { number: self.next, life: life.clone(), entrant, begun: now, due: now + wait, until, is_left: false };
        if has_passed {
            self.keep(trial);
        } else {
            self.open.push(trial);
        }
        Some(self.next)
    }

    /// An answer on trial has begun.
    pub(super) fn answered(&mut self, number: u64, now: Instant) {
        if let Some(trial) = self.open.iter_mut().find(|trial| trial.number == number && !trial.entrant.is_long) {
            trial.until = trial.until.min(now + AFTER_FIRST_BYTE);
        }
    }

    /// Its engine has given the first tokens and lives: the trial is over, the answer not yet. Whether that changed anything.
    pub(super) fn pass(&mut self, number: u64, now: Instant) -> bool {
        let Some(at) = self.open.iter().position(|trial| trial.number == number && !trial.entrant.is_long) else { return false };
        let trial = self.open.swap_remove(at);
        self.observe(trial.begun, now);
        self.keep(trial);
        true
    }

    /// The answer has ended, `well` or not.
    pub(super) fn end(&mut self, number: u64, fingerprint: Fingerprint, well: bool, now: Instant) {
        if let Some(at) = self.open.iter().position(|trial| trial.number == number) {
            let trial = self.open.swap_remove(at);
            if well && !trial.entrant.is_long {
                self.observe(trial.begun, trial.until.min(now));
            }
        } else if let Some(running) = self.passed.get_mut(&fingerprint) {
            running.retain(|trial| trial.number != number);
            if running.is_empty() {
                self.passed.remove(&fingerprint);
            }
        }
    }

    /// It was given up before there was an answer.
    pub(super) fn give_up(&mut self, number: u64, fingerprint: Fingerprint, now: Instant) {
        match self.open.iter_mut().find(|trial| trial.number == number && trial.until > now) {
            Some(trial) => (trial.until, trial.is_left) = (trial.until.min(now + LINGERS), true),
            None => self.end(number, fingerprint, false, now),
        }
    }

    /// Who is there.
    pub(super) fn scene(&self, life: &Life, now: Instant) -> Scene {
        let (mut undecided, mut passed) = (Vec::new(), Vec::new());
        for trial in self.open.iter().filter(|trial| trial.life == *life && (trial.is_open(now) || !trial.is_left)) {
            let list = if trial.is_open(now) { &mut undecided } else { &mut passed };
            list.push(trial.entrant.fingerprint);
        }
        passed.extend(self.passed.values().flatten().filter(|trial| trial.life == *life).map(|trial| trial.entrant.fingerprint));
        passed.sort_unstable();
        passed.dedup();
        Scene { undecided, passed, named: 1 }
    }

    /// Those whose time on trial is over have passed, or are forgotten where nobody waits for them any more.
    pub(super) fn settle(&mut self, now: Instant) {
        for trial in self.open.extract_if(.., |trial| !trial.is_open(now)).collect::<Vec<_>>() {
            if trial.is_left {
                continue;
            }
            // A stream that shows nothing for so long says nothing of the others.
            if trial.until <= trial.due {
                self.observe(trial.begun, trial.until);
            }
            self.keep(trial);
        }
    }

    /// Trials that are remembered.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.open.len() + self.passed.values().map(Vec::len).sum::<usize>()
    }

    fn keep(&mut self, trial: Trial) {
        self.passed.entry(trial.entrant.fingerprint).or_default().push(trial);
    }

    fn observe(&mut self, begun: Instant, ended: Instant) {
        let lasted = ended.saturating_duration_since(begun);
        self.pace = Some(self.pace.map_or(lasted, |pace| (pace * 3 + lasted) / 4));
    }
}
