//! Blocks of one tier by the engine's hash, and the keys that they stand for.

use std::collections::hash_map::Entry;

use hostler_placement::block_keys::BlockKey;
use rustc_hash::FxHashMap;

/// Number of keys, and their XOR.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CacheDigest {
    pub count: u64,
    pub xor: u64,
}

/// Counted set of blocks.
#[derive(Debug, Default)]
pub(super) struct BlockSet {
    /// Blocks by the engine's hash.
    blocks: FxHashMap<u64, MirroredBlock>,
    /// Number of engine hashes that stand for a key.
    ///
    /// An adapter loaded again from another path has the same name and other hashes.
    keys: FxHashMap<BlockKey, u32>,
    xor: u64,
}

#[derive(Debug, Clone, Copy)]
struct MirroredBlock {
    key: BlockKey,
    copies: u32,
}

/// A hash that has left the set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DroppedHash {
    pub(super) key: BlockKey,
    /// No other hash stands for the key.
    pub(super) is_last: bool,
}

impl BlockSet {
    pub(super) fn digest(&self) -> CacheDigest {
        CacheDigest { count: self.keys.len() as u64, xor: self.xor }
    }

    /// The keys, in no order.
    pub(super) fn keys(&self) -> impl Iterator<Item = BlockKey> + '_ {
        self.keys.keys().copied()
    }

    pub(super) fn key_of(&self, hash: u64) -> Option<BlockKey> {
        self.blocks.get(&hash).map(|block| block.key)
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Stores one block; `true` if its key is new. `counts_copies` means that a known block has one
    /// more copy.
    ///
    /// A known block keeps its first key: blocks stored after it continue that key.
    pub(super) fn store(&mut self, hash: u64, key: BlockKey, counts_copies: bool) -> bool {
        match self.blocks.entry(hash) {
            Entry::Occupied(mut block) => {
                let block = block.get_mut();
                block.copies = block.copies.saturating_add(u32::from(counts_copies));
                false
            }
            Entry::Vacant(vacant) => {
                vacant.insert(MirroredBlock { key, copies: 1 });
                let hashes = self.keys.entry(key).or_insert(0);
                *hashes = hashes.saturating_add(1);
                let is_new = *hashes == 1;
                if is_new {
                    self.xor ^= key;
                }
                is_new
            }
        }
    }

    /// Removes one copy of a block. `None` if it is not known or has other copies.
    pub(super) fn remove(&mut self, hash: u64) -> Option<DroppedHash> {
        let Entry::Occupied(mut block) = self.blocks.entry(hash) else { return None };
        if block.get().copies > 1 {
            block.get_mut().copies -= 1;
            return None;
        }
        let key = block.remove().key;
        let Entry::Occupied(mut hashes) = self.keys.entry(key) else { return None };
        *hashes.get_mut() -= 1;
        let is_last = *hashes.get() == 0;
        if is_last {
            hashes.remove();
            self.xor ^= key;
        }
        Some(DroppedHash { key, is_last })
    }
}
