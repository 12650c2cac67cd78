//! The blocks of one replica in the order of their last use. A block's place in that order is always after that of the block before it in
//! its chain, so that the ends of chains are forgotten first and what is known has no holes.

use std::mem;

use rustc_hash::FxHashMap;

use crate::keys::Key;

/// No slot.
const NONE: u32 = u32::MAX;

/// A list of blocks by use and, at the same time, the tree of their chains; links are numbers of slots.
#[derive(Debug)]
pub(super) struct Recency {
    capacity: usize,
    slots: FxHashMap<Key, u32>,
    blocks: Vec<Block>,
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
}

#[derive(Debug, Clone, Copy)]
struct Block {
    key: Key,
    /// Neighbours in the order of use.
    newer: u32,
    older: u32,
    /// The block before it in its chain.
    parent: u32,
    /// The first of the blocks that follow on it; they are a list.
    child: u32,
    next: u32,
    previous: u32,
}

impl Recency {
    pub(super) fn new(capacity: usize) -> Self {
        let capacity = capacity.min(NONE as usize - 1);
        Self { capacity, slots: FxHashMap::default(), blocks: Vec::new(), free: Vec::new(), newest: NONE, oldest: NONE }
    }

    /// The leading blocks that are known. Found by bisection, since there are no holes.
    pub(super) fn matched(&self, keys: &[Key]) -> usize {
        match keys.first() {
            Some(first) if self.slots.contains_key(first) => keys.partition_point(|key| self.slots.contains_key(key)),
            _ => 0,
        }
    }

    /// This chain is used now. Of a chain that is longer than the capacity, the beginning is kept. What is forgotten for it is never part
    /// of it, unless keys of different blocks are equal by chance; then the rest is not remembered.
    pub(super) fn touch(&mut self, keys: &[Key]) {
        let keys = &keys[..keys.len().min(self.capacity)];
        let known: Vec<u32> = keys.iter().map_while(|key| self.slots.get(key).copied()).collect();
        for slot in known.iter().rev() {
            self.unlink(*slot);
            self.link_newest(*slot);
        }
        let mut parent = known.last().copied().unwrap_or(NONE);
        for key in &keys[known.len()..] {
            if self.slots.len() >= self.capacity {
                self.forget(self.oldest);
                if parent != NONE && self.slots.get(&self.blocks[parent as usize].key) != Some(&parent) {
                    return;
                }
            }
            parent = self.insert(*key, parent);
        }
    }

    /// Forgets the block after the first `kept` of this chain, with everything that follows on it.
    pub(super) fn forget_after(&mut self, keys: &[Key], kept: usize) {
        if let Some(slot) = keys.get(kept).and_then(|key| self.slots.get(key)) {
            self.forget(*slot);
        }
    }

    fn insert(&mut self, key: Key, parent: u32) -> u32 {
        // Two chains that share a key by chance, or a chain that has one twice: then the block is where it was first.
        if let Some(slot) = self.slots.get(&key) {
            return *slot;
        }
        let block = Block { key, newer: NONE, older: NONE, parent, child: NONE, next: NONE, previous: NONE };
        let slot = self.free.pop().unwrap_or_else(|| {
            self.blocks.push(block);
            u32::try_from(self.blocks.len() - 1).expect("the capacity is below 2^32")
        });
        *self.block(slot) = block;
        self.slots.insert(key, slot);
        if parent == NONE {
            self.link_newest(slot);
        } else {
            self.link_older_than(parent, slot);
            let sibling = mem::replace(&mut self.block(parent).child, slot);
            self.block(slot).next = sibling;
            if sibling != NONE {
                self.block(sibling).previous = slot;
            }
        }
        slot
    }

    /// Forgets a block and all that follow on it, from their ends.
    fn forget(&mut self, slot: u32) {
        let mut end = slot;
        loop {
            let Block { child, parent, .. } = *self.block(end);
            if child != NONE {
                end = child;
                continue;
            }
            self.forget_end(end);
            if end == slot {
                return;
            }
            end = parent;
        }
    }

    /// Forgets a block on which none follows.
    fn forget_end(&mut self, slot: u32) {
        self.unlink(slot);
        let Block { key, parent, next, previous, .. } = *self.block(slot);
        if next != NONE {
            self.block(next).previous = previous;
        }
        if previous != NONE {
            self.block(previous).next = next;
        } else if parent != NONE {
            self.block(parent).child = next;
        }
        self.slots.remove(&key);
        self.free.push(slot);
    }

    fn unlink(&mut self, slot: u32) {
        let Block { newer, older, .. } = *self.block(slot);
        *self.older_than(newer) = older;
        *self.newer_than(older) = newer;
    }

    fn link_newest(&mut self, slot: u32) {
        self.link_older_than(NONE, slot);
    }

    /// Links a block right behind another; `NONE` stands for the beginning of the order.
    fn link_older_than(&mut self, newer: u32, slot: u32) {
        let older = mem::replace(self.older_than(newer), slot);
        *self.newer_than(older) = slot;
        let block = self.block(slot);
        (block.newer, block.older) = (newer, older);
    }

    fn older_than(&mut self, slot: u32) -> &mut u32 {
        if slot == NONE { &mut self.newest } else { &mut self.block(slot).older }
    }

    fn newer_than(&mut self, slot: u32) -> &mut u32 {
        if slot == NONE { &mut self.oldest } else { &mut self.block(slot).newer }
    }

    fn block(&mut self, slot: u32) -> &mut Block {
        &mut self.blocks[slot as usize]
    }
}
