//! The latest requests that were refused before a replica was chosen, for the page. Whoever floods
//! the router with them pushes out its own, not those of others.

use std::sync::Arc;

use hostler_api::Route;
use parking_lot::Mutex;
use serde::Serialize;

use super::line::AccessLine;
use crate::client_text::cut;
use crate::event_log::millis_since_1970;

/// Most refusals. Names are cut to 128 bytes each, so they take 20 kB at most.
const MAX_REFUSALS: usize = 32;

/// Refusals that differ in nothing but their time. It has names and our own words: no prompt, no
/// key, no text of an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct RefusedRequest {
    /// A running number.
    number: u64,
    /// When the latest one ended, in milliseconds since 1970.
    at_ms: u64,
    /// How many there were.
    count: u64,
    method: String,
    path: Box<str>,
    /// Empty if the request names none, or was not read.
    model: Box<str>,
    /// The public id of the key; empty if the request had no valid one.
    key: Box<str>,
    tenant: Box<str>,
    status: u16,
    cause: &'static str,
}

impl RefusedRequest {
    /// The refusal that an ended request was, if it was one.
    pub(super) fn of(line: &AccessLine) -> Option<Self> {
        let (status, cause) = (line.status.filter(|status| *status >= 400)?, line.cause()?);
        let path = line.path.as_deref().unwrap_or_default();
        if line.replica.is_some() || line.outcome.is_some() || is_probe(path) {
            return None;
        }
        Some(Self {
            number: 0,
            at_ms: millis_since_1970(line.ended_at),
            count: 1,
            method: cut(line.method.as_str()).to_owned(),
            path: path.into(),
            model: line.model.clone().unwrap_or_default(),
            key: (&*line.key).into(),
            tenant: (&*line.tenant).into(),
            status,
            cause,
        })
    }

    /// Whose place in the list it takes: the tenant's, else the key's. All without a key share one.
    fn holder(&self) -> &str {
        if self.tenant.is_empty() { &self.key } else { &self.tenant }
    }

    fn is_like(&self, other: &Self) -> bool {
        let distinguishing = |one: &Self| (one.status, one.cause, one.method.clone(), one.key.clone(), one.tenant.clone());
        (&self.path, &self.model) == (&other.path, &other.model) && distinguishing(self) == distinguishing(other)
    }
}

/// Load balancers ask every few seconds whether a router is ready.
fn is_probe(path: &str) -> bool {
    matches!(Route::of(path), Route::Health | Route::Ping | Route::Healthz | Route::Readyz | Route::Livez)
}

/// Clones share the list.
#[derive(Debug, Clone, Default)]
pub(crate) struct RefusalLog(Arc<Mutex<Refusals>>);

#[derive(Debug, Default)]
struct Refusals {
    last_number: u64,
    /// Changes with each refusal.
    version: u64,
    /// The longest unchanged first.
    latest: Vec<RefusedRequest>,
}

impl RefusalLog {
    pub(super) fn record(&self, refused: RefusedRequest) {
        let mut refusals = self.0.lock();
        refusals.version += 1;
        if let Some(at) = refusals.latest.iter().position(|known| known.is_like(&refused)) {
            let known = refusals.latest.remove(at);
            refusals.latest.push(RefusedRequest { number: known.number, count: known.count + 1, ..refused });
            return;
        }
        if refusals.latest.len() >= MAX_REFUSALS {
            let most = refusals.latest.iter().max_by_key(|one| refusals.count_of(one.holder())).map(|one| one.holder().to_owned());
            let oldest = refusals.latest.iter().position(|one| most.as_deref() == Some(one.holder()));
            oldest.map(|at| refusals.latest.remove(at));
        }
        refusals.last_number += 1;
        let number = refusals.last_number;
        refusals.latest.push(RefusedRequest { number, ..refused });
    }

    /// The refusals, the latest first, if they have changed since this version; and their version.
    pub(crate) fn since(&self, version: u64) -> Option<(u64, Vec<RefusedRequest>)> {
        let refusals = self.0.lock();
        (refusals.version != version).then(|| (refusals.version, refusals.latest.iter().rev().cloned().collect()))
    }
}

impl Refusals {
    fn count_of(&self, holder: &str) -> usize {
        self.latest.iter().filter(|one| one.holder() == holder).count()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    fn refused(tenant: &str, model: &str) -> AccessLine {
        AccessLine {
            path: Some("/v1/completions".into()),
            tenant: tenant.into(),
            model: Some(model.into()),
            status: Some(429),
            cause: Some("limited"),
            ..AccessLine::new(Instant::now())
        }
    }

    fn holders(log: &RefusalLog) -> Vec<(String, u64)> {
        let (_, latest) = log.since(0).unwrap();
        latest.into_iter().map(|one| (one.holder().to_owned(), one.count)).collect()
    }

    #[test]
    fn a_flood_of_one_tenant_leaves_the_refusals_of_others() {
        let log = RefusalLog::default();
        let record = |tenant, model: &str| log.record(RefusedRequest::of(&refused(tenant, model)).unwrap());
        record("calm", "a");
        (0..5000).for_each(|index| record("flood", &index.to_string()));
        record("quiet", "b");
        let kept = holders(&log);
        assert_eq!((kept.len(), &kept[0].0[..], &kept[MAX_REFUSALS - 1].0[..]), (MAX_REFUSALS, "quiet", "calm"));
        assert!(log.since(log.since(0).unwrap().0).is_none(), "nothing is new");
    }

    #[test]
    fn equal_refusals_are_counted_in_one_row() {
        let log = RefusalLog::default();
        (0..900).for_each(|_| log.record(RefusedRequest::of(&refused("flood", "m")).unwrap()));
        log.record(RefusedRequest::of(&refused("calm", "m")).unwrap());
        assert_eq!(holders(&log), [("calm".into(), 1), ("flood".into(), 900)]);
    }

    #[test]
    fn only_what_no_replica_got_is_a_refusal() {
        let placed = AccessLine { replica: Some("n/0".into()), ..refused("t", "m") };
        let probed = AccessLine { path: Some("/health".into()), status: Some(503), cause: None, ..refused("t", "m") };
        let answered = AccessLine { status: Some(200), cause: None, ..refused("t", "m") };
        assert!([placed, probed, answered].iter().all(|line| RefusedRequest::of(line).is_none()));
    }
}
