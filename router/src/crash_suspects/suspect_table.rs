//! Records who was in flight at which engine's crash, and the consequences: the rule of
//! `crash_suspects` as a pure table, with time as an argument.

use std::sync::Arc;
use std::time::Duration;

use rustc_hash::{FxHashMap, FxHashSet};
use tokio::time::Instant;

use super::standing::{Ban, Fingerprint, SuspectStanding};
use super::suspect_record::{ChargedCrash, CrashVerdict, SuspectRecord};
use super::tenant_crashes::{Confinement, ConfinementChoices, TenantCharge, TenantCrashes, tenant_of};
use super::trials::{CrashScene, TrialCandidate, TrialDemand, TrialEstimate, Trials};
use crate::engine_life::EngineLife;

/// How long a crash that only this router has seen counts.
///
/// The agent's report of the same crash follows within a fraction of a second and makes it count
/// for the whole time. An engine whose core alone has crashed takes 2.4 to 5.1 s to exit (measured,
/// vLLM 0.32). If no report follows, the engine was restarted for a reason of its own, or has only
/// dropped a connection.
pub(super) const UNCONFIRMED_TTL: Duration = Duration::from_secs(10);

/// Most requests that are remembered because agents have reported them; further ones are not. A
/// crash leaves at most 4,096, so sixteen engines have crashed recently when this is full.
pub(super) const MAX_REPORTED_RECORDS: usize = 65_536;

/// Most records in all. The second half is for requests that this router has lost itself, so that
/// agents which report too much do not displace them.
const MAX_RECORDS: usize = 2 * MAX_REPORTED_RECORDS;

/// Most requests of one crash. An honest agent reports no more.
pub(crate) const MAX_REQUESTS_PER_CRASH: usize = 4096;

/// Most crashes that are remembered; the oldest makes way. An honest agent keeps at most 32 for
/// each replica.
pub(super) const MAX_CRASHES: usize = 1024;

/// How long a crashed engine may look ready. Its connections break first, and its process ends up
/// to 8 s later.
const CRASHED_BUT_READY_PERIOD: Duration = Duration::from_secs(10);

const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// A crash of an engine.
#[derive(Debug)]
struct EngineCrash {
    life: EngineLife,
    known_at: Instant,
    scene: CrashScene,
    /// The agent says that no request is to blame.
    is_excused: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TrialConstraints {
    /// The only engine allowed, if the suspect is bound to one.
    pub(super) required_engine: Option<EngineLife>,
    /// Closed replicas, where others are on trial.
    pub(super) closed_replicas: Vec<Arc<str>>,
    /// Engines that have just crashed, which are not allowed.
    pub(super) crashed_engines: Vec<EngineLife>,
    /// Replicas allowed only if there are no others.
    pub(super) occupied_replicas: Vec<Arc<str>>,
    /// How many may be on trial together.
    pub(super) max_concurrent: usize,
}

/// The result of a crash for a request that was lost in it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct BlameOutcome {
    pub(super) ban: Option<Ban>,
    /// Others are to blame.
    pub(super) is_excused: bool,
}

#[derive(Debug)]
pub(super) struct SuspectTable {
    /// How long a crash counts.
    ttl: Duration,
    records: FxHashMap<Fingerprint, SuspectRecord>,
    trials: Trials,
    tenants: TenantCrashes,
    /// The crashes within the window, oldest first.
    crashes: Vec<EngineCrash>,
    /// Records with a crash that counts.
    suspect_count: usize,
    last_sweep: Instant,
}

impl SuspectTable {
    pub(super) fn new(ttl: Duration, now: Instant) -> Self {
        Self {
            ttl,
            records: FxHashMap::default(),
            trials: Trials::default(),
            tenants: TenantCrashes::default(),
            crashes: Vec::new(),
            suspect_count: 0,
            last_sweep: now,
        }
    }

    /// How many requests are charged with a crash.
    pub(super) fn suspect_count(&self) -> usize {
        self.suspect_count
    }

    /// Access for changes that affect no suspect's standing.
    pub(super) fn trials(&mut self) -> &mut Trials {
        &mut self.trials
    }

    pub(super) fn standing(&self, fingerprint: Fingerprint, now: Instant) -> SuspectStanding {
        self.records.get(&fingerprint).map_or(SuspectStanding::Clear, |record| record.standing(now))
    }

    /// Records that a request, sent at `sent`, was lost with its engine.
    pub(super) fn blame(&mut self, fingerprint: Fingerprint, life: &EngineLife, sent: Instant, now: Instant) -> BlameOutcome {
        match self.crashes.iter().find(|crash| crash.life == *life) {
            Some(crash) if crash.is_excused => return BlameOutcome { ban: None, is_excused: true },
            // A request that came to a crashed engine has not crashed it.
            Some(crash) if crash.known_at <= sent => return BlameOutcome::default(),
            _ => {}
        }
        let scene = self.record_crash(life, now, now);
        let until = now + UNCONFIRMED_TTL.min(self.ttl);
        let reckless = self.tenants.only_reckless(None, now);
        let outcome = self.charge(fingerprint, ChargedCrash::new(life, now, until, true), &scene, now);
        // Charge the tenant before its next attempt. The agent will say who else was there.
        if reckless.is_some() && tenant_of(fingerprint) == reckless {
            self.charge_tenant(fingerprint, life);
        }
        outcome
    }

    /// Records an agent's report that an engine crashed at `at` with these requests in flight.
    /// Returns the requests that are refused from now on.
    pub(super) fn record_reported_crash(
        &mut self,
        life: &EngineLife,
        requests: &[Fingerprint],
        at: Instant,
        now: Instant,
    ) -> Vec<(Fingerprint, Ban)> {
        let until = at + self.ttl;
        if until <= now {
            return Vec::new();
        }
        let requests = &requests[..requests.len().min(MAX_REQUESTS_PER_CRASH)];
        let seen = self.record_crash(life, at, now);
        if self.is_excused(life) {
            return Vec::new();
        }
        // A request that never got there, or was answered before, is not to blame.
        let named: FxHashSet<Fingerprint> = requests.iter().copied().collect();
        let kept = |list: &[Fingerprint]| list.iter().copied().filter(|one| named.contains(one)).collect();
        let suspects =
            requests.iter().filter(|one| self.records.get(one).is_some_and(|record| record.is_suspect_before(life, now))).count();
        let scene = CrashScene { on_trial: kept(&seen.on_trial), passed: kept(&seen.passed), reported_suspects: suspects };
        let charged = requests.iter().filter_map(|request| {
            let is_witnessed = seen.on_trial.contains(request) || seen.passed.binary_search(request).is_ok();
            let crash = ChargedCrash::new(life, at, until, is_witnessed);
            Some((*request, self.charge(*request, crash, &scene, now).ban?))
        });
        let banned = charged.collect();
        self.charge_tenants(life, requests, now);
        banned
    }

    /// Charges a crash to the responsible tenant, as far as the requests that were there show it.
    fn charge_tenants(&mut self, life: &EngineLife, requests: &[Fingerprint], now: Instant) {
        let reckless = self.tenants.only_reckless(Some(requests), now);
        for request in requests {
            if requests.len() == 1 || (reckless.is_some() && tenant_of(*request) == reckless) {
                self.charge_tenant(*request, life);
            }
        }
        for fingerprint in requests {
            let Some(record) = self.records.get(fingerprint) else { continue };
            for crash in record.crashes_of_ban(now) {
                self.tenants.charge(TenantCharge::new(*fingerprint, crash, true));
            }
        }
    }

    /// Records an agent's report that an engine crashed at `at` and no request is to blame.
    pub(super) fn excuse_crash(&mut self, life: &EngineLife, at: Instant, now: Instant) {
        if at + self.ttl <= now || self.is_excused(life) {
            return;
        }
        // Charges are always made after the crash was recorded.
        let is_known = self.crashes.iter().any(|crash| crash.life == *life);
        self.record_crash(life, at, now);
        self.crashes.iter_mut().filter(|crash| crash.life == *life).for_each(|crash| crash.is_excused = true);
        if is_known {
            self.records.retain(|_, record| record.forget(life));
            self.tenants.forget(life);
            self.count_suspects();
        }
    }

    /// How many tenants are confined to one replica.
    pub(super) fn confined_count(&self, now: Instant) -> usize {
        self.tenants.confined_count(now)
    }

    pub(super) fn is_confined(&self, fingerprint: Fingerprint, now: Instant) -> bool {
        self.tenants.is_confined(fingerprint, now)
    }

    /// Where the request may go if its tenant is confined.
    pub(super) fn confine(
        &mut self,
        fingerprint: Fingerprint,
        model: Option<&str>,
        choices: &ConfinementChoices,
        now: Instant,
    ) -> Option<Confinement> {
        self.tenants.confine(fingerprint, model, choices, now)
    }

    /// Clears a request that was answered well. Returns whether that changed anything.
    pub(super) fn acquit(&mut self, fingerprint: Fingerprint, now: Instant) -> bool {
        let Some(record) = self.records.get_mut(&fingerprint).filter(|record| record.is_suspect()) else { return false };
        // Agents may report the same death again for this long.
        record.acquit(now + self.ttl);
        self.tenants.acquit(fingerprint);
        self.suspect_count -= 1;
        true
    }

    pub(super) fn trial_constraints(&self, fingerprint: Fingerprint, demand: TrialDemand, now: Instant) -> TrialConstraints {
        let max_concurrent = self.trials.max_concurrent(demand);
        let recent = self.crashes.iter().filter(move |crash| crash.known_at + CRASHED_BUT_READY_PERIOD > now);
        TrialConstraints {
            required_engine: self.trials.bound_engine(fingerprint, now).cloned(),
            closed_replicas: self.trials.closed_replicas(self.trial_candidate(fingerprint, now), max_concurrent, now),
            crashed_engines: recent.map(|crash| crash.life.clone()).collect(),
            occupied_replicas: if max_concurrent == 1 { self.trials.occupied_replicas(demand.eligible) } else { Vec::new() },
            max_concurrent,
        }
    }

    pub(super) fn is_on_trial(&self, fingerprint: Fingerprint, now: Instant) -> bool {
        self.trials.is_on_trial(fingerprint, now)
    }

    /// Begins a suspect's trial at this engine; `None` if it may not.
    pub(super) fn begin_trial(
        &mut self,
        fingerprint: Fingerprint,
        life: &EngineLife,
        expected: TrialEstimate,
        now: Instant,
    ) -> Option<u64> {
        let candidate = self.trial_candidate(fingerprint, now);
        self.trials.begin(candidate, life, expected, now)
    }

    fn trial_candidate(&self, fingerprint: Fingerprint, now: Instant) -> TrialCandidate {
        let record = self.records.get(&fingerprint);
        let (max_concurrent, is_long) = record.map_or((super::trials::MAX_CONCURRENT_TRIALS, false), |record| record.trial_terms(now));
        TrialCandidate { fingerprint, max_concurrent, is_long }
    }

    /// Forgets expired entries, at most once a second.
    pub(super) fn sweep(&mut self, now: Instant) {
        if now < self.last_sweep + SWEEP_INTERVAL {
            return;
        }
        self.last_sweep = now;
        let remembered = self.ttl.max(CRASHED_BUT_READY_PERIOD);
        self.crashes.retain(|crash| crash.known_at + remembered > now);
        self.trials.expire(now);
        self.records.retain(|_, record| record.remove_expired(now));
        self.tenants.sweep(now);
        self.count_suspects();
    }

    fn count_suspects(&mut self) {
        self.suspect_count = self.records.values().filter(|record| record.is_suspect()).count();
    }

    fn is_excused(&self, life: &EngineLife) -> bool {
        self.crashes.iter().any(|crash| crash.is_excused && crash.life == *life)
    }

    /// Charges a crash to a request's tenant, if the request is charged with it.
    fn charge_tenant(&mut self, fingerprint: Fingerprint, life: &EngineLife) {
        if let Some(crash) = self.records.get(&fingerprint).and_then(|record| record.crash_of(life)) {
            self.tenants.charge(TenantCharge::new(fingerprint, crash, false));
        }
    }

    /// How many records, trials and crashes are kept.
    #[cfg(test)]
    pub(super) fn lengths(&self) -> (usize, usize, usize) {
        (self.records.len(), self.trials.len(), self.crashes.len())
    }

    /// Records an engine's crash. Returns who was there.
    fn record_crash(&mut self, life: &EngineLife, known_at: Instant, now: Instant) -> CrashScene {
        if let Some(crash) = self.crashes.iter().find(|crash| crash.life == *life) {
            return crash.scene.clone();
        }
        let scene = self.trials.scene_at(life, now);
        if self.crashes.len() >= MAX_CRASHES {
            self.crashes.remove(0);
        }
        self.crashes.push(EngineCrash { life: life.clone(), known_at, scene: scene.clone(), is_excused: false });
        scene
    }

    /// Blames a crash on a request.
    fn charge(&mut self, fingerprint: Fingerprint, crash: ChargedCrash, scene: &CrashScene, now: Instant) -> BlameOutcome {
        let most = if crash.is_witnessed { MAX_RECORDS } else { MAX_REPORTED_RECORDS };
        if !self.records.contains_key(&fingerprint) && self.records.len() >= most {
            return BlameOutcome::default();
        }
        let record = self.records.entry(fingerprint).or_default();
        let (was_suspect, was_refused) = (record.is_suspect(), record.is_banned(now));
        if crash.is_witnessed {
            self.tenants.witness(fingerprint, &crash.life);
        }
        let verdict = record.charge(crash, |record| record.judge(fingerprint, scene, now));
        self.suspect_count += usize::from(!was_suspect && record.is_suspect());
        let ban = match record.standing(now) {
            SuspectStanding::Banned(ban) if !was_refused => Some(ban),
            _ => None,
        };
        BlameOutcome { ban, is_excused: matches!(verdict, CrashVerdict::Shared(_) | CrashVerdict::Spared) }
    }
}
