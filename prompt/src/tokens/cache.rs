//! Cache of the tokens of segments, by a hash of their text.
//!
//! The least recently used entries go when there is no room. A list threaded through a slab makes
//! every operation a lookup and a few stores.

use std::mem::Discriminant;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::PiecePosition;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct SegmentKey {
    pub(super) hash: u128,
    pub(super) bytes: usize,
    /// Kind of the position in the text.
    pub(super) position: Discriminant<PiecePosition>,
}

/// Divisor of the cache that limits a segment.
///
/// A larger segment is not kept, because it would drive out many small ones that come again.
const MAX_ENTRY_DIVISOR: usize = 8;

/// Bytes of an entry besides its tokens: the slab, the map with its free places, the reference
/// count.
const ENTRY_OVERHEAD_BYTES: usize = 160;

const NONE: usize = usize::MAX;

#[derive(Debug)]
pub(super) struct SegmentCache {
    max_bytes: usize,
    bytes: usize,
    slots: FxHashMap<SegmentKey, usize>,
    entries: Vec<CachedSegment>,
    free: Vec<usize>,
    newest: usize,
    oldest: usize,
}

#[derive(Debug)]
struct CachedSegment {
    key: SegmentKey,
    tokens: Arc<[u32]>,
    newer: usize,
    older: usize,
}

impl SegmentCache {
    /// Creates a cache of at most `most` bytes.
    pub(super) fn new(most: usize) -> Self {
        Self { max_bytes: most, bytes: 0, slots: FxHashMap::default(), entries: Vec::new(), free: Vec::new(), newest: NONE, oldest: NONE }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn get(&mut self, key: SegmentKey) -> Option<Arc<[u32]>> {
        let place = *self.slots.get(&key)?;
        self.unlink(place);
        self.link_newest(place);
        Some(Arc::clone(&self.entries[place].tokens))
    }

    pub(super) fn put(&mut self, key: SegmentKey, tokens: Arc<[u32]>) {
        let cost = cost(&tokens);
        if cost > self.max_bytes / MAX_ENTRY_DIVISOR || self.slots.contains_key(&key) {
            return;
        }
        while self.bytes + cost > self.max_bytes && self.oldest != NONE {
            self.drop_oldest();
        }
        self.bytes += cost;
        let entry = CachedSegment { key, tokens, newer: NONE, older: NONE };
        let place = match self.free.pop() {
            Some(place) => {
                self.entries[place] = entry;
                place
            }
            None => {
                self.entries.push(entry);
                self.entries.len() - 1
            }
        };
        self.slots.insert(key, place);
        self.link_newest(place);
    }

    fn drop_oldest(&mut self) {
        let place = self.oldest;
        self.unlink(place);
        let tokens = std::mem::take(&mut self.entries[place].tokens);
        self.bytes -= cost(&tokens);
        self.slots.remove(&self.entries[place].key);
        self.free.push(place);
    }

    fn unlink(&mut self, place: usize) {
        let CachedSegment { newer, older, .. } = self.entries[place];
        match newer {
            NONE => self.newest = older,
            newer => self.entries[newer].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.entries[older].newer = newer,
        }
    }

    fn link_newest(&mut self, place: usize) {
        let second = std::mem::replace(&mut self.newest, place);
        self.entries[place].newer = NONE;
        self.entries[place].older = second;
        match second {
            NONE => self.oldest = place,
            second => self.entries[second].newer = place,
        }
    }
}

fn cost(tokens: &[u32]) -> usize {
    size_of_val(tokens) + ENTRY_OVERHEAD_BYTES
}

#[cfg(test)]
mod tests;
