//! Tracks which suspects are on trial where, and whether another trial may begin there: a pure
//! table, with time as an argument.

use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;
use tokio::time::Instant;

use super::standing::Fingerprint;
use crate::engine_life::EngineLife;

/// Most suspects that are on trial together.
///
/// A crash among so many puts at most four more engines at risk, each of which costs minutes of a
/// GPU. With eight at a time, five hundred suspects take nine rounds on seven engines.
pub(super) const MAX_CONCURRENT_TRIALS: usize = 8;

/// Target for the start of all trials. As long as it can be met, each replica tries one suspect at
/// a time; otherwise several together.
pub(super) const TRIAL_START_TARGET: Duration = Duration::from_secs(3);

/// Longest trial. It is longer than an agent takes to notice a hang (10 s unless configured
/// otherwise).
pub(super) const MAX_TRIAL_DURATION: Duration = Duration::from_secs(30);

/// Added to twice the predicted time to the first token. After that an engine looks hung, and a
/// plain answer, whose first token comes with its last, has passed its trial.
const HANG_MARGIN: Duration = Duration::from_secs(1);

/// Longest rest of an answer's trial after its first byte, whether or not the client reads on.
const TRIAL_AFTER_FIRST_BYTE: Duration = Duration::from_secs(1);

/// How long a suspect keeps its place if it was given up on trial before its engine answered
/// anything.
///
/// The engine may hang, and the next request would be blamed for it. An agent notices a hang after
/// 10 s unless configured otherwise.
const ABANDONED_TRIAL_TTL: Duration = Duration::from_secs(15);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TrialCandidate {
    pub(super) fingerprint: Fingerprint,
    /// Most suspects that may be on trial together with this one, itself included.
    pub(super) max_concurrent: usize,
    /// Whether the trial lasts as long as the answer, because the suspect may kill late.
    pub(super) is_long: bool,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct TrialDemand {
    pub(super) waiting: usize,
    /// Replicas that the waiting suspects may go to.
    pub(super) eligible: usize,
    pub(super) waited: Duration,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct TrialEstimate {
    pub(crate) first_token: Duration,
    pub(crate) is_stream: bool,
    pub(crate) max_concurrent: usize,
}

/// A suspect whose answer has not ended.
#[derive(Debug)]
struct Trial {
    id: u64,
    life: EngineLife,
    candidate: TrialCandidate,
    began_at: Instant,
    /// The time by which an engine that does not hang has answered.
    answer_due_at: Instant,
    /// When the trial is passed, unless it ends before.
    ends_at: Instant,
    /// Nobody waits for the answer any more.
    is_abandoned: bool,
}

/// The suspects at an engine when it crashed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct CrashScene {
    pub(super) on_trial: Vec<Fingerprint>,
    /// Suspects that had passed their trial and ran on, in order.
    pub(super) passed: Vec<Fingerprint>,
    /// How many suspects were there by an agent's word; 1 without it.
    pub(super) reported_suspects: usize,
}

#[derive(Debug, Default)]
pub(super) struct Trials {
    /// Trials not passed yet.
    active: Vec<Trial>,
    /// Trials passed, by request, as long as their answers last.
    passed: FxHashMap<Fingerprint, Vec<Trial>>,
    next_id: u64,
    /// Average over the last few trials.
    mean_duration: Option<Duration>,
}

impl Trial {
    fn is_active(&self, now: Instant) -> bool {
        self.ends_at > now
    }
}

impl Trials {
    /// How many may be on trial together so that all waiting trials begin in time.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "small numbers; `as` saturates"
    )]
    pub(super) fn max_concurrent(&self, demand: TrialDemand) -> usize {
        let Some(mean_duration) = self.mean_duration else { return 1 };
        let left = TRIAL_START_TARGET.saturating_sub(demand.waited).as_secs_f64();
        // Rounds in the remaining time, this one included.
        let rounds = 1.0 + (left / mean_duration.as_secs_f64().max(0.001)).floor();
        if left == 0.0 {
            return MAX_CONCURRENT_TRIALS;
        }
        let group = demand.waiting as f64 / (demand.eligible.max(1) as f64 * rounds);
        (group.ceil() as usize).clamp(1, MAX_CONCURRENT_TRIALS)
    }

    /// The replicas where this candidate may not begin because of the trials there.
    pub(super) fn closed_replicas(&self, candidate: TrialCandidate, max_concurrent: usize, now: Instant) -> Vec<Arc<str>> {
        // The number of trials at each replica, and its limit. All waiting suspects ask for this
        // many times a second, so each trial is looked at once.
        let mut replicas: FxHashMap<&Arc<str>, (usize, usize)> = FxHashMap::default();
        for trial in self.active.iter().filter(|trial| trial.is_active(now)) {
            let (beside, most) = replicas.entry(&trial.life.replica).or_insert((0, candidate.max_concurrent.min(max_concurrent)));
            *beside += 1;
            // A trial whose engine should have answered by now admits no others.
            *most = if trial.answer_due_at <= now { 0 } else { trial.candidate.max_concurrent.min(*most) };
        }
        replicas.into_iter().filter(|(_, (beside, most))| beside >= most).map(|(replica, _)| replica.clone()).collect()
    }

    /// Replicas where suspects that passed their trial run on, one of which may kill late, if there
    /// may be other replicas.
    pub(super) fn occupied_replicas(&self, replicas: usize) -> Vec<Arc<str>> {
        if self.passed.len() >= replicas {
            return Vec::new();
        }
        self.passed.values().flatten().map(|trial| trial.life.replica.clone()).collect()
    }

    pub(super) fn is_on_trial(&self, fingerprint: Fingerprint, now: Instant) -> bool {
        self.active.iter().any(|trial| trial.candidate.fingerprint == fingerprint && trial.is_active(now))
    }

    /// The engine where the same request has passed its trial and runs on. No copy of it may go
    /// elsewhere for a while, so that a request that kills late does not kill several engines.
    pub(super) fn bound_engine(&self, fingerprint: Fingerprint, now: Instant) -> Option<&EngineLife> {
        let running = self.passed.get(&fingerprint)?.iter();
        running.filter(|trial| trial.began_at + MAX_TRIAL_DURATION > now).map(|trial| &trial.life).next()
    }

    /// Begins a trial, unless it may not begin there.
    pub(super) fn begin(&mut self, candidate: TrialCandidate, life: &EngineLife, expected: TrialEstimate, now: Instant) -> Option<u64> {
        self.expire(now);
        let bound = self.bound_engine(candidate.fingerprint, now).map(|bound| bound == life);
        let has_passed = bound == Some(true);
        let may_begin = has_passed || !self.closed_replicas(candidate, expected.max_concurrent, now).contains(&life.replica);
        if bound == Some(false) || self.is_on_trial(candidate.fingerprint, now) || !may_begin {
            return None;
        }
        let wait = (expected.first_token * 2 + HANG_MARGIN).min(MAX_TRIAL_DURATION);
        self.mean_duration.get_or_insert(expected.first_token);
        self.next_id += 1;
        let ends_at = now + if expected.is_stream || candidate.is_long { MAX_TRIAL_DURATION } else { wait };
        let trial = Trial {
            id: self.next_id,
            life: life.clone(),
            candidate,
            began_at: now,
            answer_due_at: now + wait,
            ends_at,
            is_abandoned: false,
        };
        if has_passed {
            self.insert_passed(trial);
        } else {
            self.active.push(trial);
        }
        Some(self.next_id)
    }

    pub(super) fn mark_answered(&mut self, number: u64, now: Instant) {
        if let Some(trial) = self.active.iter_mut().find(|trial| trial.id == number && !trial.candidate.is_long) {
            trial.ends_at = trial.ends_at.min(now + TRIAL_AFTER_FIRST_BYTE);
        }
    }

    /// Records that the engine has given the first tokens: the trial is over, the answer not yet.
    /// Returns whether that changed anything.
    pub(super) fn pass(&mut self, number: u64, now: Instant) -> bool {
        let Some(at) = self.active.iter().position(|trial| trial.id == number && !trial.candidate.is_long) else { return false };
        let trial = self.active.swap_remove(at);
        self.record_duration(trial.began_at, now);
        self.insert_passed(trial);
        true
    }

    pub(super) fn end(&mut self, number: u64, fingerprint: Fingerprint, well: bool, now: Instant) {
        if let Some(at) = self.active.iter().position(|trial| trial.id == number) {
            let trial = self.active.swap_remove(at);
            if well && !trial.candidate.is_long {
                self.record_duration(trial.began_at, trial.ends_at.min(now));
            }
        } else if let Some(running) = self.passed.get_mut(&fingerprint) {
            running.retain(|trial| trial.id != number);
            if running.is_empty() {
                self.passed.remove(&fingerprint);
            }
        }
    }

    /// Records that the request was given up before there was an answer.
    pub(super) fn abandon(&mut self, number: u64, fingerprint: Fingerprint, now: Instant) {
        match self.active.iter_mut().find(|trial| trial.id == number && trial.ends_at > now) {
            Some(trial) => (trial.ends_at, trial.is_abandoned) = (trial.ends_at.min(now + ABANDONED_TRIAL_TTL), true),
            None => self.end(number, fingerprint, false, now),
        }
    }

    pub(super) fn scene_at(&self, life: &EngineLife, now: Instant) -> CrashScene {
        let (mut on_trial, mut passed) = (Vec::new(), Vec::new());
        for trial in self.active.iter().filter(|trial| trial.life == *life && (trial.is_active(now) || !trial.is_abandoned)) {
            let list = if trial.is_active(now) { &mut on_trial } else { &mut passed };
            list.push(trial.candidate.fingerprint);
        }
        passed.extend(self.passed.values().flatten().filter(|trial| trial.life == *life).map(|trial| trial.candidate.fingerprint));
        passed.sort_unstable();
        passed.dedup();
        CrashScene { on_trial, passed, reported_suspects: 1 }
    }

    /// Passes trials whose time is over, or forgets them if nobody waits for them any more.
    pub(super) fn expire(&mut self, now: Instant) {
        for trial in self.active.extract_if(.., |trial| !trial.is_active(now)).collect::<Vec<_>>() {
            if trial.is_abandoned {
                continue;
            }
            // A stream that shows nothing for so long says nothing about the length of other
            // trials.
            if trial.ends_at <= trial.answer_due_at {
                self.record_duration(trial.began_at, trial.ends_at);
            }
            self.insert_passed(trial);
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.active.len() + self.passed.values().map(Vec::len).sum::<usize>()
    }

    fn insert_passed(&mut self, trial: Trial) {
        self.passed.entry(trial.candidate.fingerprint).or_default().push(trial);
    }

    fn record_duration(&mut self, begun: Instant, ended: Instant) {
        let lasted = ended.saturating_duration_since(begun);
        self.mean_duration = Some(self.mean_duration.map_or(lasted, |mean_duration| (mean_duration * 3 + lasted) / 4));
    }
}
