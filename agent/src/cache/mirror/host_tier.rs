//! Blocks that an engine keeps in the host's memory, as a second tier of its prefix cache.
//!
//! Its events lack what the GPU's have. They never carry extra keys, so a salt or an image is
//! missing. If the engine does not describe blocks (`self_describing_kv_events`, since vLLM 0.24),
//! they carry one hash and nothing else. The hash is the GPU's own, so the GPU's mirror is asked
//! first for the key.

use std::collections::VecDeque;

use hostler_placement::block_keys::{BlockKey, KeyChain};
use rustc_hash::FxHashMap;

use super::{Change, Effects, FileBlocks, seed_chain};
use crate::cache::block_set::BlockSet;
use crate::cache::kv_event::{BlocksRemoved, BlocksStored};

/// Blocks remembered after they have left the GPU, about 40 bytes each.
///
/// A copy is reported when its transfer has ended, which may be some steps after the block has left
/// the GPU. vLLM 0.32 also reports removals of a step before copies.
const MAX_DEPARTED: usize = 32 * 1024;

/// Most blocks of a file; the plan puts 16 into one. Forgetting 12 files of 300,000 blocks each held
/// up the agent's reports for longer than a lease.
const MAX_FILE_BLOCKS: usize = 256;

#[derive(Debug, Default)]
pub(super) struct HostTier {
    blocks: BlockSet,
    /// Blocks that have recently left the GPU, once the engine has shown that it has this tier.
    departed: DepartedBlocks,
    /// Events of the present batch by the parent that is not known yet: a batch reports chunks in
    /// no order.
    early: FxHashMap<u64, Vec<BlocksStored>>,
    has_reported: bool,
    unseen_extras: UnseenExtras,
}

/// Extra keys that the engine's blocks may have and this tier's events leave out.
#[derive(Debug, Clone, Copy, Default)]
struct UnseenExtras {
    /// The engine has shown first blocks with a salt.
    salts: bool,
    /// The engine has shown blocks with other extra keys, images for example.
    others: bool,
}

impl HostTier {
    pub(super) fn blocks(&self) -> &BlockSet {
        &self.blocks
    }

    /// Whether the engine has reported a block of this tier.
    pub(super) fn has_reported(&self) -> bool {
        self.has_reported
    }

    pub(super) fn clear(&mut self) {
        self.blocks.clear();
        self.departed = DepartedBlocks::default();
        self.early.clear();
    }

    /// Notes the extra keys of a block on the GPU.
    pub(super) fn note_extras(&mut self, has_salt: bool, has_others: bool) {
        self.unseen_extras.salts |= has_salt;
        self.unseen_extras.others |= has_others;
    }

    /// Notes that a block has left the GPU.
    pub(super) fn note_departure(&mut self, hash: u64, key: BlockKey) {
        if self.has_reported {
            self.departed.push(hash, key);
        }
    }

    /// Stores the blocks of one event. `gpu` has blocks of `block_size` tokens.
    ///
    /// Each event counts as one more copy of its blocks: copies are made in chunks, and a block at
    /// their border belongs to two.
    pub(super) fn store(&mut self, stored: &BlocksStored, gpu: &BlockSet, block_size: u32, effects: &mut Effects) {
        self.has_reported = true;
        if is_described(stored) && !has_valid_tokens(stored, block_size, effects) {
            return;
        }
        if self.is_early(stored, gpu) {
            self.early.entry(stored.parent.unwrap_or_default()).or_default().push(stored.clone());
            return;
        }
        self.store_blocks(stored, gpu, block_size, effects);
        let mut known: Vec<u64> = if self.early.is_empty() { Vec::new() } else { stored.hashes.clone() };
        while let Some(parent) = known.pop() {
            for waiting in self.early.remove(&parent).into_iter().flatten() {
                self.store_blocks(&waiting, gpu, block_size, effects);
                known.extend(waiting.hashes);
            }
        }
    }

    /// Ends a batch of events: what still waits for its parent is an orphan.
    pub(super) fn end_batch(&mut self, effects: &mut Effects) {
        let orphans = self.early.drain().flat_map(|(_, events)| events);
        effects.orphans += orphans.map(|event| event.hashes.len() as u64).sum::<u64>();
    }

    pub(super) fn remove(&mut self, removed: &BlocksRemoved, effects: &mut Effects) {
        // A block that is stored only after its removal would stay for ever.
        self.end_batch(effects);
        let gone = removed.hashes.iter().filter_map(|hash| self.blocks.remove(*hash)).filter(|gone| gone.is_last);
        effects.host_changes.extend(gone.map(|gone| Change::Removed(gone.key)));
    }

    /// Notes a file, which the engine has written from its copies. A hash alone is its last block's
    /// and says nothing about the others.
    pub(super) fn note_file(&self, stored: &BlocksStored, gpu: &BlockSet, block_size: u32, effects: &mut Effects) {
        if stored.hashes.len() > MAX_FILE_BLOCKS {
            effects.ignored += 1;
            return;
        }
        if !is_described(stored) {
            effects.orphans += stored.hashes.len() as u64;
            return;
        }
        if !has_valid_tokens(stored, block_size, effects) {
            return;
        }
        let blocks = stored.hashes.iter().copied().zip(self.keys_of(stored, gpu, block_size));
        match blocks.map(|(hash, key)| Some((hash, key?))).collect() {
            Some(blocks) => effects.files.push(FileBlocks { parent: stored.parent, blocks }),
            None => effects.orphans += stored.hashes.len() as u64,
        }
    }

    /// Whether a parent that comes later in the batch would give the event's blocks their keys.
    fn is_early(&self, stored: &BlocksStored, gpu: &BlockSet) -> bool {
        let needs_chain = || stored.hashes.first().is_some_and(|first| self.known_key(*first, gpu).is_none());
        let lacks = |parent| self.known_key(parent, gpu).is_none();
        is_described(stored) && !self.unseen_extras.others && stored.parent.is_some_and(lacks) && needs_chain()
    }

    fn store_blocks(&mut self, stored: &BlocksStored, gpu: &BlockSet, block_size: u32, effects: &mut Effects) {
        for (hash, key) in stored.hashes.iter().zip(self.keys_of(stored, gpu, block_size)) {
            match key {
                Some(key) if self.blocks.store(*hash, key, true) => effects.host_changes.push(Change::Stored(key)),
                Some(_) => {}
                None => effects.orphans += 1,
            }
        }
    }

    /// Keys of an event's blocks, `None` of those that are not known and cannot be worked out.
    fn keys_of(&self, stored: &BlocksStored, gpu: &BlockSet, block_size: u32) -> Vec<Option<BlockKey>> {
        let size = usize::try_from(block_size).unwrap_or(usize::MAX);
        let mut tokens = stored.tokens.chunks_exact(size.max(1));
        let mut chain = self.first_chain(stored, gpu);
        let key = |hash: &u64| {
            let tokens = tokens.next();
            let key = self.known_key(*hash, gpu).or_else(|| Some(chain.as_mut()?.push(tokens?)))?;
            chain = (!self.unseen_extras.others).then(|| KeyChain::resume(key));
            Some(key)
        };
        stored.hashes.iter().map(key).collect()
    }

    fn known_key(&self, hash: u64, gpu: &BlockSet) -> Option<BlockKey> {
        gpu.key_of(hash).or_else(|| self.blocks.key_of(hash)).or_else(|| self.departed.key_of(hash))
    }

    /// Chain from which unknown blocks of the event get their keys; `None` if extra keys may be
    /// missing from it. Blocks with a wrong key would promise one tenant another's cache, or one
    /// image another's.
    fn first_chain(&self, stored: &BlocksStored, gpu: &BlockSet) -> Option<KeyChain> {
        if self.unseen_extras.others {
            return None;
        }
        match stored.parent {
            Some(parent) => self.known_key(parent, gpu).map(KeyChain::resume),
            None => (!self.unseen_extras.salts).then(|| seed_chain(stored)),
        }
    }
}

/// Whether the event has the tokens of its blocks.
fn is_described(stored: &BlocksStored) -> bool {
    !stored.tokens.is_empty()
}

/// Whether each block of the event has its tokens.
fn has_valid_tokens(stored: &BlocksStored, block_size: u32, effects: &mut Effects) -> bool {
    if block_size == 0 || stored.block_size != block_size {
        effects.ignored += 1;
        return false;
    }
    let blocks = stored.tokens.len() as u64 / u64::from(block_size);
    let is_valid = blocks == stored.hashes.len() as u64;
    effects.malformed += u64::from(!is_valid);
    is_valid
}

/// The latest blocks that have left the GPU. An older entry of a hash that left twice goes with its
/// own turn, so a hash may be forgotten early.
#[derive(Debug, Default)]
struct DepartedBlocks {
    keys: FxHashMap<u64, BlockKey>,
    order: VecDeque<u64>,
}

impl DepartedBlocks {
    fn key_of(&self, hash: u64) -> Option<BlockKey> {
        self.keys.get(&hash).copied()
    }

    fn push(&mut self, hash: u64, key: BlockKey) {
        if self.order.len() == MAX_DEPARTED
            && let Some(oldest) = self.order.pop_front()
        {
            self.keys.remove(&oldest);
        }
        self.order.push_back(hash);
        self.keys.insert(hash, key);
    }
}

#[cfg(test)]
mod tests;
