//! A bounded pool that tenants share, such as memory or places. A tenant that takes all it can
//! leaves the next one room, without anybody being evicted. Body memory, record memory and
//! admission have one.

use std::sync::Arc;

use hostler_placement::queue::has_fair_share;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

#[derive(Debug)]
pub(crate) struct TenantPool {
    capacity: usize,
    usage: Mutex<PoolUsage>,
}

#[derive(Debug, Default)]
struct PoolUsage {
    total: usize,
    /// Use by tenant, only of those that hold something.
    tenants: FxHashMap<u64, usize>,
}

/// The part of a pool that one holder has, returned when it is dropped.
#[derive(Debug)]
pub(crate) struct PoolShare {
    pool: Arc<TenantPool>,
    tenant: u64,
    weight: f64,
    amount: usize,
}

impl TenantPool {
    #[must_use]
    pub(crate) fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Self { capacity, usage: Mutex::default() })
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// A holder that has nothing yet.
    #[must_use]
    pub(crate) fn share(self: &Arc<Self>, tenant: u64, weight: f64) -> PoolShare {
        PoolShare { pool: self.clone(), tenant, weight, amount: 0 }
    }
}

#[cfg(test)]
impl TenantPool {
    pub(crate) fn taken(&self) -> usize {
        self.usage.lock().total
    }

    pub(crate) fn taken_by(&self, tenant: u64) -> usize {
        self.usage.lock().tenants.get(&tenant).copied().unwrap_or_default()
    }

    pub(crate) fn tenant_count(&self) -> usize {
        self.usage.lock().tenants.len()
    }
}

#[cfg(test)]
impl PoolShare {
    pub(crate) fn amount(&self) -> usize {
        self.amount
    }
}

impl PoolShare {
    pub(crate) fn tenant(&self) -> u64 {
        self.tenant
    }

    pub(crate) fn pool(&self) -> &Arc<TenantPool> {
        &self.pool
    }

    /// Grows to `amount`, as if the pool had no more than `capacity`. If that is not allowed,
    /// nothing changes. The holder's present amount does not count against the rest of it.
    #[must_use]
    pub(crate) fn grow_to(&mut self, amount: usize, capacity: usize) -> bool {
        let more = amount.saturating_sub(self.amount);
        if more == 0 {
            return true;
        }
        let mut usage = self.pool.usage.lock();
        let free = capacity.min(self.pool.capacity).saturating_sub(usage.total);
        let own = usage.tenants.get(&self.tenant).copied().unwrap_or_default();
        if free < more || !has_fair_share((own - self.amount) as u64, free as u64, self.weight) {
            return false;
        }
        usage.total += more;
        usage.tenants.insert(self.tenant, own + more);
        self.amount = amount;
        true
    }

    /// Returns everything beyond `amount`.
    pub(crate) fn shrink_to(&mut self, amount: usize) {
        let surplus = self.amount.saturating_sub(amount);
        if surplus == 0 {
            return;
        }
        self.amount -= surplus;
        let mut usage = self.pool.usage.lock();
        usage.total -= surplus;
        if let Some(own) = usage.tenants.get_mut(&self.tenant) {
            *own -= surplus;
            if *own == 0 {
                usage.tenants.remove(&self.tenant);
            }
        }
    }

    /// Moves the whole share out of this holder.
    pub(crate) fn take(&mut self) -> Self {
        Self { pool: self.pool.clone(), tenant: self.tenant, weight: self.weight, amount: std::mem::take(&mut self.amount) }
    }
}

impl Drop for PoolShare {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_that_takes_all_it_can_leaves_others_room() {
        let pool = TenantPool::new(1000);
        let take = |tenant| {
            let mut share = pool.share(tenant, 1.0);
            share.grow_to(1, usize::MAX).then_some(share)
        };
        let flood: Vec<PoolShare> = std::iter::from_fn(|| take(1)).collect();
        assert_eq!(flood.len(), 800, "four fifths");
        let second: Vec<PoolShare> = std::iter::from_fn(|| take(2)).collect();
        assert_eq!(second.len(), 160, "four fifths of what is left");
        assert!(take(3).is_some());
        drop((flood, second));
        assert_eq!((pool.taken(), pool.tenant_count()), (0, 0));
    }

    #[test]
    fn a_pool_share_grows_within_bounds_and_returns_all() {
        let pool = TenantPool::new(10);
        let (mut one, mut other) = (pool.share(1, 1.0), pool.share(1, 1.0));
        assert!(one.grow_to(6, usize::MAX) && one.grow_to(4, usize::MAX));
        assert!(!other.grow_to(5, usize::MAX) && !other.grow_to(2, 7) && other.grow_to(4, usize::MAX));
        let moved = one.take();
        drop(one);
        assert_eq!(pool.taken(), 10);
        drop(moved);
        assert!(other.grow_to(10, usize::MAX));
        other.shrink_to(3);
        assert_eq!(pool.taken(), 3);
    }
}
