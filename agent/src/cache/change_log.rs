//! The latest changes of one tier's blocks, numbered from the beginning of the log.

use std::collections::VecDeque;

use hostler_placement::block_keys::BlockKey;
use rustc_hash::{FxBuildHasher, FxHashMap};

/// Changes kept for readers in any case, 16 bytes each.
pub(super) const MIN_KEPT_CHANGES: usize = 64 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// The block was not cached before.
    Stored(BlockKey),
    /// The block was cached before.
    Removed(BlockKey),
    Cleared,
}

#[derive(Debug, Default)]
pub(super) struct ChangeLog {
    /// The latest changes, oldest first.
    changes: VecDeque<(BlockKey, ChangeKind)>,
    /// Number of the first change, never reset.
    first_number: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChangeKind {
    Stored,
    Removed,
}

/// Net effect of some changes in a row.
#[derive(Debug)]
pub(super) struct NetChange {
    pub(super) stored: Vec<BlockKey>,
    /// None of them is among the stored.
    pub(super) removed: Vec<BlockKey>,
    /// More changes follow.
    pub(super) is_partial: bool,
}

impl ChangeLog {
    pub(super) fn next_number(&self) -> u64 {
        self.first_number + self.changes.len() as u64
    }

    /// Whether the changes from this number on are all here.
    pub(super) fn reaches(&self, number: u64) -> bool {
        number >= self.first_number
    }

    /// Adds changes, after which the tier has this number of blocks.
    ///
    /// As many changes are kept, because reading more of them would take longer than reading
    /// everything again. One step of an engine with many long prompts may make 100,000 changes.
    pub(super) fn apply(&mut self, changes: Vec<Change>, blocks: u64) {
        for change in changes {
            match change {
                Change::Stored(key) => self.changes.push_back((key, ChangeKind::Stored)),
                Change::Removed(key) => self.changes.push_back((key, ChangeKind::Removed)),
                Change::Cleared => self.clear(),
            }
        }
        let kept = usize::try_from(blocks).unwrap_or(usize::MAX).max(MIN_KEPT_CHANGES);
        let excess = self.changes.len().saturating_sub(kept);
        self.changes.drain(..excess);
        self.first_number += excess as u64;
    }

    /// Restarts every reader, which is shorter than one removal for each block.
    pub(super) fn clear(&mut self) {
        self.first_number = self.next_number() + 1;
        self.changes.clear();
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.changes.len()
    }

    /// Net effect of at most `most` changes from number `next` on, which advances. `None` if there
    /// are no changes.
    pub(super) fn read(&self, next: &mut u64, most: usize) -> Option<NetChange> {
        let begin = usize::try_from(*next - self.first_number).unwrap_or(usize::MAX).min(self.changes.len());
        let end = begin.saturating_add(most).min(self.changes.len());
        if begin == end {
            return None;
        }
        *next = self.first_number + end as u64;
        let mut net: FxHashMap<BlockKey, ChangeKind> = FxHashMap::with_capacity_and_hasher(end - begin, FxBuildHasher);
        for &(key, kind) in self.changes.range(begin..end) {
            // Stores and removals of a block alternate, so two changes in a row cancel each other.
            if net.remove(&key).is_none() {
                net.insert(key, kind);
            }
        }
        let all = |expected| net.iter().filter(|&(_, &kind)| kind == expected).map(|(&key, _)| key).collect();
        Some(NetChange { stored: all(ChangeKind::Stored), removed: all(ChangeKind::Removed), is_partial: end < self.changes.len() })
    }
}
