//! Position of one reader in the log of a tier, and what it reads.
//!
//! A reader gets everything once, then only changes. It never holds up the writer or another
//! reader.

use hostler_placement::block_keys::BlockKey;

use super::block_set::{BlockSet, CacheDigest};
use super::change_log::ChangeLog;

/// Position of one reader of a tier. A new reader reads everything first.
#[derive(Debug, Default)]
pub(crate) struct Cursor {
    position: Option<LogPosition>,
    /// Part of a snapshot that was not read yet.
    snapshot: Option<Snapshot>,
}

#[derive(Debug, Clone, Copy)]
struct LogPosition {
    epoch: u64,
    next: u64,
}

#[derive(Debug)]
struct Snapshot {
    keys: Vec<BlockKey>,
    digest: CacheDigest,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CacheDelta {
    pub epoch: u64,
    /// Everything read before is void.
    pub is_snapshot: bool,
    /// The reader must read the rest at once. Until then the count and the digest do not hold.
    pub is_partial: bool,
    pub stored: Vec<BlockKey>,
    /// Blocks that are no longer cached; none of them is among the stored.
    pub removed: Vec<BlockKey>,
    /// Blocks cached after this delta.
    pub count: u64,
    /// XOR of the block keys.
    pub xor: u64,
}

/// One tier of a log, while the log is locked.
#[derive(Debug)]
pub(super) struct LoggedTier<'a> {
    /// Life of the blocks.
    pub(super) epoch: u64,
    pub(super) blocks: &'a BlockSet,
    pub(super) changes: &'a ChangeLog,
}

impl Cursor {
    /// The next read begins with everything again.
    pub(crate) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Changes since the last read, with at most `most` blocks; `None` if nothing has changed.
    pub(super) fn read(&mut self, tier: &LoggedTier<'_>, most: usize) -> Option<CacheDelta> {
        let most = most.max(1);
        let begins = !self.is_current(tier);
        if begins {
            self.snapshot = Some(Snapshot { keys: tier.blocks.keys().collect(), digest: tier.blocks.digest() });
            self.position = Some(LogPosition { epoch: tier.epoch, next: tier.changes.next_number() });
        }
        match self.snapshot.take() {
            Some(snapshot) => Some(self.next_part(snapshot, begins, most)),
            None => next_changes(tier, self.position.as_mut()?, most),
        }
    }

    /// Whether the tier's changes continue what was read.
    fn is_current(&self, tier: &LoggedTier<'_>) -> bool {
        self.position.is_some_and(|place| place.epoch == tier.epoch && tier.changes.reaches(place.next))
    }

    /// Next part of a snapshot; the rest stays at the cursor.
    fn next_part(&mut self, mut snapshot: Snapshot, first: bool, most: usize) -> CacheDelta {
        let stored = snapshot.keys.split_off(snapshot.keys.len().saturating_sub(most));
        let digest = snapshot.digest;
        let is_partial = !snapshot.keys.is_empty();
        self.snapshot = is_partial.then_some(snapshot);
        let epoch = self.position.map_or(0, |place| place.epoch);
        CacheDelta { epoch, is_snapshot: first, is_partial, stored, removed: Vec::new(), count: digest.count, xor: digest.xor }
    }
}

/// Net effect of the next changes.
fn next_changes(tier: &LoggedTier<'_>, place: &mut LogPosition, most: usize) -> Option<CacheDelta> {
    let net = tier.changes.read(&mut place.next, most)?;
    let digest = tier.blocks.digest();
    Some(CacheDelta {
        epoch: tier.epoch,
        is_snapshot: false,
        is_partial: net.is_partial,
        stored: net.stored,
        removed: net.removed,
        count: digest.count,
        xor: digest.xor,
    })
}
