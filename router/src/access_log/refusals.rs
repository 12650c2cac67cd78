//! The latest requests that were refused before a replica was chosen, for the page. Whoever floods
//! the router with them pushes out its own, not those of others.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hostler_api::Route;
use hostler_proto::fleet::v1 as wire;
use parking_lot::Mutex;
use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64;

use super::line::AccessLine;
use crate::client_text::cut;
use crate::event_log::millis_since_1970;

/// Most refusals. Names are cut to 128 bytes each, so they take 20 kB at most.
const MAX_REFUSALS: usize = 32;

/// Most requests of one row that are found by their names: 32 kB of all rows.
const MAX_NAMED: usize = 64;

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
    /// What the cause means, for people.
    meaning: &'static str,
    /// The latest of these requests, the oldest first: the router's number and the hash of the
    /// client's id, each 0 if it has none.
    #[serde(skip)]
    named: VecDeque<(u64, u64)>,
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
            meaning: meaning(cause),
            named: [(line.id, line.client_id.as_deref().map_or(0, hash))].into(),
        })
    }

    /// When the latest one ended.
    pub(crate) fn ended_at(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(self.at_ms)
    }

    pub(crate) fn message(&self) -> wire::RefusedRequest {
        wire::RefusedRequest {
            at_ms: self.at_ms,
            count: self.count,
            method: self.method.clone(),
            path: self.path.to_string(),
            model: self.model.to_string(),
            key: self.key.to_string(),
            tenant: self.tenant.to_string(),
            status: self.status.into(),
            cause: self.cause.to_owned(),
            meaning: self.meaning.to_owned(),
        }
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

fn hash(client_id: &str) -> u64 {
    xxh3_64(client_id.as_bytes())
}

/// What a cause means, for people; empty if its name says it.
fn meaning(cause: &str) -> &'static str {
    match cause {
        "crash_suspect" => "Engines have crashed with this request, so no further one gets it.",
        "forbidden" => "Its key may not do this: the model, the priority or the path is not allowed to it.",
        "limited" => "Its tenant, or the router, has reached a limit of requests or tokens. `hostler keys list` shows limits.",
        "lost" => "Each attempt was lost, and no further replica could take it.",
        "malformed" => "The request itself is wrong: its headers or its body. The client got the details.",
        "media" => "It names media on a host that engines may not fetch from (router.media_hosts).",
        "missing_route" => "No engine of this model has that path.",
        "no_response" => "It names a stored response that no engine keeps, or that belongs to somebody else.",
        "no_route" => "The router has no such path, or not for this method.",
        "not_ready" => "No replica of the model could take it.",
        "origin" => "A web page of an origin that is not in router.allowed_origins has sent it.",
        "overloaded" => "The queue is full, or the wait for a replica with room was too long.",
        "too_large" => "Its body is larger than router.max_body_bytes.",
        "too_slow" => "The engine was too slow to answer (router.answer_timeout).",
        "unauthenticated" => "It has no key, or one that is unknown, expired or revoked.",
        "unknown_model" => "No replica serves a model of this name, or its key may not use it.",
        _ => "",
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
            let mut known = refusals.latest.remove(at);
            if known.named.len() >= MAX_NAMED {
                known.named.pop_front();
            }
            known.named.extend(&refused.named);
            refusals.latest.push(RefusedRequest { number: known.number, count: known.count + 1, named: known.named, ..refused });
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

    /// The refusals of the request of this name, which is the router's number in hexadecimal or the
    /// client's id.
    pub(crate) fn find(&self, name: &str) -> Vec<RefusedRequest> {
        let (id, client) = (u64::from_str_radix(name, 16).unwrap_or(0), hash(name));
        let is_meant = |(number, client_id): &(u64, u64)| (*number != 0 && *number == id) || *client_id == client;
        self.0.lock().latest.iter().rev().filter(|refused| refused.named.iter().any(is_meant)).cloned().collect()
    }

    /// The latest refusals after this moment, the newest first.
    pub(crate) fn after(&self, moment: SystemTime, most: usize) -> Vec<RefusedRequest> {
        self.0.lock().latest.iter().rev().take(most).filter(|refused| refused.ended_at() > moment).cloned().collect()
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
    fn a_refused_request_is_found_by_its_number_and_its_clients_name() {
        let log = RefusalLog::default();
        for number in 1..=200 {
            let line = AccessLine { id: number, client_id: Some(format!("mine-{number}").into()), ..refused("t", "m") };
            log.record(RefusedRequest::of(&line).unwrap());
        }
        log.record(RefusedRequest::of(&refused("other", "m")).unwrap());
        for name in ["00000000000000c8", "mine-200", "mine-137"] {
            let found = log.find(name);
            assert_eq!((found.len(), &*found[0].tenant, found[0].count), (1, "t", 200), "{name}");
        }
        assert!(["0", "", "mine-136", "c9"].iter().all(|name| log.find(name).is_empty()), "names that nobody has, and old ones");
    }

    #[test]
    fn only_what_no_replica_got_is_a_refusal() {
        let placed = AccessLine { replica: Some("n/0".into()), ..refused("t", "m") };
        let probed = AccessLine { path: Some("/health".into()), status: Some(503), cause: None, ..refused("t", "m") };
        let answered = AccessLine { status: Some(200), cause: None, ..refused("t", "m") };
        assert!([placed, probed, answered].iter().all(|line| RefusedRequest::of(line).is_none()));
    }
}
