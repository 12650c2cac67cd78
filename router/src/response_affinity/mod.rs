//! Which replica keeps the state of a response of `/v1/responses`, and whose it is. Filled from the answers as they pass, asked for
//! before a request that names a response is placed.
//!
//! Engines keep responses in their memory and nowhere else, so the table forgets with them: an entry counts only as long as the engine
//! lives that it was learned of. It is this router's own; what another router has learned is found by asking the replicas (`ask`).

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

/// Responses that are remembered: with ids of 37 bytes about 10 MB. When it is full, the tenant
/// with the most loses its oldest, so that nobody within its share loses any to others.
const MAX_RESPONSES: usize = 65_536;

/// How long a response is remembered. OpenAI keeps responses for 30 days; an engine's memory seldom
/// lasts that long.
const RETENTION: Duration = Duration::from_secs(24 * 3600);

/// The longest id that is remembered, in bytes; vLLM's own have 37, and a client may choose
/// another.
const MAX_ID_BYTES: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ResponseLookup {
    /// The caller's, kept there.
    Found(EngineLife),
    /// It is another tenant's, or its engine is gone: the caller has no such response.
    Unavailable,
    /// It is not known here; it may have come through another router.
    Unknown,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct ResponseAffinity(Arc<Mutex<ResponseTable>>);

#[derive(Debug, Default)]
struct ResponseTable {
    by_id: FxHashMap<Arc<str>, StoredResponse>,
    /// Each tenant's expiry times in order; an id that was learned again is there twice.
    expirations: FxHashMap<Arc<str>, VecDeque<(Instant, Arc<str>)>>,
    expiration_count: usize,
    /// Where further responses are told, once another router takes this one's place.
    successor: Option<mpsc::UnboundedSender<ResponseRecord>>,
}

#[derive(Debug)]
struct StoredResponse {
    life: EngineLife,
    tenant: Arc<str>,
    expires_at: Instant,
}

impl ResponseAffinity {
    /// Remembers where a response is. One that another tenant has stays that tenant's, as long as it lives.
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
            // One that reads too slowly does not know this response.
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
            // There are as many tenants as the operator has made, and only a full table is
            // searched.
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
