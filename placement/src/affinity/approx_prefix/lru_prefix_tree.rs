//! Blocks of one replica in the order of their last use.
//!
//! A block always comes after its predecessor in the chain in that order. So the ends of chains are
//! forgotten first, and the known blocks have no holes.

use std::mem;

use rustc_hash::FxHashMap;

use crate::block_keys::BlockKey;

const NO_SLOT: u32 = u32::MAX;

/// A list of blocks by use that is also the tree of their chains. Links are slot numbers.
#[derive(Debug)]
pub(super) struct LruPrefixTree {
    capacity: usize,
    slots: FxHashMap<BlockKey, u32>,
    blocks: Vec<TreeBlock>,
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
}

#[derive(Debug, Clone, Copy)]
struct TreeBlock {
    key: BlockKey,
    /// Neighbours in the order of use.
    newer: u32,
    older: u32,
    /// Predecessor in the chain.
    parent: u32,
    /// First of the successors, which form a list.
    child: u32,
    next: u32,
    previous: u32,
}

impl LruPrefixTree {
    pub(super) fn new(capacity: usize) -> Self {
        let capacity = capacity.min(NO_SLOT as usize - 1);
        Self { capacity, slots: FxHashMap::default(), blocks: Vec::new(), free: Vec::new(), newest: NO_SLOT, oldest: NO_SLOT }
    }

    /// Number of known leading blocks, found by bisection since there are no gaps.
    pub(super) fn matched_blocks(&self, keys: &[BlockKey]) -> usize {
        match keys.first() {
            Some(first) if self.slots.contains_key(first) => keys.partition_point(|key| self.slots.contains_key(key)),
            _ => 0,
        }
    }

    /// Marks this chain as used now.
    ///
    /// If the chain is longer than the capacity, its beginning is kept. The dropped blocks are
    /// never its own, unless keys of different blocks are equal by chance; then its rest is not
    /// kept.
    pub(super) fn touch(&mut self, keys: &[BlockKey]) {
        let keys = &keys[..keys.len().min(self.capacity)];
        let known: Vec<u32> = keys.iter().map_while(|key| self.slots.get(key).copied()).collect();
        for slot in known.iter().rev() {
            self.unlink(*slot);
            self.link_newest(*slot);
        }
        let mut parent = known.last().copied().unwrap_or(NO_SLOT);
        for key in &keys[known.len()..] {
            if self.slots.len() >= self.capacity {
                self.remove_subtree(self.oldest);
                if parent != NO_SLOT && self.slots.get(&self.blocks[parent as usize].key) != Some(&parent) {
                    return;
                }
            }
            parent = self.insert(*key, parent);
        }
    }

    /// Forgets the block after the first `kept` of this chain, and all its successors.
    pub(super) fn remove_after(&mut self, keys: &[BlockKey], kept: usize) {
        if let Some(slot) = keys.get(kept).and_then(|key| self.slots.get(key)) {
            self.remove_subtree(*slot);
        }
    }

    fn insert(&mut self, key: BlockKey, parent: u32) -> u32 {
        // Two chains share a key by chance, or a chain repeats one: the block stays in its first
        // place.
        if let Some(slot) = self.slots.get(&key) {
            return *slot;
        }
        let block = TreeBlock { key, newer: NO_SLOT, older: NO_SLOT, parent, child: NO_SLOT, next: NO_SLOT, previous: NO_SLOT };
        let slot = self.free.pop().unwrap_or_else(|| {
            self.blocks.push(block);
            u32::try_from(self.blocks.len() - 1).expect("the capacity is below 2^32")
        });
        *self.block(slot) = block;
        self.slots.insert(key, slot);
        if parent == NO_SLOT {
            self.link_newest(slot);
        } else {
            self.link_older_than(parent, slot);
            let sibling = mem::replace(&mut self.block(parent).child, slot);
            self.block(slot).next = sibling;
            if sibling != NO_SLOT {
                self.block(sibling).previous = slot;
            }
        }
        slot
    }

    /// Forgets a block and all its successors, from the ends.
    fn remove_subtree(&mut self, slot: u32) {
        let mut end = slot;
        loop {
            let TreeBlock { child, parent, .. } = *self.block(end);
            if child != NO_SLOT {
                end = child;
                continue;
            }
            self.remove_leaf(end);
            if end == slot {
                return;
            }
            end = parent;
        }
    }

    /// Forgets a block without successors.
    fn remove_leaf(&mut self, slot: u32) {
        self.unlink(slot);
        let TreeBlock { key, parent, next, previous, .. } = *self.block(slot);
        if next != NO_SLOT {
            self.block(next).previous = previous;
        }
        if previous != NO_SLOT {
            self.block(previous).next = next;
        } else if parent != NO_SLOT {
            self.block(parent).child = next;
        }
        self.slots.remove(&key);
        self.free.push(slot);
    }

    fn unlink(&mut self, slot: u32) {
        let TreeBlock { newer, older, .. } = *self.block(slot);
        *self.older_than(newer) = older;
        *self.newer_than(older) = newer;
    }

    fn link_newest(&mut self, slot: u32) {
        self.link_older_than(NO_SLOT, slot);
    }

    /// Links a block right behind another; `NONE` is the beginning of the order.
    fn link_older_than(&mut self, newer: u32, slot: u32) {
        let older = mem::replace(self.older_than(newer), slot);
        *self.newer_than(older) = slot;
        let block = self.block(slot);
        (block.newer, block.older) = (newer, older);
    }

    fn older_than(&mut self, slot: u32) -> &mut u32 {
        if slot == NO_SLOT { &mut self.newest } else { &mut self.block(slot).older }
    }

    fn newer_than(&mut self, slot: u32) -> &mut u32 {
        if slot == NO_SLOT { &mut self.oldest } else { &mut self.block(slot).newer }
    }

    fn block(&mut self, slot: u32) -> &mut TreeBlock {
        &mut self.blocks[slot as usize]
    }
}
