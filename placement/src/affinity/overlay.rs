//! Overlay of the blocks that requests in flight will leave in caches.
//!
//! A prompt that was sent to a replica is as good as cached there, long before its engine says so.
//! Without the overlay, a burst of equal prompts is spread over replicas that each compute it anew.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::RwLock;

use super::prefix_search::count;
use super::{ChainGaps, ReplicaSlot};
use crate::block_keys::BlockKey;

/// Most requests in flight that are compared with a prompt whose first block they share, the newest
/// first.
///
/// If that block is a system prompt of thousands of requests, older ones are probably in the index
/// by now.
const MAX_COMPARED: usize = 256;

/// Prompts of requests in flight, by the key of their first block and the order of arrival.
///
/// Admission bounds their number.
#[derive(Debug, Default)]
pub struct InFlightOverlay {
    prompts: RwLock<BTreeMap<(BlockKey, u64), InFlightPrompt>>,
    next_number: AtomicU64,
    /// Number of prompts that were not read to their end.
    partly_read: AtomicUsize,
}

/// Known part of a prompt.
///
/// For a long prompt that nobody has cached, only the beginning is converted into tokens.
#[derive(Debug, Clone, Default)]
pub struct PromptKeys {
    /// Keys of the token blocks, as far as they were read.
    pub keys: Arc<[BlockKey]>,
    /// Keys of all text blocks, if the prompt was not read to its end.
    pub text: Arc<[BlockKey]>,
}

impl PromptKeys {
    /// Creates the keys of a prompt that was read to its end.
    #[must_use]
    pub fn whole(keys: Arc<[BlockKey]>) -> Self {
        Self { keys, text: Arc::default() }
    }

    fn is_partly_read(&self) -> bool {
        !self.text.is_empty()
    }
}

/// A prompt to compare with those in flight.
#[derive(Debug, Clone, Copy)]
pub struct PromptToMatch<'a> {
    /// Keys of the token blocks, as far as they were read.
    pub keys: &'a [BlockKey],
    /// Number of token blocks; an estimate for the unread part.
    pub blocks: u32,
    /// Keys of the text blocks.
    ///
    /// Only needed if [`has_partly_read`](InFlightOverlay::has_partly_read).
    pub text: &'a [BlockKey],
}

#[derive(Debug)]
struct InFlightPrompt {
    /// Slot of the prompt; `None` until its replica is chosen.
    slot: Option<ReplicaSlot>,
    keys: PromptKeys,
}

/// Entry of a prompt in the overlay.
///
/// Drop it when the prompt has been computed and its blocks are reported, and when the request
/// fails or its replica's life ends: a reused slot must find nothing here.
#[derive(Debug)]
#[must_use = "the prompt leaves the overlay when this is dropped"]
pub struct InFlightBlocks {
    overlay: Arc<InFlightOverlay>,
    key: Option<(BlockKey, u64)>,
}

impl InFlightOverlay {
    /// Adds a prompt that was sent to a replica.
    pub fn add_placed(self: &Arc<Self>, slot: ReplicaSlot, extent: PromptKeys) -> InFlightBlocks {
        self.insert(Some(slot), extent)
    }

    /// Adds a prompt that will be sent somewhere.
    ///
    /// Until then nothing matches it, but a reader of a similar prompt learns that it exists.
    pub fn add_unplaced(self: &Arc<Self>, extent: PromptKeys) -> InFlightBlocks {
        self.insert(None, extent)
    }

    fn insert(self: &Arc<Self>, slot: Option<ReplicaSlot>, extent: PromptKeys) -> InFlightBlocks {
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let place = extent.keys.first().map(|first| (*first, number));
        if let Some(place) = place {
            self.partly_read.fetch_add(usize::from(extent.is_partly_read()), Ordering::Relaxed);
            self.prompts.write().insert(place, InFlightPrompt { slot, keys: extent });
        }
        InFlightBlocks { overlay: Arc::clone(self), key: place }
    }

    /// Whether a prompt in flight was not read to its end.
    #[must_use]
    pub fn has_partly_read(&self) -> bool {
        self.partly_read.load(Ordering::Relaxed) > 0
    }

    /// Whether a prompt in flight shares all blocks read of this one and continues, according to
    /// its tokens.
    ///
    /// The result is also true if its text shares the block after the first `text_read`. Looks at
    /// the 256 newest requests that share the first block.
    #[must_use]
    pub fn goes_beyond(&self, ours: &PromptToMatch<'_>, text_read: usize) -> bool {
        let (Some(first), Some(last)) = (ours.keys.first(), ours.keys.last()) else { return false };
        let beyond = |theirs: &PromptKeys| {
            let by_tokens = theirs.keys.len() > ours.keys.len() && theirs.keys[ours.keys.len() - 1] == *last;
            let by_text = || theirs.text.get(text_read).is_some_and(|theirs| ours.text.get(text_read) == Some(theirs));
            by_tokens || ours.shares_read_tokens(theirs) && by_text()
        };
        newest_prompts(&self.prompts.read(), *first).any(|prompt| beyond(&prompt.keys))
    }

    /// Raises `matched` if a request in flight shares more with this prompt than is cached.
    ///
    /// `matched` is in the order of `slots`, which are all different. Compares with the 256 newest
    /// requests that share the first block.
    pub fn raise_matches(&self, ours: &PromptToMatch<'_>, slots: &[(ReplicaSlot, ChainGaps)], matched: &mut [u32]) {
        let Some(first) = ours.keys.first() else { return };
        let prompts = self.prompts.read();
        let mut newest = newest_prompts(&prompts, *first).peekable();
        if newest.peek().is_none() {
            return;
        }
        let mut numbers = vec![usize::MAX; slots.iter().map(|(slot, _)| slot.index() + 1).max().unwrap_or(0)];
        for (number, (slot, _)) in slots.iter().enumerate() {
            numbers[slot.index()] = number;
        }
        for prompt in newest {
            let number = prompt.slot.and_then(|slot| numbers.get(slot.index()));
            if let Some(matched) = number.and_then(|number| matched.get_mut(*number)) {
                let by_tokens = common_blocks(ours.keys, &prompt.keys.keys, *matched as usize);
                let by_text = if ours.shares_read_tokens(&prompt.keys) { ours.matched_text_blocks(&prompt.keys.text) } else { 0 };
                *matched = count(by_tokens).max(by_text);
            }
        }
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.prompts.read().len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Newest prompts in flight with this first block.
fn newest_prompts(prompts: &BTreeMap<(BlockKey, u64), InFlightPrompt>, first: BlockKey) -> impl Iterator<Item = &InFlightPrompt> {
    let same = prompts.range((Bound::Included((first, 0)), Bound::Included((first, u64::MAX))));
    same.rev().take(MAX_COMPARED).map(|(_, prompt)| prompt)
}

impl<'a> PromptToMatch<'a> {
    /// Creates a prompt that was read to its end, compared by tokens alone.
    #[must_use]
    pub fn whole(keys: &'a [BlockKey]) -> Self {
        Self { keys, blocks: count(keys.len()), text: &[] }
    }

    /// Whether the other prompt has the same tokens as far as both were read.
    ///
    /// Otherwise their texts are not compared.
    fn shares_read_tokens(&self, theirs: &PromptKeys) -> bool {
        let both = self.keys.len().min(theirs.keys.len());
        both > 0 && self.keys[both - 1] == theirs.keys[both - 1]
    }

    /// Number of token blocks that correspond to the common text blocks, in proportion.
    fn matched_text_blocks(&self, theirs: &[BlockKey]) -> u32 {
        let blocks = common_blocks(self.text, theirs, 0) as u64 * u64::from(self.blocks) / self.text.len().max(1) as u64;
        u32::try_from(blocks).unwrap_or(u32::MAX)
    }
}

/// Number of blocks that two chains have in common, or `known` if that is more.
///
/// Equal keys mean equal beginnings, so one comparison beyond `known` tells whether there is more,
/// and bisection finds the end.
fn common_blocks(left: &[BlockKey], right: &[BlockKey], known: usize) -> usize {
    let most = left.len().min(right.len());
    if known >= most || left[known] != right[known] {
        return known;
    }
    let (mut equal, mut end) = (known + 1, most);
    while equal < end {
        let middle = equal.midpoint(end);
        if left[middle] == right[middle] {
            equal = middle + 1;
        } else {
            end = middle;
        }
    }
    equal
}

impl Drop for InFlightBlocks {
    fn drop(&mut self) {
        if let Some(place) = &self.key {
            let left = self.overlay.prompts.write().remove(place);
            let was_begun = left.is_some_and(|prompt| prompt.keys.is_partly_read());
            self.overlay.partly_read.fetch_sub(usize::from(was_begun), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests;
