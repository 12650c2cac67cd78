//! Charges crashes to tenants, and decides where a tenant's requests may go after too many.
//!
//! A ban stops one body, but changing a digit makes another body. This is a pure table, with time
//! as an argument; `suspect_table` records in it what every crash has shown. A crash is charged to
//! a tenant, and to only one, if
//!
//! - one of its requests was banned for it,
//! - one of its requests was all that was in flight,
//! - or the tenant was there, had a request banned before or is confined, and no other such tenant
//!   was there.
//!
//! So a tenant whose requests only ran beside another's is not confined. Without keys, all requests
//! would be confined at once, so none are.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::standing::Fingerprint;
use super::suspect_record::ChargedCrash;
use crate::engine_life::EngineLife;

/// Crashes after which a tenant is confined. A request that crashes engines costs two before it is
/// banned, so the second such request confines its tenant.
const CRASHES_TO_CONFINE: usize = 3;

/// Most tenants that are remembered, and most crashes of each. The second half of the tenants is
/// for those whose requests this router has lost itself, so that an agent that invents crashes does
/// not displace them.
const MAX_TENANTS: usize = 1024;
const MAX_CRASHES_PER_TENANT: usize = 64;

/// The tenant whose request has this name; `None` without keys.
pub(super) fn tenant_of(fingerprint: Fingerprint) -> Option<u64> {
    u64::try_from(fingerprint >> 64).ok().filter(|tenant| *tenant != 0)
}

/// A crash that is charged to requests of one tenant.
#[derive(Debug)]
struct TenantCrash {
    life: EngineLife,
    requests: Vec<Fingerprint>,
    expires_at: Instant,
    /// Whether a request was banned for the crash.
    is_proved: bool,
    /// Whether this router has lost one of the requests there; otherwise only the agent says so.
    is_witnessed: bool,
}

/// A crash with its presumed cause, a request.
#[derive(Debug)]
pub(super) struct TenantCharge<'a> {
    fingerprint: Fingerprint,
    crash: &'a ChargedCrash,
    is_proved: bool,
}

impl<'a> TenantCharge<'a> {
    pub(super) fn new(fingerprint: Fingerprint, crash: &'a ChargedCrash, is_proved: bool) -> Self {
        Self { fingerprint, crash, is_proved }
    }
}

#[derive(Debug, Default)]
struct TenantRecord {
    crashes: Vec<TenantCrash>,
    /// Where the tenant's requests for a model go, once it is confined and one was sent.
    replicas: FxHashMap<Option<Arc<str>>, Arc<str>>,
}

/// The replicas that a confined tenant's requests for a model might go to.
#[derive(Debug, Default)]
pub(crate) struct ConfinementChoices {
    /// Replicas that take requests for the model.
    pub(crate) ready: Vec<Arc<str>>,
    /// All replicas that take requests or are about to, whatever they serve.
    pub(crate) expected: Vec<Arc<str>>,
}

/// The place of a tenant whose requests have crashed too many engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Confinement {
    /// The replica; `None` if none takes requests for the model.
    pub(crate) replica: Option<Arc<str>>,
    /// How many engines the tenant's requests have crashed.
    pub(crate) crashes: usize,
    /// Whether the replica was chosen just now.
    pub(crate) is_new: bool,
}

/// The tenants that are charged with crashes.
#[derive(Debug, Default)]
pub(super) struct TenantCrashes(FxHashMap<u64, TenantRecord>);

impl TenantCrashes {
    /// Charges a crash to the tenant of a request, unless it is charged to another one.
    pub(super) fn charge(&mut self, charge: TenantCharge<'_>) {
        let TenantCharge { fingerprint, crash: ChargedCrash { life, expires_at, is_witnessed, .. }, is_proved } = charge;
        let Some(tenant) = tenant_of(fingerprint) else { return };
        let has_it = |record: &TenantRecord| record.crashes.iter().any(|crash| crash.life == *life);
        let most = if *is_witnessed { MAX_TENANTS } else { MAX_TENANTS / 2 };
        if self.0.iter().any(|(other, record)| *other != tenant && has_it(record))
            || (!self.0.contains_key(&tenant) && self.0.len() >= most)
        {
            return;
        }
        let crashes = &mut self.0.entry(tenant).or_default().crashes;
        if let Some(known) = crashes.iter_mut().find(|crash| crash.life == *life) {
            known.expires_at = known.expires_at.max(*expires_at);
            known.is_proved |= is_proved;
            known.is_witnessed |= is_witnessed;
            if !known.requests.contains(&fingerprint) {
                known.requests.push(fingerprint);
            }
            return;
        }
        // A further crash that only the node's agent reports counts no more than the first.
        let is_told = |crash: &TenantCrash| !crash.is_witnessed && crash.life.node() == life.node();
        let surplus = if *is_witnessed { (crashes.len() >= MAX_CRASHES_PER_TENANT).then_some(0) } else { crashes.iter().position(is_told) };
        if let Some(oldest) = surplus {
            crashes.remove(oldest);
        } else if crashes.len() >= MAX_CRASHES_PER_TENANT {
            return;
        }
        crashes.push(TenantCrash {
            life: life.clone(),
            requests: vec![fingerprint],
            expires_at: *expires_at,
            is_proved,
            is_witnessed: *is_witnessed,
        });
    }

    /// Records that this router has lost the request there.
    pub(super) fn witness(&mut self, fingerprint: Fingerprint, life: &EngineLife) {
        let Some(record) = tenant_of(fingerprint).and_then(|tenant| self.0.get_mut(&tenant)) else { return };
        let is_it = |crash: &&mut TenantCrash| crash.life == *life && crash.requests.contains(&fingerprint);
        record.crashes.iter_mut().find(is_it).into_iter().for_each(|crash| crash.is_witnessed = true);
    }

    /// The only tenant that had a request banned before, or is confined: of all tenants, or of
    /// those that had these requests in flight. `None` if there is none, or several.
    pub(super) fn only_reckless(&self, present: Option<&[Fingerprint]>, now: Instant) -> Option<u64> {
        let is_reckless = |record: &TenantRecord| {
            let is_proved = record.crashes.iter().any(|crash| crash.is_proved && crash.expires_at > now);
            is_proved || record.count(now) >= CRASHES_TO_CONFINE
        };
        let is_there = |tenant: u64| present.is_none_or(|requests| requests.iter().any(|request| tenant_of(*request) == Some(tenant)));
        let mut reckless = self.0.iter().filter(|(tenant, record)| is_reckless(record) && is_there(**tenant));
        let (first, _) = reckless.next()?;
        reckless.next().is_none().then_some(*first)
    }

    /// Clears a request that was answered well, so it has crashed nothing.
    pub(super) fn acquit(&mut self, fingerprint: Fingerprint) {
        let Some(record) = tenant_of(fingerprint).and_then(|tenant| self.0.get_mut(&tenant)) else { return };
        record.crashes.retain_mut(|crash| {
            crash.requests.retain(|request| *request != fingerprint);
            !crash.requests.is_empty()
        });
    }

    /// Forgets a crash for which no request is to blame.
    pub(super) fn forget(&mut self, life: &EngineLife) {
        self.0.values_mut().for_each(|record| record.crashes.retain(|crash| crash.life != *life));
    }

    /// Forgets expired crashes.
    pub(super) fn sweep(&mut self, now: Instant) {
        self.0.retain(|_, record| {
            record.crashes.retain(|crash| crash.expires_at > now);
            if record.count(now) < CRASHES_TO_CONFINE {
                record.replicas.clear();
            }
            !record.crashes.is_empty()
        });
    }

    pub(super) fn confined_count(&self, now: Instant) -> usize {
        self.0.values().filter(|record| record.count(now) >= CRASHES_TO_CONFINE).count()
    }

    pub(super) fn is_confined(&self, fingerprint: Fingerprint, now: Instant) -> bool {
        let record = tenant_of(fingerprint).and_then(|tenant| self.0.get(&tenant));
        record.is_some_and(|record| record.count(now) >= CRASHES_TO_CONFINE)
    }

    /// Where a request may go for this `model` if its tenant is confined.
    ///
    /// The replica stays the same as long as it is there or about to be. A new one is chosen as
    /// other routers would choose it, and first among those that the tenant has already crashed.
    pub(super) fn confine(
        &mut self,
        fingerprint: Fingerprint,
        model: Option<&str>,
        choices: &ConfinementChoices,
        now: Instant,
    ) -> Option<Confinement> {
        let tenant = tenant_of(fingerprint)?;
        let record = self.0.get_mut(&tenant)?;
        let crashes = record.count(now);
        if crashes < CRASHES_TO_CONFINE {
            return None;
        }
        let model: Option<Arc<str>> = model.map(Arc::from);
        let known = record.replicas.get(&model).filter(|known| choices.expected.contains(known)).cloned();
        if known.is_some() {
            return Some(Confinement { replica: known, crashes, is_new: false });
        }
        let was_crashed = |replica: &Arc<str>| record.crashes.iter().any(|crash| crash.life.replica == *replica);
        let chosen =
            choices.ready.iter().max_by_key(|replica| (was_crashed(replica), xxh3_64_with_seed(replica.as_bytes(), tenant))).cloned();
        if let Some(chosen) = &chosen {
            record.replicas.insert(model, chosen.clone());
        }
        Some(Confinement { is_new: chosen.is_some(), replica: chosen, crashes })
    }
}

impl TenantRecord {
    /// How many crashes count now. Crashes that only one node's agent reports count as one, so no
    /// agent can have a tenant confined by inventing crashes.
    fn count(&self, now: Instant) -> usize {
        let present: Vec<&TenantCrash> = self.crashes.iter().filter(|crash| crash.expires_at > now).collect();
        let witnessed = present.iter().filter(|crash| crash.is_witnessed).count();
        let mut nodes: Vec<&str> = present.iter().filter(|crash| !crash.is_witnessed).map(|crash| crash.life.node()).collect();
        nodes.sort_unstable();
        nodes.dedup();
        witnessed + nodes.len()
    }
}
