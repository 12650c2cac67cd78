//! Who was in flight at which engine's death, and what follows from it: the rule of `poison` as a pure table, with time as an argument.

use std::sync::Arc;
use std::time::Duration;

use rustc_hash::{FxHashMap, FxHashSet};
use tokio::time::Instant;

use super::record::{Death, Record, Verdict};
use super::trials::{Crowd, Entrant, Expected, Scene, Trials};

/// What this router alone has seen counts for so long. The agent's report of the same death follows within a fraction of a second and makes
/// it count for the whole time, though one whose core alone has died takes 2.4 to 5.1 s to exit (measured, vLLM 0.32). Where none follows, the
/// engine was restarted for a reason of its own, or has only dropped a connection.
pub(super) const UNCONFIRMED: Duration = Duration::from_secs(10);

/// Requests that are remembered because agents have named them; further ones are not. A death leaves at most 4,096, and sixteen engines have died of late
/// when this is full.
pub(super) const MOST_NAMED: usize = 65_536;

/// Those that this router has lost itself are remembered up to this number: agents that name more than there are do not crowd them out.
const MOST: usize = 2 * MOST_NAMED;

/// Requests of one death; an honest agent names no more.
pub(super) const MOST_OF_A_DEATH: usize = 4096;

/// Deaths that are remembered; the oldest makes way. An honest agent keeps at most 32 for each replica.
pub(super) const MOST_FALLEN: usize = 1024;

/// How long an engine that has died may look ready: its connections break first, its process ends up to 8 s later.
const SEEMS_ALIVE: Duration = Duration::from_secs(10);

/// How often what has lapsed is looked for.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Names a request by its content and whose it is.
pub type Fingerprint = u128;

/// One life of one engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Life {
    /// The replica's id.
    pub(super) replica: Arc<str>,
    pub(super) epoch: u64,
}

impl Life {
    /// The node whose agent tells of it.
    pub(super) fn node(&self) -> &str {
        self.replica.rsplit_once('/').map_or(&*self.replica, |(node, _)| node)
    }
}

/// An engine that has died.
#[derive(Debug)]
struct Fallen {
    life: Life,
    /// When that became known.
    at: Instant,
    /// Who of this router's suspects was there then.
    scene: Scene,
}

/// Why a request is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ban {
    /// The replicas whose engines died, each with how long ago that was.
    pub deaths: Vec<(Arc<str>, Duration)>,
    /// For how much longer.
    pub remaining: Duration,
}

/// What may become of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Standing {
    Clear,
    Suspect,
    Refused(Ban),
}

/// Where a suspect may be tried now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::dispatch) struct Bars {
    /// The only engine, if it is bound to one.
    pub(super) only: Option<Life>,
    /// Not these: others are on trial there.
    pub(super) closed: Vec<Arc<str>>,
    /// Not these: they have just died.
    pub(super) fallen: Vec<Life>,
    /// These only if there are no others.
    pub(super) occupied: Vec<Arc<str>>,
    /// How many may be on trial together.
    pub(super) together: usize,
}

/// What a death made of a request that was lost in it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Blamed {
    /// It is refused from now on.
    pub(super) ban: Option<Ban>,
    /// It was there beside those that are to blame.
    pub(super) is_excused: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Table {
    /// How long a death counts.
    window: Duration,
    records: FxHashMap<Fingerprint, Record>,
    trials: Trials,
    /// The engines that died within the window, oldest first.
    fallen: Vec<Fallen>,
    /// Records with a death that counts.
    suspects: usize,
    swept: Instant,
}

impl Table {
    pub(super) fn new(window: Duration, now: Instant) -> Self {
        Self { window, records: FxHashMap::default(), trials: Trials::default(), fallen: Vec::new(), suspects: 0, swept: now }
    }

    /// Requests with a death to their name.
    pub(super) fn suspects(&self) -> usize {
        self.suspects
    }

    /// The trials, for what changes nobody's standing.
    pub(super) fn trials(&mut self) -> &mut Trials {
        &mut self.trials
    }

    pub(super) fn standing(&self, fingerprint: Fingerprint, now: Instant) -> Standing {
        self.records.get(&fingerprint).map_or(Standing::Clear, |record| record.standing(now))
    }

    /// An engine was lost to this request, which it was sent at `sent`.
    pub(super) fn blame(&mut self, fingerprint: Fingerprint, life: &Life, sent: Instant, now: Instant) -> Blamed {
        // A request that came to a dead engine has not killed it.
        if self.fallen.iter().any(|fallen| fallen.life == *life && fallen.at <= sent) {
            return Blamed::default();
        }
        let scene = self.fall(life, now, now);
        let until = now + UNCONFIRMED.min(self.window);
        self.charge(fingerprint, Death::new(life, now, until, true), &scene, now)
    }

    /// An agent says that an engine died at `at` with these requests in flight. Gives back those that are refused from now on.
    pub(super) fn reported(&mut self, life: &Life, requests: &[Fingerprint], at: Instant, now: Instant) -> Vec<(Fingerprint, Ban)> {
        let until = at + self.window;
        if until <= now {
            return Vec::new();
        }
        let requests = &requests[..requests.len().min(MOST_OF_A_DEATH)];
        let own = self.fall(life, at, now);
        // What never got there, or was over, is not to blame.
        let named: FxHashSet<Fingerprint> = requests.iter().copied().collect();
        let kept = |list: &[Fingerprint]| list.iter().copied().filter(|one| named.contains(one)).collect();
        let suspects =
            requests.iter().filter(|one| self.records.get(one).is_some_and(|record| record.is_suspect_before(life, now))).count();
        let scene = Scene { undecided: kept(&own.undecided), passed: kept(&own.passed), named: suspects };
        let charged = requests.iter().filter_map(|request| {
            let is_witnessed = own.undecided.contains(request) || own.passed.binary_search(request).is_ok();
            let death = Death::new(life, at, until, is_witnessed);
            Some((*request, self.charge(*request, death, &scene, now).ban?))
        });
        charged.collect()
    }

    /// The request was answered well; whether that changed anything.
    pub(super) fn clear(&mut self, fingerprint: Fingerprint, now: Instant) -> bool {
        let Some(record) = self.records.get_mut(&fingerprint).filter(|record| record.is_suspect()) else { return false };
        // Agents may tell it again for as long.
        record.acquit(now + self.window);
        self.suspects -= 1;
        true
    }

    /// Where this suspect may be tried.
    pub(super) fn bars(&self, fingerprint: Fingerprint, crowd: Crowd, now: Instant) -> Bars {
        let together = self.trials.together(crowd);
        let fallen = self.fallen.iter().filter(move |fallen| fallen.at + SEEMS_ALIVE > now);
        Bars {
            only: self.trials.bound_to(fingerprint, now).cloned(),
            closed: self.trials.closed_to(self.entrant(fingerprint, now), together, now),
            fallen: fallen.map(|fallen| fallen.life.clone()).collect(),
            occupied: if together == 1 { self.trials.occupied(crowd.eligible) } else { Vec::new() },
            together,
        }
    }

    /// Whether the same request is on trial already.
    pub(super) fn is_tried(&self, fingerprint: Fingerprint, now: Instant) -> bool {
        self.trials.is_tried(fingerprint, now)
    }

    /// Lets a suspect go to this engine; `None` when it may not.
    pub(super) fn begin_trial(&mut self, fingerprint: Fingerprint, life: &Life, expected: Expected, now: Instant) -> Option<u64> {
        let entrant = self.entrant(fingerprint, now);
        self.trials.begin(entrant, life, expected, now)
    }

    fn entrant(&self, fingerprint: Fingerprint, now: Instant) -> Entrant {
        let record = self.records.get(&fingerprint);
        let (limit, is_long) = record.map_or((super::trials::MOST_TOGETHER, false), |record| record.terms(now));
        Entrant { fingerprint, limit, is_long }
    }

    /// Forgets what has lapsed; it looks every second at most.
    pub(super) fn sweep(&mut self, now: Instant) {
        if now < self.swept + SWEEP_INTERVAL {
            return;
        }
        self.swept = now;
        let remembered = self.window.max(SEEMS_ALIVE);
        self.fallen.retain(|fallen| fallen.at + remembered > now);
        self.trials.settle(now);
        self.records.retain(|_, record| record.forget(now));
        self.suspects = self.records.values().filter(|record| record.is_suspect()).count();
    }

    /// Records, trials and deaths that are kept.
    #[cfg(test)]
    pub(super) fn lengths(&self) -> (usize, usize, usize) {
        (self.records.len(), self.trials.len(), self.fallen.len())
    }

    /// An engine has died; who was there.
    fn fall(&mut self, life: &Life, at: Instant, now: Instant) -> Scene {
        if let Some(fallen) = self.fallen.iter().find(|fallen| fallen.life == *life) {
            return fallen.scene.clone();
        }
        let scene = self.trials.scene(life, now);
        if self.fallen.len() >= MOST_FALLEN {
            self.fallen.remove(0);
        }
        self.fallen.push(Fallen { life: life.clone(), at, scene: scene.clone() });
        scene
    }

    /// Puts a death down to a request.
    fn charge(&mut self, fingerprint: Fingerprint, death: Death, scene: &Scene, now: Instant) -> Blamed {
        let most = if death.is_witnessed { MOST } else { MOST_NAMED };
        if !self.records.contains_key(&fingerprint) && self.records.len() >= most {
            return Blamed::default();
        }
        let record = self.records.entry(fingerprint).or_default();
        let (was_suspect, was_refused) = (record.is_suspect(), record.is_refused(now));
        let verdict = record.charge(death, |record| record.judge(fingerprint, scene, now));
        self.suspects += usize::from(!was_suspect && record.is_suspect());
        let ban = match record.standing(now) {
            Standing::Refused(ban) if !was_refused => Some(ban),
            _ => None,
        };
        Blamed { ban, is_excused: matches!(verdict, Verdict::Shared(_) | Verdict::Spared) }
    }
}
