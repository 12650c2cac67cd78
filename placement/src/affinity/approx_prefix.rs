//! What a replica probably holds whose engine tells nothing of its cache: the prompts that this router sent there, as far as they fit.
//!
//! It knows nothing of other routers' requests nor of what the engine generates, and forgets in the order of use as engines do. What the
//! engine says of cached tokens in its answers corrects it. The router's dispatch writes it; a seat's lock is held for one chain.

mod lru_prefix_tree;

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use self::lru_prefix_tree::LruPrefixTree;
use super::ReplicaSlot;
use crate::block_keys::BlockKey;

/// For each replica the blocks that it was sent lately. About 100 bytes for each block of a replica's capacity at worst.
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
    /// A new life of a replica whose cache has room for so many blocks; nothing is there.
    ///
    /// # Panics
    /// When four billion seats are open.
    pub fn open(&self, capacity_blocks: usize) -> ReplicaSlot {
        let mut seats = self.slots.write();
        let seat = seats.free.pop_front().unwrap_or_else(|| {
            seats.trees.push(None);
            ReplicaSlot(u32::try_from(seats.trees.len() - 1).expect("four billion engines at once: memory ends before"))
        });
        seats.trees[seat.index()] = Some(Arc::new(Mutex::new(LruPrefixTree::new(capacity_blocks))));
        seat
    }

    /// Ends a life. Its seat is used again: nobody may use it for this life any more.
    pub fn close(&self, seat: ReplicaSlot) {
        let mut seats = self.slots.write();
        if seats.trees.get_mut(seat.index()).and_then(Option::take).is_some() {
            seats.free.push_back(seat);
        }
    }

    /// A prompt has been sent there: it will be cached, at the expense of what has not been used for longest.
    pub fn record_sent(&self, seat: ReplicaSlot, keys: &[BlockKey]) {
        if let Some(blocks) = self.tree(seat) {
            blocks.lock().touch(keys);
        }
    }

    /// The engine has said that only so many leading blocks of this prompt were cached: all that follows on them is forgotten, also in
    /// other chains. The engine has computed this prompt anew since; when its answer has come, say so with [`record_sent`](Self::record_sent).
    pub fn correct(&self, seat: ReplicaSlot, keys: &[BlockKey], cached_blocks: u32) {
        if let Some(blocks) = self.tree(seat) {
            blocks.lock().remove_after(keys, cached_blocks as usize);
        }
    }

    /// The leading blocks of a chain that each seat probably holds; 0 for a seat that is not open.
    #[must_use]
    pub fn matched_blocks(&self, keys: &[BlockKey], seats: &[ReplicaSlot]) -> Vec<u32> {
        let known = self.slots.read();
        let matched = |seat: &ReplicaSlot| {
            known.trees.get(seat.index()).and_then(Option::as_ref).map_or(0, |blocks| blocks.lock().matched_blocks(keys))
        };
        seats.iter().map(|seat| u32::try_from(matched(seat)).unwrap_or(u32::MAX)).collect()
    }

    fn tree(&self, seat: ReplicaSlot) -> Option<Arc<Mutex<LruPrefixTree>>> {
        self.slots.read().trees.get(seat.index()).cloned().flatten()
    }
}

#[cfg(test)]
mod tests;
