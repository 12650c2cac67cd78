//! Knows which replica keeps the state of a response of `/v1/responses`, and which tenant owns it.
//!
//! The table is filled from passing answers, and consulted before a request that names a response
//! is placed. Engines keep responses only in their memory, so an entry counts only during the life
//! of the engine it was learned from. The table is this router's own; responses known to other
//! routers are found by asking the replicas (`query_replicas`).

mod handover;
mod id_reader;
mod replica_query;
mod response_reference;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::engine_life::EngineLife;
use crate::fleet::FleetView;

pub(crate) use handover::ResponseRecord;
pub(crate) use id_reader::{ResponseIdReader, ResponseRecorder};
pub(crate) use replica_query::query_replicas;
pub(crate) use response_reference::ResponseReference;

/// Most responses that are remembered: with ids of 37 bytes about 10 MB. When the table is full,
/// the tenant with the most responses loses its oldest, so nobody within its share loses any to
/// others.
const MAX_RESPONSES: usize = 65_536;

/// How long a response is remembered. OpenAI keeps responses for 30 days; an engine's memory seldom
/// lasts that long.
const RETENTION: Duration = Duration::from_secs(24 * 3600);

/// Longest id that is remembered, in bytes. vLLM's own ids have 37, and clients may choose others.
const MAX_ID_BYTES: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ResponseLookup {
    /// The response is the caller's, and this engine keeps it.
    Found(EngineLife),
    /// The caller has no such response: it is another tenant's, or its engine is gone.
    Unavailable,
    /// The id is unknown here; the response may have come through another router.
    Unknown,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct ResponseAffinity(Arc<Mutex<ResponseTable>>);

#[derive(Debug, Default)]
struct ResponseTable {
    by_id: FxHashMap<Arc<str>, StoredResponse>,
    /// Each tenant's expiry times in order. An id that was learned again is there twice.
    expirations: FxHashMap<Arc<str>, VecDeque<(Instant, Arc<str>)>>,
    expiration_count: usize,
    /// Receives further responses once another router takes this one's place.
    successor: Option<mpsc::UnboundedSender<ResponseRecord>>,
}

#[derive(Debug)]
struct StoredResponse {
    life: EngineLife,
    tenant: Arc<str>,
    expires_at: Instant,
}

impl ResponseAffinity {
    /// Remembers where a response is. While another tenant has a response with this id, that one
    /// stays.
    pub(crate) fn record(&self, id: &str, life: EngineLife, tenant: &Arc<str>, now: Instant) {
        self.record_stored(id, StoredResponse { life, tenant: tenant.clone(), expires_at: now + RETENTION }, now);
    }

    fn record_stored(&self, id: &str, stored: StoredResponse, now: Instant) {
        if id.len() > MAX_ID_BYTES {
            return;
        }
        let mut table = self.0.lock();
        table.make_room(&stored.tenant, now);
        if table.by_id.get(id).is_some_and(|kept| kept.expires_at > now && kept.tenant != stored.tenant) {
            return;
        }
        let id: Arc<str> = id.into();
        if let Some(successor) = &table.successor {
            // A successor that reads too slowly does not learn of this response.
            let _ = successor.send(ResponseRecord::new(&id, &stored, now));
        }
        table.expirations.entry(stored.tenant.clone()).or_default().push_back((stored.expires_at, id.clone()));
        table.expiration_count += 1;
        table.by_id.insert(id, stored);
    }

    /// Looks up a response for a caller of this tenant.
    #[must_use]
    pub(crate) fn look_up(&self, id: &str, tenant: &str, view: &FleetView, now: Instant) -> ResponseLookup {
        let table = self.0.lock();
        match table.by_id.get(id).filter(|kept| kept.expires_at > now) {
            Some(kept) if &*kept.tenant != tenant || !view.is_alive(&kept.life) => ResponseLookup::Unavailable,
            Some(kept) => ResponseLookup::Found(kept.life.clone()),
            None => ResponseLookup::Unknown,
        }
    }

    /// Whether another tenant has a response with this id, which a new one would replace.
    #[must_use]
    pub(crate) fn belongs_to_another(&self, id: &str, tenant: &str, now: Instant) -> bool {
        self.0.lock().by_id.get(id).is_some_and(|kept| kept.expires_at > now && &*kept.tenant != tenant)
    }
}

impl ResponseTable {
    /// Forgets this tenant's expired responses and makes room for one more.
    fn make_room(&mut self, tenant: &Arc<str>, now: Instant) {
        while self.expirations.get(tenant).and_then(VecDeque::front).is_some_and(|(end, _)| *end <= now) {
            self.drop_oldest(tenant);
        }
        while self.expiration_count >= MAX_RESPONSES {
            // The operator decides how many tenants there are, and only a full table is searched.
            let Some(greatest) = self.expirations.iter().max_by_key(|(_, ends)| ends.len()).map(|(tenant, _)| tenant.clone()) else {
                return;
            };
            self.drop_oldest(&greatest);
        }
    }

    fn drop_oldest(&mut self, tenant: &Arc<str>) {
        let Some(ends) = self.expirations.get_mut(tenant) else { return };
        if let Some((end, id)) = ends.pop_front() {
            self.expiration_count -= 1;
            // An id that was learned again has a later place in the order.
            if self.by_id.get(&id).is_some_and(|kept| kept.expires_at == end) {
                self.by_id.remove(&id);
            }
        }
        if ends.is_empty() {
            self.expirations.remove(tenant);
        }
    }
}

#[cfg(test)]
mod tests;
