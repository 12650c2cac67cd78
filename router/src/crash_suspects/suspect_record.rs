//! What is known of one request that was in flight when engines died: which deaths count against it, and on what terms it may be tried.

use tokio::time::Instant;

use super::standing::{Ban, Fingerprint, SuspectStanding};
use super::trials::{CrashScene, MAX_CONCURRENT_TRIALS};
use crate::engine_life::EngineLife;

/// Deaths with which a request is banned.
const DEATHS_TO_BAN: usize = 2;

/// How often a request may be found beside those that are to blame before its own trials last as long as its answers, and it is tried alone.
const MAX_SPARED_DEATHS: usize = 2;

/// Deaths that one node's agent alone has reported, for one request; the oldest makes way. All of them together count as one.
const MAX_UNWITNESSED_DEATHS: usize = 4;

/// Deaths that are remembered for one request; the oldest makes way.
const MAX_DEATHS_PER_REQUEST: usize = 64;

/// What a death means for one of those that were there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DeathVerdict {
    /// It may have been the cause.
    Counts,
    /// So may others: so many were on trial together.
    Shared(usize),
    /// It had passed its trial and ran on beside others, one of which was the cause.
    Spared,
    /// It was answered well since: it was not the cause, whoever says again that it was there.
    Acquitted,
}

/// An engine's death, as it concerns one request.
#[derive(Debug)]
pub(super) struct Death {
    pub(super) life: EngineLife,
    pub(super) died_at: Instant,
    pub(super) expires_at: Instant,
    pub(super) verdict: DeathVerdict,
    /// This router had sent it there; otherwise there is only the agent's word.
    pub(super) is_witnessed: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct SuspectRecord {
    deaths: Vec<Death>,
}

impl SuspectRecord {
    pub(super) fn is_suspect(&self) -> bool {
        self.deaths.iter().any(Death::is_incriminating)
    }

    /// Whether it was a suspect before this engine died.
    pub(super) fn is_suspect_before(&self, life: &EngineLife, now: Instant) -> bool {
        self.deaths.iter().any(|death| death.expires_at > now && death.is_incriminating() && death.life != *life)
    }

    pub(super) fn is_banned(&self, now: Instant) -> bool {
        self.counted_deaths(now).len() >= DEATHS_TO_BAN
    }

    pub(super) fn standing(&self, now: Instant) -> SuspectStanding {
        let counted = self.counted_deaths(now);
        if counted.len() < DEATHS_TO_BAN {
            let is_suspect = self.deaths.iter().any(|death| death.expires_at > now && death.is_incriminating());
            return if is_suspect { SuspectStanding::Suspect } else { SuspectStanding::Clear };
        }
        let mut ends: Vec<Instant> = counted.iter().map(|death| death.expires_at).collect();
        // It may come again when too few deaths are left.
        ends.sort_unstable();
        let until = ends[ends.len() - DEATHS_TO_BAN];
        let deaths = counted.iter().map(|death| (death.life.replica.clone(), now.saturating_duration_since(death.died_at))).collect();
        SuspectStanding::Banned(Ban { deaths, remaining: until.saturating_duration_since(now) })
    }

    /// The most that may be on trial together with it, and whether its trial lasts as long as its answer.
    pub(super) fn trial_terms(&self, now: Instant) -> (usize, bool) {
        let is_long = self.spared_deaths(now) >= MAX_SPARED_DEATHS;
        let shared = self.deaths.iter().filter(|death| death.expires_at > now).filter_map(|death| match death.verdict {
            DeathVerdict::Shared(together) => Some((together / 2).max(1)),
            _ => None,
        });
        (if is_long { 1 } else { shared.fold(MAX_CONCURRENT_TRIALS, usize::min) }, is_long)
    }

    /// What one more death means for it, with these suspects `there`.
    pub(super) fn judge(&self, fingerprint: Fingerprint, there: &CrashScene, now: Instant) -> DeathVerdict {
        if !self.is_suspect() {
            return DeathVerdict::Counts;
        }
        let (limit, _) = self.trial_terms(now);
        let is_on_trial = there.on_trial.contains(&fingerprint);
        let others_passed = there.passed.iter().any(|other| *other != fingerprint);
        match there.on_trial.len() {
            1 if is_on_trial => DeathVerdict::Counts,
            together if is_on_trial => DeathVerdict::Shared(together.min(limit).max(2)),
            0 if there.passed.is_empty() => match there.reported_suspects.min(limit) {
                0 | 1 => DeathVerdict::Counts,
                // Another router had sent them there: who of them was on trial is not known here.
                together => DeathVerdict::Shared(together),
            },
            0 if !others_passed => DeathVerdict::Counts,
            _ if self.spared_deaths(now) < MAX_SPARED_DEATHS => DeathVerdict::Spared,
            _ => DeathVerdict::Counts,
        }
    }

    /// Remembers a death, or that there is more reason to believe in one; what it means.
    pub(super) fn charge(&mut self, mut death: Death, judge: impl FnOnce(&Self) -> DeathVerdict) -> DeathVerdict {
        if let Some(known) = self.deaths.iter_mut().find(|known| known.life == death.life) {
            known.expires_at = known.expires_at.max(death.expires_at);
            known.is_witnessed |= death.is_witnessed;
            return known.verdict;
        }
        death.verdict = judge(self);
        let verdict = death.verdict;
        let is_unwitnessed = |known: &Death| !known.is_witnessed && known.life.node() == death.life.node();
        let surplus = if self.deaths.iter().filter(|known| is_unwitnessed(known)).count() >= MAX_UNWITNESSED_DEATHS {
            self.deaths.iter().position(is_unwitnessed)
        } else {
            (self.deaths.len() >= MAX_DEATHS_PER_REQUEST).then_some(0)
        };
        if let Some(oldest) = surplus {
            self.deaths.remove(oldest);
        }
        self.deaths.push(death);
        verdict
    }

    /// It was not the cause of any of these, whoever says so again before `until`.
    pub(super) fn acquit(&mut self, until: Instant) {
        for death in &mut self.deaths {
            (death.verdict, death.expires_at) = (DeathVerdict::Acquitted, until);
        }
    }

    /// Forgets what has lapsed; whether anything is left.
    pub(super) fn remove_expired(&mut self, now: Instant) -> bool {
        self.deaths.retain(|death| death.expires_at > now);
        !self.deaths.is_empty()
    }

    /// The deaths that ban it together. One that this router has seen is one; what a node's agent alone reports is one in all, so that no agent can have a
    /// request refused by inventing deaths.
    fn counted_deaths(&self, now: Instant) -> Vec<&Death> {
        let mut counted: Vec<&Death> = Vec::new();
        for death in self.deaths.iter().filter(|death| death.expires_at > now && death.verdict == DeathVerdict::Counts) {
            let same = |known: &&mut &Death| !known.is_witnessed && known.life.node() == death.life.node();
            match counted.iter_mut().find(same).filter(|_| !death.is_witnessed) {
                Some(known) if known.expires_at < death.expires_at => *known = death,
                Some(_) => {}
                None => counted.push(death),
            }
        }
        counted
    }

    fn spared_deaths(&self, now: Instant) -> usize {
        self.deaths.iter().filter(|death| death.expires_at > now && death.verdict == DeathVerdict::Spared).count()
    }
}

impl Death {
    fn is_incriminating(&self) -> bool {
        matches!(self.verdict, DeathVerdict::Counts | DeathVerdict::Shared(_))
    }

    /// One that has just become known, before it is judged.
    pub(super) fn new(life: &EngineLife, died_at: Instant, expires_at: Instant, is_witnessed: bool) -> Self {
        Self { life: life.clone(), died_at, expires_at, verdict: DeathVerdict::Counts, is_witnessed }
    }
}
