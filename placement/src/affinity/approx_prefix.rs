//! Estimate of the cache of a replica whose engine reports nothing: the prompts that this router
//! sent there, as far as they fit.
//!
//! The estimate knows nothing of other routers' requests or of generated tokens, and forgets in the
//! order of use as engines do. The engine corrects it with the cached tokens in its answers. The
//! router's dispatch writes it; a slot's lock is held for one chain.

mod lru_prefix_tree;

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use self::lru_prefix_tree::LruPrefixTree;
use super::ReplicaSlot;
use crate::block_keys::BlockKey;

/// Blocks recently sent to each replica. At most about 100 bytes per block of a replica's capacity.
#[derive(Debug, Default)]
pub struct ApproxPrefixIndex {
    slots: RwLock<ApproxSlotTable>,
}

#[derive(Debug, Default)]
struct ApproxSlotTable {
    trees: Vec<Option<Arc<Mutex<LruPrefixTree>>>>,
    free: VecDeque<ReplicaSlot>,
}

impl ApproxPrefixIndex {
    /// Opens an empty slot for a new life of a replica with room for this many blocks.
    ///
    /// # Panics
    /// When four billion slots are open.
    pub fn open(&self, capacity_blocks: usize) -> ReplicaSlot {
        let mut slots = self.slots.write();
        let slot = slots.free.pop_front().unwrap_or_else(|| {
            slots.trees.push(None);
            ReplicaSlot(u32::try_from(slots.trees.len() - 1).expect("four billion engines at once: memory ends before"))
        });
        slots.trees[slot.index()] = Some(Arc::new(Mutex::new(LruPrefixTree::new(capacity_blocks))));
        slot
    }

    /// Ends a life. Its slot is reused, so nobody may use it for this life any more.
    pub fn close(&self, slot: ReplicaSlot) {
        let mut slots = self.slots.write();
        if slots.trees.get_mut(slot.index()).and_then(Option::take).is_some() {
            slots.free.push_back(slot);
        }
    }

    /// Records a prompt that was sent there.
    ///
    /// It will be cached in place of the least recently used blocks.
    pub fn record_sent(&self, slot: ReplicaSlot, keys: &[BlockKey]) {
        if let Some(blocks) = self.tree(slot) {
            blocks.lock().touch(keys);
        }
    }

    /// Corrects the estimate: the engine reported that only this many leading blocks of the prompt
    /// were cached.
    ///
    /// All blocks after them are forgotten, in other chains, too. Meanwhile the engine has computed
    /// this prompt again; when its answer has come, call [`record_sent`](Self::record_sent).
    pub fn correct(&self, slot: ReplicaSlot, keys: &[BlockKey], cached_blocks: u32) {
        if let Some(blocks) = self.tree(slot) {
            blocks.lock().remove_after(keys, cached_blocks as usize);
        }
    }

    /// Number of leading blocks of a chain that each slot probably holds; 0 for a slot that is not
    /// open.
    #[must_use]
    pub fn matched_blocks(&self, keys: &[BlockKey], slots: &[ReplicaSlot]) -> Vec<u32> {
        let known = self.slots.read();
        let matched = |slot: &ReplicaSlot| {
            known.trees.get(slot.index()).and_then(Option::as_ref).map_or(0, |blocks| blocks.lock().matched_blocks(keys))
        };
        slots.iter().map(|slot| u32::try_from(matched(slot)).unwrap_or(u32::MAX)).collect()
    }

    fn tree(&self, slot: ReplicaSlot) -> Option<Arc<Mutex<LruPrefixTree>>> {
        self.slots.read().trees.get(slot.index()).cloned().flatten()
    }
}

#[cfg(test)]
mod tests;
