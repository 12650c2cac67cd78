//! Who may still wait: bounds on how many requests wait and on the bytes of their bodies, shared among tenants by what is free.

use rustc_hash::FxHashMap;

/// A tenant of weight 1 may have this many times as many places as are free. One that floods alone
/// gets four fifths of them, and two get four ninths each; a tenant that comes later still finds a
/// place at once, without anybody being put out.
const SHARE_OF_FREE: f64 = 4.0;

/// Whether a tenant that has `own` of something may have more while so much is `free`. Its first is
/// granted if any is free.
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

/// Which limit blocks a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueFull {
    /// The number of requests, in all or of this tenant.
    Requests,
    /// The bytes of their bodies.
    Bytes,
}

impl SlotQuota {
    /// `most` requests, whose bodies have at most `most_bytes` bytes together.
    #[must_use]
    pub fn new(most: usize, most_bytes: u64) -> Self {
        Self { limits: SlotUsage { requests: most as u64, bytes: most_bytes }, used: SlotUsage::default(), by_tenant: FxHashMap::default() }
    }

    /// Whether a tenant may take one more place.
    ///
    /// # Errors
    /// When it may not: which limit blocks it.
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
    /// When the tenant may not have one more: which limit blocks it.
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
