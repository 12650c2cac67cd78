//! What is known of one request that was in flight when engines died: which deaths count against it, and on what terms it may be tried.

use tokio::time::Instant;

use super::table::{Ban, Fingerprint, Life, Standing};
use super::trials::{MOST_TOGETHER, Scene};

/// Deaths with which a request is refused.
const CONVICTED: usize = 2;

/// How often a request may be found beside those that are to blame before its own trials last as long as its answers, and it is tried alone.
const MOST_SPARED: usize = 2;

/// Deaths that one node's agent alone has told, for one request; the oldest makes way. All of them together count as one.
const MOST_TOLD: usize = 4;

/// Deaths that are remembered for one request; the oldest makes way.
const MOST_DEATHS: usize = 64;

/// What a death means for one of those that were there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
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
    pub(super) life: Life,
    pub(super) at: Instant,
    pub(super) until: Instant,
    pub(super) verdict: Verdict,
    /// This router had sent it there; otherwise there is only the agent's word.
    pub(super) is_witnessed: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Record {
    deaths: Vec<Death>,
}

impl Record {
    pub(super) fn is_suspect(&self) -> bool {
        self.deaths.iter().any(Death::is_held_against)
    }

    /// Whether it was a suspect before this engine died.
    pub(super) fn is_suspect_before(&self, life: &Life, now: Instant) -> bool {
        self.deaths.iter().any(|death| death.until > now && death.is_held_against() && death.life != *life)
    }

    pub(super) fn is_refused(&self, now: Instant) -> bool {
        self.counted(now).len() >= CONVICTED
    }

    pub(super) fn standing(&self, now: Instant) -> Standing {
        let counted = self.counted(now);
        if counted.len() < CONVICTED {
            let is_suspect = self.deaths.iter().any(|death| death.until > now && death.is_held_against());
            return if is_suspect { Standing::Suspect } else { Standing::Clear };
        }
        let mut ends: Vec<Instant> = counted.iter().map(|death| death.until).collect();
        // It may come again when too few deaths are left.
        ends.sort_unstable();
        let until = ends[ends.len() - CONVICTED];
        let deaths = counted.iter().map(|death| (death.life.replica.clone(), now.saturating_duration_since(death.at))).collect();
        Standing::Refused(Ban { deaths, remaining: until.saturating_duration_since(now) })
    }

    /// The most that may be on trial together with it, and whether its trial lasts as long as its answer.
    pub(super) fn terms(&self, now: Instant) -> (usize, bool) {
        let is_long = self.spared(now) >= MOST_SPARED;
        let shared = self.deaths.iter().filter(|death| death.until > now).filter_map(|death| match death.verdict {
            Verdict::Shared(together) => Some((together / 2).max(1)),
            _ => None,
        });
        (if is_long { 1 } else { shared.fold(MOST_TOGETHER, usize::min) }, is_long)
    }

    /// What one more death means for it, with these suspects `there`.
    pub(super) fn judge(&self, fingerprint: Fingerprint, there: &Scene, now: Instant) -> Verdict {
        if !self.is_suspect() {
            return Verdict::Counts;
        }
        let (limit, _) = self.terms(now);
        let is_on_trial = there.undecided.contains(&fingerprint);
        let others_passed = there.passed.iter().any(|other| *other != fingerprint);
        match there.undecided.len() {
            1 if is_on_trial => Verdict::Counts,
            together if is_on_trial => Verdict::Shared(together.min(limit).max(2)),
            0 if there.passed.is_empty() => match there.named.min(limit) {
                0 | 1 => Verdict::Counts,
                // Another router had sent them there: who of them was on trial is not known here.
                together => Verdict::Shared(together),
            },
            0 if !others_passed => Verdict::Counts,
            _ if self.spared(now) < MOST_SPARED => Verdict::Spared,
            _ => Verdict::Counts,
        }
    }

    /// Remembers a death, or that there is more reason to believe in one; what it means.
    pub(super) fn charge(&mut self, mut death: Death, judge: impl FnOnce(&Self) -> Verdict) -> Verdict {
        if let Some(known) = self.deaths.iter_mut().find(|known| known.life == death.life) {
            known.until = known.until.max(death.until);
            known.is_witnessed |= death.is_witnessed;
            return known.verdict;
        }
        death.verdict = judge(self);
        let verdict = death.verdict;
        let told = |known: &Death| !known.is_witnessed && known.life.node() == death.life.node();
        let surplus = if self.deaths.iter().filter(|known| told(known)).count() >= MOST_TOLD {
            self.deaths.iter().position(told)
        } else {
            (self.deaths.len() >= MOST_DEATHS).then_some(0)
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
            (death.verdict, death.until) = (Verdict::Acquitted, until);
        }
    }

    /// Forgets what has lapsed; whether anything is left.
    pub(super) fn forget(&mut self, now: Instant) -> bool {
        self.deaths.retain(|death| death.until > now);
        !self.deaths.is_empty()
    }

    /// The deaths that convict it together. One that this router has seen is one; what a node's agent alone tells is one in all, so that no agent can have a
    /// request refused by inventing deaths.
    fn counted(&self, now: Instant) -> Vec<&Death> {
        let mut counted: Vec<&Death> = Vec::new();
        for death in self.deaths.iter().filter(|death| death.until > now && death.verdict == Verdict::Counts) {
            let same = |known: &&mut &Death| !known.is_witnessed && known.life.node() == death.life.node();
            match counted.iter_mut().find(same).filter(|_| !death.is_witnessed) {
                Some(known) if known.until < death.until => *known = death,
                Some(_) => {}
                None => counted.push(death),
            }
        }
        counted
    }

    fn spared(&self, now: Instant) -> usize {
        self.deaths.iter().filter(|death| death.until > now && death.verdict == Verdict::Spared).count()
    }
}

impl Death {
    fn is_held_against(&self) -> bool {
        matches!(self.verdict, Verdict::Counts | Verdict::Shared(_))
    }

    /// One that has just become known, before it is judged.
    pub(super) fn new(life: &Life, at: Instant, until: Instant, is_witnessed: bool) -> Self {
        Self { life: life.clone(), at, until, verdict: Verdict::Counts, is_witnessed }
    }
}
