//! Which replica keeps the state of a response of `/v1/responses`, and whose it is. Filled from the answers as they pass, asked for
//! before a request that names a response is placed.
//!
//! Engines keep responses in their memory and nowhere else, so the table forgets with them: an entry counts only as long as the engine
//! lives that it was learned of. It is this router's own; what another router has learned is found by asking the replicas (`ask`).

mod ask;
mod named;
mod watch;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::time::Instant;

use crate::fleet::{FleetView, Replica};

pub use ask::ask;
pub use named::Named;
pub use watch::{Keep, Watch};

/// Responses that are remembered: with ids of 37 bytes about 10 MB. Of the tenant that has most of them, the oldest one makes way: so nobody loses any
/// to others as long as it has no more than its share.
const MOST: usize = 65_536;

/// How long a response is remembered. OpenAI keeps them for 30 days; an engine's memory seldom lives that long.
const LIFE: Duration = Duration::from_secs(24 * 3600);

/// Ids are remembered up to this length; vLLM's own have 37 bytes, and a client may choose another.
const ID_BYTES: usize = 256;

/// One life of a replica's engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Home {
    /// The replica's id.
    pub replica: Arc<str>,
    /// The life of its engine.
    pub epoch: u64,
}

impl Home {
    /// The present life of a replica's engine.
    #[must_use]
    pub fn of(replica: &Replica) -> Self {
        Self { replica: replica.id.clone(), epoch: replica.epoch }
    }

    /// Whether it is this replica, in this life.
    #[must_use]
    pub fn is(&self, replica: &Replica) -> bool {
        replica.epoch == self.epoch && replica.id == self.replica
    }

    /// Whether that life lasts.
    #[must_use]
    pub fn lives(&self, view: &FleetView) -> bool {
        view.replicas.iter().any(|replica| self.is(replica))
    }
}

/// What is known of a response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Known {
    /// The caller's, kept there.
    Here(Home),
    /// Another tenant's, or its engine is gone: there is no such response for the caller.
    Gone,
    /// Nothing: it may have come through another router.
    Unknown,
}

/// The responses that are remembered. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Sticky(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    kept: FxHashMap<Arc<str>, Kept>,
    /// Each tenant's, in the order in which they end; an id that was learned again is there twice.
    ends: FxHashMap<Arc<str>, VecDeque<(Instant, Arc<str>)>>,
    /// The ends of all tenants.
    count: usize,
}

#[derive(Debug)]
struct Kept {
    home: Home,
    tenant: Arc<str>,
    until: Instant,
}

impl Sticky {
    /// Remembers where a response is. One that another tenant has stays that tenant's, as long as it lives.
    pub fn learn(&self, id: &str, home: Home, tenant: &Arc<str>, now: Instant) {
        if id.len() > ID_BYTES {
            return;
        }
        let mut table = self.0.lock();
        table.forget(tenant, now);
        if table.kept.get(id).is_some_and(|kept| kept.until > now && kept.tenant != *tenant) {
            return;
        }
        let (id, until): (Arc<str>, Instant) = (id.into(), now + LIFE);
        table.ends.entry(tenant.clone()).or_default().push_back((until, id.clone()));
        table.count += 1;
        table.kept.insert(id, Kept { home, tenant: tenant.clone(), until });
    }

    /// What is known of a response for a caller of this tenant.
    #[must_use]
    pub fn find(&self, id: &str, tenant: &str, view: &FleetView, now: Instant) -> Known {
        let table = self.0.lock();
        match table.kept.get(id).filter(|kept| kept.until > now) {
            Some(kept) if &*kept.tenant != tenant || !kept.home.lives(view) => Known::Gone,
            Some(kept) => Known::Here(kept.home.clone()),
            None => Known::Unknown,
        }
    }

    /// Whether another tenant has a response of this name, which a new one would replace.
    #[must_use]
    pub fn is_of_another(&self, id: &str, tenant: &str, now: Instant) -> bool {
        self.0.lock().kept.get(id).is_some_and(|kept| kept.until > now && &*kept.tenant != tenant)
    }

    /// Responses that are remembered.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.lock().kept.len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Table {
    /// Forgets what of this tenant is over, and makes room for one more.
    fn forget(&mut self, tenant: &Arc<str>, now: Instant) {
        while self.ends.get(tenant).and_then(VecDeque::front).is_some_and(|(end, _)| *end <= now) {
            self.drop_oldest(tenant);
        }
        while self.count >= MOST {
            // Tenants are as many as the operator has made, and only a full table is searched.
            let Some(greatest) = self.ends.iter().max_by_key(|(_, ends)| ends.len()).map(|(tenant, _)| tenant.clone()) else { return };
            self.drop_oldest(&greatest);
        }
    }

    fn drop_oldest(&mut self, tenant: &Arc<str>) {
        let Some(ends) = self.ends.get_mut(tenant) else { return };
        if let Some((end, id)) = ends.pop_front() {
            self.count -= 1;
            // Learned again since, it has a later place in the order.
            if self.kept.get(&id).is_some_and(|kept| kept.until == end) {
                self.kept.remove(&id);
            }
        }
        if ends.is_empty() {
            self.ends.remove(tenant);
        }
    }
}

#[cfg(test)]
mod tests;
