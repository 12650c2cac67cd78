//! Who may still wait: bounds on how many requests wait and on the bytes of their bodies, shared among tenants by what is free.

use rustc_hash::FxHashMap;

/// A tenant of weight 1 may have this many times as many places as are free. One that floods alone therefore gets four fifths of them and
/// two get four ninths each; whoever comes then still finds a place, at once and without anybody being sent away who was let in.
const TIMES_FREE: f64 = 4.0;

/// Whether a tenant that has `own` of something may have more of it while so much is `free`. Its first needs only be there.
#[must_use]
pub fn has_share(own: u64, free: u64, weight: f64) -> bool {
    own == 0 || (own as f64) < TIMES_FREE * super::weight(weight) * free as f64
}

/// The places of a queue, or of several.
#[derive(Debug)]
pub struct Places {
    most: Taken,
    taken: Taken,
    tenants: FxHashMap<u64, Taken>,
}

/// Requests and the bytes of their bodies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Taken {
    requests: u64,
    bytes: u64,
}

/// Which bound is in a request's way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Full {
    /// As many wait, of all or of this tenant, as may.
    Requests,
    /// Their bodies have as many bytes as they may.
    Bytes,
}

impl Places {
    /// For at most so many requests, whose bodies have at most so many bytes.
    #[must_use]
    pub fn new(most: usize, most_bytes: u64) -> Self {
        Self { most: Taken { requests: most as u64, bytes: most_bytes }, taken: Taken::default(), tenants: FxHashMap::default() }
    }

    /// Whether a tenant may take one more place.
    ///
    /// # Errors
    /// When it may not: which bound is in its way.
    pub fn check(&self, tenant: u64, weight: f64, bytes: u64) -> Result<(), Full> {
        let own = self.tenants.get(&tenant).copied().unwrap_or_default();
        let may = |own: u64, more: u64, taken: u64, most: u64| {
            let free = most.saturating_sub(taken);
            free >= more && has_share(own, free, weight)
        };
        if !may(own.requests, 1, self.taken.requests, self.most.requests) {
            Err(Full::Requests)
        } else if !may(own.bytes, bytes, self.taken.bytes, self.most.bytes) {
            Err(Full::Bytes)
        } else {
            Ok(())
        }
    }

    /// Takes a place.
    ///
    /// # Errors
    /// When the tenant may not have one more.
    pub fn take(&mut self, tenant: u64, weight: f64, bytes: u64) -> Result<(), Full> {
        self.check(tenant, weight, bytes)?;
        for taken in [&mut self.taken, self.tenants.entry(tenant).or_default()] {
            taken.requests += 1;
            taken.bytes += bytes;
        }
        Ok(())
    }

    /// Gives back a place that was taken for this many bytes.
    pub fn leave(&mut self, tenant: u64, bytes: u64) {
        let Some(own) = self.tenants.get_mut(&tenant) else { return };
        for taken in [&mut self.taken, &mut *own] {
            taken.requests -= 1;
            taken.bytes -= bytes;
        }
        if own.requests == 0 {
            self.tenants.remove(&tenant);
        }
    }

    /// Places that are taken.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.taken.requests
    }

    /// Bytes of the bodies of those who wait.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.taken.bytes
    }
}
