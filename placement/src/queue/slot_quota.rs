//! Limits on waiting requests and on the bytes of their bodies, shared among tenants by the free
//! part.

use rustc_hash::FxHashMap;

/// Places that a tenant of weight 1 may have, as a multiple of the free ones.
///
/// A single flooding tenant gets four fifths of them, and two get four ninths each. A tenant that
/// comes later still finds a place at once, without displacing anybody.
const SHARE_OF_FREE: f64 = 4.0;

/// Whether a tenant that has `own` of a resource may have more while `free` is left.
///
/// Its first unit is granted if any is free.
#[must_use]
pub fn has_fair_share(own: u64, free: u64, weight: f64) -> bool {
    own == 0 || (own as f64) < SHARE_OF_FREE * super::clamp_weight(weight) * free as f64
}

#[derive(Debug)]
pub struct SlotQuota {
    limits: SlotUsage,
    used: SlotUsage,
    by_tenant: FxHashMap<u64, SlotUsage>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct SlotUsage {
    requests: u64,
    bytes: u64,
}

/// Limit that blocks a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueFull {
    /// Limit on the number of requests, in all or of this tenant.
    Requests,
    /// Limit on the bytes of their bodies.
    Bytes,
}

impl SlotQuota {
    /// Creates a quota for `most` requests, whose bodies have at most `most_bytes` bytes together.
    #[must_use]
    pub fn new(most: usize, most_bytes: u64) -> Self {
        Self { limits: SlotUsage { requests: most as u64, bytes: most_bytes }, used: SlotUsage::default(), by_tenant: FxHashMap::default() }
    }

    /// Checks whether a tenant may take one more place.
    ///
    /// # Errors
    /// The limit that blocks the tenant.
    pub fn check(&self, tenant: u64, weight: f64, bytes: u64) -> Result<(), QueueFull> {
        let own = self.by_tenant.get(&tenant).copied().unwrap_or_default();
        let may = |own: u64, more: u64, taken: u64, most: u64| {
            let free = most.saturating_sub(taken);
            free >= more && has_fair_share(own, free, weight)
        };
        if !may(own.requests, 1, self.used.requests, self.limits.requests) {
            Err(QueueFull::Requests)
        } else if !may(own.bytes, bytes, self.used.bytes, self.limits.bytes) {
            Err(QueueFull::Bytes)
        } else {
            Ok(())
        }
    }

    /// Takes a place.
    ///
    /// # Errors
    /// The limit that blocks the tenant.
    pub fn reserve(&mut self, tenant: u64, weight: f64, bytes: u64) -> Result<(), QueueFull> {
        self.check(tenant, weight, bytes)?;
        for taken in [&mut self.used, self.by_tenant.entry(tenant).or_default()] {
            taken.requests += 1;
            taken.bytes += bytes;
        }
        Ok(())
    }

    pub fn release(&mut self, tenant: u64, bytes: u64) {
        let Some(own) = self.by_tenant.get_mut(&tenant) else { return };
        for taken in [&mut self.used, &mut *own] {
            taken.requests -= 1;
            taken.bytes -= bytes;
        }
        if own.requests == 0 {
            self.by_tenant.remove(&tenant);
        }
    }

    #[must_use]
    pub fn queued(&self) -> u64 {
        self.used.requests
    }

    #[must_use]
    pub fn queued_bytes(&self) -> u64 {
        self.used.bytes
    }
}
