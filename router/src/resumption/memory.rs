//! What the tokens of all streams may take together.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Some 40 million tokens, at six bytes each: ten thousand streams of four thousand.
const MAX_BYTES: usize = 256 * 1024 * 1024;

/// Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct RecordMemory(Arc<RecordMemoryUse>);

#[derive(Debug)]
struct RecordMemoryUse {
    taken: AtomicUsize,
    most: usize,
}

impl Default for RecordMemory {
    fn default() -> Self {
        Self::with_bound(MAX_BYTES)
    }
}

impl RecordMemory {
    #[must_use]
    pub(super) fn with_bound(most: usize) -> Self {
        Self(Arc::new(RecordMemoryUse { taken: AtomicUsize::new(0), most }))
    }

    /// A share without anything in it.
    #[must_use]
    pub(super) fn share(&self) -> RecordShare {
        RecordShare { memory: self.clone(), bytes: 0 }
    }

    #[cfg(test)]
    pub(crate) fn taken(&self) -> usize {
        self.0.taken.load(Ordering::Relaxed)
    }
}

/// What one stream has taken of it, until this is dropped.
#[derive(Debug)]
pub(super) struct RecordShare {
    memory: RecordMemory,
    bytes: usize,
}

impl RecordShare {
    /// Takes as much that there are `bytes` in all; `false` where there is no room.
    pub(super) fn grow_to(&mut self, bytes: usize) -> bool {
        let more = bytes.saturating_sub(self.bytes);
        let added = |taken: usize| taken.checked_add(more).filter(|taken| *taken <= self.memory.0.most);
        let is_taken = self.memory.0.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, added).is_ok();
        if is_taken {
            self.bytes += more;
        }
        is_taken
    }
}

impl RecordShare {
    /// Gives all of it back.
    pub(super) fn release(&mut self) {
        self.memory.0.taken.fetch_sub(std::mem::take(&mut self.bytes), Ordering::Relaxed);
    }
}

impl Drop for RecordShare {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_memory_is_bounded_and_returned() {
        let memory = RecordMemory::with_bound(10);
        let (mut one, mut other) = (memory.share(), memory.share());
        assert!(one.grow_to(6) && one.grow_to(4) && !other.grow_to(5) && other.grow_to(4));
        assert_eq!(memory.taken(), 10);
        drop(one);
        assert!(other.grow_to(10) && !other.grow_to(11));
        drop(other);
        assert_eq!(memory.taken(), 0);
    }
}
