//! Copies of KV blocks in the host's memory, vLLM's second tier of the prefix cache: written as
//! blocks are computed, and loaded for prompts whose blocks have left the GPU.
//!
//! The tier knows hashes, not tokens. The scheduler owns it.

use std::collections::{BTreeMap, HashMap};

#[cfg(test)]
mod tests;

/// Tier with room for a number of blocks. The least recently used copy is dropped first, and the
/// end of a prefix before its beginning.
#[derive(Debug)]
pub(crate) struct HostTier {
    capacity: usize,
    ranks: HashMap<u64, u64>,
    /// The copies, least recently used first.
    by_rank: BTreeMap<u64, u64>,
    next_rank: u64,
}

impl HostTier {
    /// Creates a tier; without capacity it holds nothing.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, ranks: HashMap::new(), by_rank: BTreeMap::new(), next_rank: 0 }
    }

    pub(crate) fn has_room(&self) -> bool {
        self.capacity > 0
    }

    /// Number of leading blocks of `hashes` with a copy.
    pub(crate) fn matched(&self, hashes: &[u64]) -> usize {
        hashes.iter().take_while(|hash| self.holds(**hash)).count()
    }

    pub(crate) fn holds(&self, hash: u64) -> bool {
        self.ranks.contains_key(&hash)
    }

    /// Marks the copies of a prompt as used.
    pub(crate) fn touch(&mut self, hashes: &[u64]) {
        for hash in hashes.iter().rev() {
            if let Some(rank) = self.ranks.get_mut(hash) {
                self.by_rank.remove(rank);
                self.by_rank.insert(self.next_rank, *hash);
                *rank = self.next_rank;
                self.next_rank += 1;
            }
        }
    }

    /// Copies a block that has no copy, and returns the copy that was dropped for it.
    pub(crate) fn store(&mut self, hash: u64) -> Option<u64> {
        let dropped = if self.ranks.len() >= self.capacity { self.by_rank.pop_first().map(|(_, hash)| hash) } else { None };
        if let Some(dropped) = dropped {
            self.ranks.remove(&dropped);
        }
        self.ranks.insert(hash, self.next_rank);
        self.by_rank.insert(self.next_rank, hash);
        self.next_rank += 1;
        dropped
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.capacity);
    }
}
