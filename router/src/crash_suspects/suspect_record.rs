//! The record of one request that was in flight when engines crashed: which crashes count against
//! it, and on what terms it may be tried.

use tokio::time::Instant;

use super::standing::{Ban, Fingerprint, SuspectStanding};
use super::trials::{CrashScene, MAX_CONCURRENT_TRIALS};
use crate::engine_life::EngineLife;

/// Crashes that ban a request.
const CRASHES_TO_BAN: usize = 2;

/// How often a request may be found beside the culprits before its own trials last as long as its
/// answers, and it is tried alone.
const MAX_SPARED_CRASHES: usize = 2;

/// Most crashes of one request that one node's agent alone has reported; the oldest makes way. All
/// of them together count as one.
const MAX_UNWITNESSED_CRASHES: usize = 4;

/// Most crashes remembered for one request; the oldest makes way.
const MAX_CRASHES_PER_REQUEST: usize = 64;

/// A crash's meaning for one of the requests that were there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CrashVerdict {
    /// The request may have been the cause.
    Counts,
    /// So many requests were on trial together, and any of them may have been the cause.
    Shared(usize),
    /// The request had passed its trial and ran on beside others, one of which was the cause.
    Spared,
    /// The request has been answered well since, so it was not the cause, even if the death is
    /// reported again.
    Acquitted,
}

/// An engine's crash, as it concerns one request.
#[derive(Debug)]
pub(super) struct ChargedCrash {
    pub(super) life: EngineLife,
    pub(super) crashed_at: Instant,
    pub(super) expires_at: Instant,
    pub(super) verdict: CrashVerdict,
    /// Whether this router had sent the request there; otherwise only the agent says so.
    pub(super) is_witnessed: bool,
}

#[derive(Debug, Default)]
pub(super) struct SuspectRecord {
    crashes: Vec<ChargedCrash>,
}

impl SuspectRecord {
    pub(super) fn is_suspect(&self) -> bool {
        self.crashes.iter().any(ChargedCrash::is_incriminating)
    }

    /// Whether the request was a suspect before this engine crashed.
    pub(super) fn is_suspect_before(&self, life: &EngineLife, now: Instant) -> bool {
        self.crashes.iter().any(|crash| crash.expires_at > now && crash.is_incriminating() && crash.life != *life)
    }

    pub(super) fn is_banned(&self, now: Instant) -> bool {
        self.counted_crashes(now).len() >= CRASHES_TO_BAN
    }

    pub(super) fn standing(&self, now: Instant) -> SuspectStanding {
        let counted = self.counted_crashes(now);
        if counted.len() < CRASHES_TO_BAN {
            let is_suspect = self.crashes.iter().any(|crash| crash.expires_at > now && crash.is_incriminating());
            return if is_suspect { SuspectStanding::Suspect } else { SuspectStanding::Clear };
        }
        let mut ends: Vec<Instant> = counted.iter().map(|crash| crash.expires_at).collect();
        // The request may come again when too few crashes are left.
        ends.sort_unstable();
        let until = ends[ends.len() - CRASHES_TO_BAN];
        let crashes = counted.iter().map(|crash| (crash.life.replica.clone(), now.saturating_duration_since(crash.crashed_at))).collect();
        SuspectStanding::Banned(Ban { crashes, remaining: until.saturating_duration_since(now) })
    }

    /// How many may be on trial together with the request, and whether its trial lasts as long as
    /// its answer.
    pub(super) fn trial_terms(&self, now: Instant) -> (usize, bool) {
        let is_long = self.spared_crashes(now) >= MAX_SPARED_CRASHES;
        let shared = self.crashes.iter().filter(|crash| crash.expires_at > now).filter_map(|crash| match crash.verdict {
            CrashVerdict::Shared(together) => Some((together / 2).max(1)),
            _ => None,
        });
        (if is_long { 1 } else { shared.fold(MAX_CONCURRENT_TRIALS, usize::min) }, is_long)
    }

    /// Judges one more crash of the request, with these suspects `there`.
    pub(super) fn judge(&self, fingerprint: Fingerprint, there: &CrashScene, now: Instant) -> CrashVerdict {
        if !self.is_suspect() {
            return CrashVerdict::Counts;
        }
        let (limit, _) = self.trial_terms(now);
        let is_on_trial = there.on_trial.contains(&fingerprint);
        let others_passed = there.passed.iter().any(|other| *other != fingerprint);
        match there.on_trial.len() {
            1 if is_on_trial => CrashVerdict::Counts,
            together if is_on_trial => CrashVerdict::Shared(together.min(limit).max(2)),
            0 if there.passed.is_empty() => match there.reported_suspects.min(limit) {
                0 | 1 => CrashVerdict::Counts,
                // Another router had sent the suspects there. Which of them was on trial is not
                // known here.
                together => CrashVerdict::Shared(together),
            },
            0 if !others_passed => CrashVerdict::Counts,
            _ if self.spared_crashes(now) < MAX_SPARED_CRASHES => CrashVerdict::Spared,
            _ => CrashVerdict::Counts,
        }
    }

    /// Records a crash, or more reason to believe in one. Returns the verdict.
    pub(super) fn charge(&mut self, mut crash: ChargedCrash, judge: impl FnOnce(&Self) -> CrashVerdict) -> CrashVerdict {
        if let Some(known) = self.crashes.iter_mut().find(|known| known.life == crash.life) {
            known.expires_at = known.expires_at.max(crash.expires_at);
            known.is_witnessed |= crash.is_witnessed;
            return known.verdict;
        }
        crash.verdict = judge(self);
        let verdict = crash.verdict;
        let is_unwitnessed = |known: &ChargedCrash| !known.is_witnessed && known.life.node() == crash.life.node();
        let surplus = if self.crashes.iter().filter(|known| is_unwitnessed(known)).count() >= MAX_UNWITNESSED_CRASHES {
            self.crashes.iter().position(is_unwitnessed)
        } else {
            (self.crashes.len() >= MAX_CRASHES_PER_REQUEST).then_some(0)
        };
        if let Some(oldest) = surplus {
            self.crashes.remove(oldest);
        }
        self.crashes.push(crash);
        verdict
    }

    /// Acquits the request of these deaths, even if they are reported again before `until`.
    pub(super) fn acquit(&mut self, until: Instant) {
        for crash in &mut self.crashes {
            (crash.verdict, crash.expires_at) = (CrashVerdict::Acquitted, until);
        }
    }

    /// The crash of this life, if it counts against the request, alone or with others.
    pub(super) fn crash_of(&self, life: &EngineLife) -> Option<&ChargedCrash> {
        self.crashes.iter().find(|crash| crash.life == *life && crash.is_incriminating())
    }

    /// The crashes for which the request is banned; none while it is not.
    pub(super) fn crashes_of_ban(&self, now: Instant) -> Vec<&ChargedCrash> {
        Some(self.counted_crashes(now)).filter(|counted| counted.len() >= CRASHES_TO_BAN).unwrap_or_default()
    }

    /// Forgets a crash that the request did not cause. Returns `true` while anything is left.
    pub(super) fn forget(&mut self, life: &EngineLife) -> bool {
        self.crashes.retain(|crash| crash.life != *life);
        !self.crashes.is_empty()
    }

    /// Forgets expired crashes. Returns `true` while anything is left.
    pub(super) fn remove_expired(&mut self, now: Instant) -> bool {
        self.crashes.retain(|crash| crash.expires_at > now);
        !self.crashes.is_empty()
    }

    /// The crashes that together ban the request.
    ///
    /// Each crash that this router has seen counts as one. Crashes that only a node's agent reports
    /// count as one in all, so no agent can have a request refused by inventing crashes.
    fn counted_crashes(&self, now: Instant) -> Vec<&ChargedCrash> {
        let mut counted: Vec<&ChargedCrash> = Vec::new();
        for crash in self.crashes.iter().filter(|crash| crash.expires_at > now && crash.verdict == CrashVerdict::Counts) {
            let same = |known: &&mut &ChargedCrash| !known.is_witnessed && known.life.node() == crash.life.node();
            match counted.iter_mut().find(same).filter(|_| !crash.is_witnessed) {
                Some(known) if known.expires_at < crash.expires_at => *known = crash,
                Some(_) => {}
                None => counted.push(crash),
            }
        }
        counted
    }

    fn spared_crashes(&self, now: Instant) -> usize {
        self.crashes.iter().filter(|crash| crash.expires_at > now && crash.verdict == CrashVerdict::Spared).count()
    }
}

impl ChargedCrash {
    fn is_incriminating(&self) -> bool {
        matches!(self.verdict, CrashVerdict::Counts | CrashVerdict::Shared(_))
    }

    /// A new crash, before it is judged.
    pub(super) fn new(life: &EngineLife, crashed_at: Instant, expires_at: Instant, is_witnessed: bool) -> Self {
        Self { life: life.clone(), crashed_at, expires_at, verdict: CrashVerdict::Counts, is_witnessed }
    }
}
