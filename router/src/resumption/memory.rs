//! The memory that the tokens of all streams share.

use std::sync::Arc;

use crate::placement::QueueShare;
use crate::tenant_pool::{PoolShare, TenantPool};

/// About 40 million tokens of six bytes each: ten thousand streams of four thousand.
const MAX_BYTES: usize = 256 * 1024 * 1024;

/// The memory, for the streams of one tenant. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct RecordMemory {
    pool: Arc<TenantPool>,
    tenant: u64,
    weight: f64,
}

impl Default for RecordMemory {
    fn default() -> Self {
        Self::with_bound(MAX_BYTES)
    }
}

impl RecordMemory {
    #[must_use]
    pub(super) fn with_bound(most: usize) -> Self {
        Self { pool: TenantPool::new(most), tenant: 0, weight: 1.0 }
    }

    /// This memory, for another tenant.
    #[must_use]
    pub(crate) fn of_tenant(&self, owner: QueueShare) -> Self {
        Self { pool: self.pool.clone(), tenant: owner.tenant, weight: owner.weight }
    }

    /// A share without anything in it.
    #[must_use]
    pub(super) fn share(&self) -> RecordShare {
        RecordShare(self.pool.share(self.tenant, self.weight))
    }

    #[cfg(test)]
    pub(crate) fn taken(&self) -> usize {
        self.pool.taken()
    }
}

/// Memory taken by one stream, until this is dropped.
#[derive(Debug)]
pub(super) struct RecordShare(PoolShare);

impl RecordShare {
    /// Grows the share to `bytes` in all; `false` if there is no room.
    pub(super) fn grow_to(&mut self, bytes: usize) -> bool {
        self.0.grow_to(bytes, usize::MAX)
    }

    /// Returns the whole share.
    pub(super) fn release(&mut self) {
        self.0.shrink_to(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_memory_is_bounded_and_shared_by_tenants() {
        let memory = RecordMemory::with_bound(100);
        let owner = |tenant| QueueShare { tenant, weight: 1.0, bytes: 0 };
        let (one, other) = (memory.of_tenant(owner(1)), memory.of_tenant(owner(2)));
        let streams = |memory: &RecordMemory| -> Vec<RecordShare> {
            std::iter::from_fn(|| {
                let mut stream = memory.share();
                stream.grow_to(1).then_some(stream)
            })
            .collect()
        };
        let (flood, rest) = (streams(&one), streams(&other));
        assert_eq!((flood.len(), rest.len()), (80, 16));
        drop((flood, rest));
        let mut stream = one.share();
        assert!(stream.grow_to(100) && !stream.grow_to(101));
        stream.release();
        assert_eq!(memory.taken(), 0);
    }
}
