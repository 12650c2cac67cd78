//! Index of the replicas that hold a block of KV cache.
//!
//! One table for the whole fleet maps a block's key to the slots that hold it.
//!
//! The index is exact: it holds the agents' reports, and its digests say whether the two agree.
//! Readers are on the path of each request; there is **one writer** by convention. A lock is held
//! for at most one key, except while a table grows, so there are many tables.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;

use parking_lot::{Mutex, RwLock};
use rustc_hash::FxHashMap;
use serde::Serialize;

use super::holders::{Holders, MAX_SLOT, Masks, bit_of, set_bits};
use super::prefix_search::{bisect, walk};
use super::{ChainGaps, ReplicaSlot};
use crate::block_keys::BlockKey;

/// Number of tables.
///
/// With 31 million blocks, a table has 30,000, and a reader waits less than a millisecond while one
/// grows.
const SHARDS: usize = 1024;

/// Digest of a set of keys in 16 bytes: their number and their XOR.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct KeySetDigest {
    pub count: u64,
    pub xor: u64,
}

impl KeySetDigest {
    fn add(&mut self, key: BlockKey) {
        self.count += 1;
        self.xor ^= key;
    }
}

/// Slots that hold each block.
///
/// At most about 40 bytes for a block on one replica, less for each further one.
#[derive(Debug)]
pub struct CacheIndex {
    shards: Box<[RwLock<Shard>]>,
    slots: RwLock<SlotTable>,
    next_shard: Mutex<usize>,
}

#[derive(Debug, Default)]
struct Shard {
    blocks: FxHashMap<BlockKey, Holders>,
    masks: Masks,
}

#[derive(Debug, Default)]
struct SlotTable {
    digests: Vec<KeySetDigest>,
    /// Bitmask of the open slots.
    open: Vec<u64>,
    /// Closed slots with entries left.
    closed: Vec<ReplicaSlot>,
    /// Slots without entries. The slot that was free for longest is used first.
    free: VecDeque<ReplicaSlot>,
}

impl Default for CacheIndex {
    fn default() -> Self {
        Self::new()
    }
}

impl CacheIndex {
    #[must_use]
    pub fn new() -> Self {
        Self { shards: (0..SHARDS).map(|_| RwLock::default()).collect(), slots: RwLock::default(), next_shard: Mutex::new(0) }
    }

    /// Opens an empty slot for a new life.
    ///
    /// # Panics
    /// When two million slots are open, or closed and not swept.
    pub fn open(&self) -> ReplicaSlot {
        let mut slots = self.slots.write();
        let slot = slots.free.pop_front().unwrap_or_else(|| {
            let number = u32::try_from(slots.digests.len()).ok().filter(|number| *number <= MAX_SLOT);
            let slot = ReplicaSlot(number.expect("two million lives of engines at once: memory ends before"));
            slots.digests.push(KeySetDigest::default());
            slot
        });
        let (word, bit) = bit_of(slot);
        if slots.open.len() <= word {
            slots.open.resize(word + 1, 0);
        }
        slots.open[word] |= bit;
        slot
    }

    /// Ends a life: readers no longer see any of it.
    ///
    /// [`sweep`](Self::sweep) removes its entries, and then the slot is reused. A slot that is not
    /// open is ignored.
    pub fn close(&self, slot: ReplicaSlot) {
        let mut slots = self.slots.write();
        if !slots.is_open(slot) {
            return;
        }
        let (word, bit) = bit_of(slot);
        slots.open[word] &= !bit;
        if slots.digests[slot.index()].count == 0 {
            slots.free.push_back(slot);
        } else {
            slots.closed.push(slot);
        }
    }

    /// Records that the slot holds these blocks.
    ///
    /// Blocks that it already held change nothing, and a slot that is not open is ignored.
    pub fn store(&self, slot: ReplicaSlot, keys: &[BlockKey]) {
        if !self.slots.read().is_open(slot) {
            return;
        }
        let mut new = KeySetDigest::default();
        for &key in keys {
            let mut shard = self.shard(key).write();
            let Shard { blocks, masks } = &mut *shard;
            if blocks.entry(key).or_default().insert(slot, masks) {
                new.add(key);
            }
        }
        let digest = &mut self.slots.write().digests[slot.index()];
        digest.count += new.count;
        digest.xor ^= new.xor;
    }

    /// Records that the slot no longer holds these blocks.
    ///
    /// Blocks that it did not hold change nothing.
    pub fn remove(&self, slot: ReplicaSlot, keys: &[BlockKey]) {
        if self.slots.read().is_open(slot) {
            self.remove_keys(slot, keys);
        }
    }

    fn remove_keys(&self, slot: ReplicaSlot, keys: &[BlockKey]) {
        let mut gone = KeySetDigest::default();
        for &key in keys {
            let mut shard = self.shard(key).write();
            let Shard { blocks, masks } = &mut *shard;
            let Entry::Occupied(mut block) = blocks.entry(key) else { continue };
            if block.get_mut().remove(slot, masks) {
                gone.add(key);
                if block.get().is_empty() {
                    block.remove();
                }
            }
        }
        let digest = &mut self.slots.write().digests[slot.index()];
        digest.count -= gone.count;
        digest.xor ^= gone.xor;
    }

    /// Digest of an open slot's blocks; empty for any other.
    #[must_use]
    pub fn digest(&self, slot: ReplicaSlot) -> KeySetDigest {
        let slots = self.slots.read();
        if slots.is_open(slot) { slots.digests[slot.index()] } else { KeySetDigest::default() }
    }

    /// Removes entries of closed slots, one table after another, until it has looked at `most`
    /// blocks.
    ///
    /// At least one table is swept, so that the sweep always advances. `true` while any entries are
    /// left. The writer calls it now and then; readers hardly notice.
    pub fn sweep(&self, most: usize) -> bool {
        let mut next = self.next_shard.lock();
        let mut looked = 0;
        let mut closed = self.slots.read().closed();
        for _ in 0..SHARDS {
            if closed.is_empty() || looked >= most {
                break;
            }
            looked += self.sweep_shard(*next, &closed);
            *next = (*next + 1) % SHARDS;
            let mut slots = self.slots.write();
            slots.free_closed_slots();
            closed = slots.closed();
        }
        !closed.is_empty()
    }

    /// Removes one table's entries of the closed slots and releases unneeded memory.
    ///
    /// Returns the number of blocks looked at.
    fn sweep_shard(&self, number: usize, closed: &[u64]) -> usize {
        let shard = self.shards[number].read();
        let looked = shard.blocks.len();
        let mut left = Vec::new();
        let mut held = vec![0; closed.len()];
        for (key, holders) in &shard.blocks {
            holders.intersect(&shard.masks, closed, &mut held);
            left.extend(set_bits(&held).map(|slot| (slot, *key)));
        }
        drop(shard);
        left.sort_unstable();
        for of_one in left.chunk_by(|one, other| one.0 == other.0) {
            let keys: Vec<BlockKey> = of_one.iter().map(|(_, key)| *key).collect();
            self.remove_keys(ReplicaSlot(of_one[0].0), &keys);
        }
        let mut shard = self.shards[number].write();
        if shard.blocks.len() < shard.blocks.capacity() / 8 {
            let twice = 2 * shard.blocks.len();
            shard.blocks.shrink_to(twice);
        }
        looked
    }

    /// Number of leading blocks of a chain that each slot holds, in the order of `slots`; 0 for a
    /// slot that is not open.
    #[must_use]
    pub fn matched_blocks(&self, keys: &[BlockKey], slots: &[(ReplicaSlot, ChainGaps)]) -> Vec<u32> {
        let width = slots.iter().map(|(slot, _)| bit_of(*slot).0 + 1).max().unwrap_or(0);
        let (mut whole, mut holed) = (vec![0; width], vec![0; width]);
        let known = self.slots.read();
        for &(slot, holes) in slots {
            let (word, bit) = bit_of(slot);
            let among = if holes == ChainGaps::None { &mut whole } else { &mut holed };
            among[word] |= bit & known.open.get(word).copied().unwrap_or(0);
        }
        drop(known);
        let mut matched = vec![0; width * 64];
        let lookup = |block: usize, among: &[u64], out: &mut [u64]| {
            let shard = self.shard(keys[block]).read();
            shard.blocks.get(&keys[block]).copied().unwrap_or_default().intersect(&shard.masks, among, out);
        };
        bisect(keys.len(), &whole, &mut matched, lookup);
        walk(keys.len(), &holed, &mut matched, lookup);
        slots.iter().map(|(slot, _)| matched[slot.index()]).collect()
    }

    /// Whether any slot holds this block, including closed ones that were not swept.
    #[must_use]
    pub fn has(&self, key: BlockKey) -> bool {
        self.shard(key).read().blocks.contains_key(&key)
    }

    /// Number of blocks that any slot holds, including closed ones that were not swept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.read().blocks.len()).sum()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Estimated memory in bytes, from the capacities of the tables.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let tables: usize = self.shards.iter().map(|shard| shard.read().bytes()).sum();
        tables + SHARDS * size_of::<RwLock<Shard>>() + self.slots.read().digests.capacity() * size_of::<KeySetDigest>()
    }

    #[expect(clippy::cast_possible_truncation, reason = "the top ten bits of a key")]
    fn shard(&self, key: BlockKey) -> &RwLock<Shard> {
        &self.shards[(key >> (u64::BITS - SHARDS.ilog2())) as usize]
    }
}

impl Shard {
    /// Estimated bytes of one table.
    ///
    /// A table of the standard library is at most seven eighths full, and has one byte per place
    /// beside the entry.
    fn bytes(&self) -> usize {
        self.blocks.capacity() / 7 * 8 * (size_of::<(BlockKey, Holders)>() + 1) + self.masks.bytes()
    }
}

impl SlotTable {
    /// Bitmask of the closed slots with entries left, as long as the highest one needs; empty if
    /// there is none.
    fn closed(&self) -> Vec<u64> {
        let mut words = vec![0; self.closed.iter().map(|slot| bit_of(*slot).0 + 1).max().unwrap_or(0)];
        for (word, bit) in self.closed.iter().map(|slot| bit_of(*slot)) {
            words[word] |= bit;
        }
        words
    }

    /// Frees the closed slots without entries. Counts are exact, so they can be trusted.
    fn free_closed_slots(&mut self) {
        let Self { digests, closed, free, .. } = self;
        closed.retain(|slot| {
            let empty = digests[slot.index()].count == 0;
            if empty {
                free.push_back(*slot);
            }
            !empty
        });
    }

    fn is_open(&self, slot: ReplicaSlot) -> bool {
        let (word, bit) = bit_of(slot);
        self.open.get(word).is_some_and(|open| open & bit != 0)
    }
}

#[cfg(test)]
mod tests;
