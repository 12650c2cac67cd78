//! KV cache of one replica: a fixed number of blocks, shared by key.
//!
//! Blocks that no sequence holds stay cached until they are needed for something else. The engine
//! model is the only owner; it knows keys, not tokens.
//!
//! Cached blocks are always closed under prefixes: a sequence holds every block before the ones it
//! holds, and gives them back from the end, so that the end of a chain is taken before its
//! beginning. Real engines may hold two copies of a block that two sequences computed at once; here
//! the second sequence takes over the first copy.

use hostler_placement::block_keys::BlockKey;
use rustc_hash::FxHashMap;

/// Place for a block.
pub(crate) type Slot = u32;

const NONE: Slot = Slot::MAX;

#[derive(Debug)]
pub(crate) struct Blocks {
    cached: FxHashMap<BlockKey, Slot>,
    slots: Vec<BlockState>,
    /// List of slots that no sequence holds; the next one is taken from its front.
    front: Slot,
    back: Slot,
    free: usize,
    /// Keys that were stored or removed since the last call, and whether they were cached before.
    changed: FxHashMap<BlockKey, bool>,
}

#[derive(Debug, Clone, Copy)]
struct BlockState {
    key: Option<BlockKey>,
    holders: u32,
    before: Slot,
    after: Slot,
}

/// Keys stored and removed since the last call.
#[derive(Debug, Default, Clone)]
pub(crate) struct CacheChanges {
    pub(crate) stored: Vec<BlockKey>,
    pub(crate) removed: Vec<BlockKey>,
}

impl Blocks {
    pub(crate) fn new(count: u32) -> Self {
        let state = |slot| BlockState { key: None, holders: 0, before: if slot == 0 { NONE } else { slot - 1 }, after: slot + 1 };
        let mut slots: Vec<BlockState> = (0..count).map(state).collect();
        if let Some(last) = slots.last_mut() {
            last.after = NONE;
        }
        let (front, back) = if count == 0 { (NONE, NONE) } else { (0, count - 1) };
        Self { cached: FxHashMap::default(), free: slots.len(), slots, front, back, changed: FxHashMap::default() }
    }

    /// Number of leading keys that are cached.
    pub(crate) fn matched(&self, keys: &[BlockKey]) -> usize {
        // The cached keys are a prefix, so bisection finds its end.
        keys.partition_point(|key| self.cached.contains_key(key))
    }

    /// Number of these keys, all cached, that no sequence holds.
    pub(crate) fn unheld(&self, keys: &[BlockKey]) -> usize {
        // Held blocks are closed under prefixes, too.
        let held = keys.partition_point(|key| self.cached.get(key).is_some_and(|slot| self.slots[*slot as usize].holders > 0));
        keys.len() - held
    }

    /// Number of blocks that can be taken.
    pub(crate) fn free(&self) -> usize {
        self.free
    }

    /// Share of the blocks that sequences hold.
    pub(crate) fn held_share(&self) -> f64 {
        (self.slots.len() - self.free) as f64 / self.slots.len().max(1) as f64
    }

    /// Takes the block with this key, cached or new. The caller has checked that one is free.
    pub(crate) fn take(&mut self, key: BlockKey) -> Slot {
        if let Some(&slot) = self.cached.get(&key) {
            self.hold(slot);
            return slot;
        }
        let slot = self.take_unnamed();
        self.assign_key(slot, key)
    }

    /// Takes a block without a key, because it is not full yet.
    pub(crate) fn take_unnamed(&mut self) -> Slot {
        let slot = self.front;
        self.hold(slot);
        if let Some(key) = self.slots[slot as usize].key.take() {
            self.cached.remove(&key);
            self.changed.entry(key).or_insert(true);
        }
        slot
    }

    /// Gives a full block its key.
    ///
    /// Returns the slot that holds it from here on: the cached copy, if there is one.
    pub(crate) fn assign_key(&mut self, slot: Slot, key: BlockKey) -> Slot {
        if let Some(&copy) = self.cached.get(&key) {
            self.hold(copy);
            self.give_back(slot);
            return copy;
        }
        self.slots[slot as usize].key = Some(key);
        self.cached.insert(key, slot);
        self.changed.entry(key).or_insert(false);
        slot
    }

    /// Releases a block of a sequence. A sequence releases its blocks from the end.
    pub(crate) fn give_back(&mut self, slot: Slot) {
        let state = &mut self.slots[slot as usize];
        state.holders -= 1;
        if state.holders > 0 {
            return;
        }
        self.free += 1;
        if state.key.is_some() {
            (state.before, state.after) = (self.back, NONE);
            self.link(self.back, slot);
            self.link(slot, NONE);
        } else {
            // The block has no content to keep.
            (state.before, state.after) = (NONE, self.front);
            let front = self.front;
            self.link(NONE, slot);
            self.link(slot, front);
        }
    }

    /// Loses everything, held or not.
    pub(crate) fn clear(&mut self) {
        let mut changed = std::mem::take(&mut self.changed);
        for key in self.cached.keys() {
            changed.entry(*key).or_insert(true);
        }
        let count = Slot::try_from(self.slots.len()).unwrap_or(NONE);
        *self = Self { changed, ..Self::new(count) };
    }

    /// Changes since the last call. A key that came and went in between is in neither list.
    pub(crate) fn changes(&mut self) -> CacheChanges {
        let mut changes = CacheChanges::default();
        for (key, was_cached) in self.changed.drain() {
            match (was_cached, self.cached.contains_key(&key)) {
                (false, true) => changes.stored.push(key),
                (true, false) => changes.removed.push(key),
                _ => {}
            }
        }
        changes
    }

    fn hold(&mut self, slot: Slot) {
        let state = &mut self.slots[slot as usize];
        state.holders += 1;
        if state.holders == 1 {
            self.free -= 1;
            let (before, after) = (state.before, state.after);
            self.link(before, after);
        }
    }

    /// Links two neighbours in the list; `NONE` is its end on either side.
    fn link(&mut self, before: Slot, after: Slot) {
        match before {
            NONE => self.front = after,
            slot => self.slots[slot as usize].after = after,
        }
        match after {
            NONE => self.back = before,
            slot => self.slots[slot as usize].before = before,
        }
    }
}

#[cfg(test)]
mod tests;
