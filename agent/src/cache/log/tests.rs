//! Readers at their own pace, interleaved with the writer in any order.

use std::collections::BTreeSet;

use hostler_placement::affinity::{CacheIndex, KeySetDigest, ReplicaSlot};
use hostler_placement::block_keys::BlockKey;
use proptest::prelude::*;

use super::*;
use crate::cache::change_log::MIN_KEPT_CHANGES;
use crate::cache::kv_event::{BlocksRemoved, BlocksStored};
use crate::cache::tests::{removed, stored};

#[derive(Default)]
struct Reader {
    cursor: Cursor,
    keys: BTreeSet<BlockKey>,
    epoch: u64,
    /// The last delta was partial.
    waits: bool,
}

impl Reader {
    /// Reads once and applies the delta, which must fit the blocks held so far.
    fn read(&mut self, log: &CacheLog, most: usize) -> bool {
        let Some(delta) = log.read(CacheTier::Gpu, &mut self.cursor, most) else {
            assert!(!self.waits, "a partial delta has a rest");
            return false;
        };
        if delta.is_snapshot {
            assert!(delta.removed.is_empty());
            self.keys.clear();
        } else {
            assert_eq!(self.epoch, delta.epoch, "a life begins with a snapshot");
        }
        assert!(delta.stored.len() + delta.removed.len() <= most);
        for key in &delta.stored {
            assert!(self.keys.insert(*key) && !delta.removed.contains(key));
        }
        for key in &delta.removed {
            assert!(self.keys.remove(key));
        }
        (self.epoch, self.waits) = (delta.epoch, delta.is_partial);
        if !delta.is_partial {
            let xor = self.keys.iter().fold(0, |xor, key| xor ^ key);
            assert_eq!((delta.count, delta.xor), (self.keys.len() as u64, xor));
        }
        true
    }

    fn read_all(&mut self, log: &CacheLog, most: usize) -> &BTreeSet<BlockKey> {
        while self.read(log, most) {}
        &self.keys
    }
}

fn truth(log: &CacheLog) -> BTreeSet<BlockKey> {
    log.inner.lock().mirror.blocks(CacheTier::Gpu).keys().collect()
}

fn begun() -> (Arc<CacheLog>, CacheLogWriter) {
    let log = Arc::new(CacheLog::default());
    let writer = log.begin_life(1);
    (log, writer)
}

#[test]
fn the_log_is_empty_before_the_first_life() {
    let log = CacheLog::default();
    assert_eq!(log.read(CacheTier::Gpu, &mut Cursor::default(), 10), None);
    let watch = log.watch().borrow().clone();
    assert_eq!((watch.epoch, watch.exact, watch.reason.as_str()), (0, false, NOT_READY));
}

#[test]
fn the_watch_reports_the_state_of_a_life() {
    let (log, writer) = begun();
    let mut watch = log.watch();
    writer.mark_exact();
    writer.apply(&[stored(None, &[1])]);
    let first = watch.borrow_and_update().clone();
    assert_eq!((first.epoch, first.exact, first.reason.as_str(), first.block_size), (1, true, "", 2));
    writer.apply(&[]);
    assert!(!watch.has_changed().unwrap(), "nothing happened");
    writer.apply(&[stored(None, &[2])]);
    assert!(watch.borrow_and_update().version > first.version);
    writer.mark_unknown("the line is dead");
    let unknown = watch.borrow_and_update().clone();
    assert_eq!((unknown.exact, unknown.reason.as_str()), (false, "the line is dead"));
    assert!(truth(&log).is_empty());
}

#[test]
fn late_writes_of_a_former_life_are_ignored() {
    let (log, old) = begun();
    old.mark_exact();
    let new = log.begin_life(2);
    old.apply(&[stored(None, &[1])]);
    old.mark_unknown("gone");
    assert_eq!(truth(&log).len(), 0);
    new.mark_exact();
    new.apply(&[stored(None, &[1])]);
    log.end_life();
    new.mark_exact();
    new.apply(&[stored(None, &[1])]);
    assert_eq!(truth(&log).len(), 0);
    assert!(!log.watch().borrow().exact);
}

#[test]
fn a_reader_behind_by_more_changes_than_there_are_blocks_gets_a_snapshot() {
    let (log, writer) = begun();
    let mut reader = Reader::default();
    writer.apply(&[stored(None, &[1])]);
    assert_eq!(reader.read_all(&log, 10).len(), 1);
    let blocks: Vec<u64> = (2..70_000).collect();
    let stored = [stored(Some(1), &blocks)];
    writer.apply(&stored);
    assert!(blocks.len() > MIN_KEPT_CHANGES);
    let delta = log.read(CacheTier::Gpu, &mut reader.cursor, usize::MAX).unwrap();
    assert_eq!((delta.is_snapshot, delta.stored.len()), (false, blocks.len()));
    let removed: Vec<KvEvent> = blocks.iter().map(|block| removed(*block)).collect();
    [&removed[..], &stored, &removed].into_iter().for_each(|events| writer.apply(events));
    let delta = log.read(CacheTier::Gpu, &mut reader.cursor, usize::MAX).unwrap();
    assert_eq!((delta.is_snapshot, delta.is_partial, delta.stored.len()), (true, false, 1));
    assert_eq!(log.inner.lock().gpu.len(), MIN_KEPT_CHANGES);
}

#[test]
fn blocks_stored_and_removed_between_two_readings_are_not_reported() {
    let (log, writer) = begun();
    let mut cursor = Cursor::default();
    writer.apply(&[stored(None, &[1])]);
    assert!(log.read(CacheTier::Gpu, &mut cursor, 10).unwrap().is_snapshot);
    writer.apply(&[stored(None, &[2]), removed(2), removed(1), stored(None, &[1]), stored(None, &[3])]);
    let delta = log.read(CacheTier::Gpu, &mut cursor, 10).unwrap();
    assert_eq!((delta.stored.len(), delta.removed.len(), delta.count), (1, 0, 2));
    assert_eq!(log.read(CacheTier::Gpu, &mut cursor, 10), None);
    cursor.reset();
    assert_eq!(log.read(CacheTier::Gpu, &mut cursor, 10).unwrap().stored.len(), 2);
}

#[derive(Debug, Clone)]
enum Step {
    Store(u64),
    Remove(u64),
    Clear,
    Reset,
    Begin,
    Read { reader: usize, most: usize },
    Resync(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => (1_u64..30).prop_map(Step::Store),
        8 => (1_u64..30).prop_map(Step::Remove),
        1 => Just(Step::Clear),
        1 => Just(Step::Reset),
        1 => Just(Step::Begin),
        10 => (0_usize..3, 1_usize..6).prop_map(|(reader, most)| Step::Read { reader, most }),
        1 => (0_usize..3).prop_map(Step::Resync),
    ]
}

proptest! {
    #[test]
    fn readers_at_any_pace_reach_the_same_blocks(steps in prop::collection::vec(step(), 0..200), most in 1_usize..10) {
        let (log, mut writer) = begun();
        let mut readers = [Reader::default(), Reader::default(), Reader::default()];
        let mut epoch = 1;
        for step in steps {
            match step {
                Step::Store(block) => writer.apply(&[stored(None, &[block])]),
                Step::Remove(block) => writer.apply(&[removed(block)]),
                Step::Clear => writer.apply(&[KvEvent::Cleared]),
                Step::Reset => writer.restart(),
                Step::Begin => {
                    epoch += 1;
                    writer = log.begin_life(epoch);
                }
                Step::Read { reader, most } => drop(readers[reader].read(&log, most)),
                Step::Resync(reader) => {
                    readers[reader].cursor.reset();
                    readers[reader].waits = false;
                }
            }
        }
        let truth = truth(&log);
        for reader in &mut readers {
            prop_assert_eq!(reader.read_all(&log, most), &truth);
            prop_assert_eq!(reader.epoch, epoch);
        }
    }
}

/// An event of a medium, whose number says which.
#[derive(Debug, Clone)]
enum MediaStep {
    Store { medium: usize, blocks: Vec<u64> },
    Remove { medium: usize, blocks: Vec<u64> },
    Clear,
    Read { tier: usize, most: usize },
}

const MEDIA: [Option<&str>; 5] = [None, Some("GPU"), Some("CPU"), Some("STORAGE"), Some("REMOTE")];

fn media_step() -> impl Strategy<Value = MediaStep> {
    let blocks = || prop::collection::vec(1_u64..30, 1..5);
    prop_oneof![
        12 => (0..MEDIA.len(), blocks()).prop_map(|(medium, blocks)| MediaStep::Store { medium, blocks }),
        8 => (0..MEDIA.len(), blocks()).prop_map(|(medium, blocks)| MediaStep::Remove { medium, blocks }),
        1 => Just(MediaStep::Clear),
        8 => (0_usize..2, 1_usize..6).prop_map(|(tier, most)| MediaStep::Read { tier, most }),
    ]
}

/// A router's slot of one tier.
struct IndexedTier {
    tier: CacheTier,
    cursor: Cursor,
    slot: ReplicaSlot,
}

impl IndexedTier {
    /// Applies what the log has next, as a router does; `false` if there is nothing.
    fn read(&mut self, log: &CacheLog, index: &CacheIndex, most: usize) -> bool {
        let Some(delta) = log.read(self.tier, &mut self.cursor, most) else { return false };
        if delta.is_snapshot {
            index.close(self.slot);
            self.slot = index.open();
        }
        index.store(self.slot, &delta.stored);
        index.remove(self.slot, &delta.removed);
        let KeySetDigest { count, xor } = index.digest(self.slot);
        assert!(delta.is_partial || (count, xor) == (delta.count, delta.xor), "a whole delta ends in another state than it says");
        true
    }
}

proptest! {
    #[test]
    fn mirror_and_index_agree_by_digest_after_any_events_of_all_media(steps in prop::collection::vec(media_step(), 0..150)) {
        let ((log, writer), index) = (begun(), CacheIndex::new());
        let mut tiers = CacheTier::ALL.map(|tier| IndexedTier { tier, cursor: Cursor::default(), slot: index.open() });
        for step in steps {
            match step {
                // Repeated blocks, blocks without their parents, and removals of what is not there.
                MediaStep::Store { medium, blocks } => {
                    let KvEvent::Stored(event) = stored(Some(blocks[0] - 1).filter(|parent| *parent > 0), &blocks) else { unreachable!() };
                    writer.apply(&[KvEvent::Stored(Box::new(BlocksStored { medium: MEDIA[medium].map(str::to_owned), ..*event }))]);
                }
                MediaStep::Remove { medium, blocks } => {
                    let medium = MEDIA[medium].map(str::to_owned);
                    writer.apply(&[KvEvent::Removed(BlocksRemoved { hashes: blocks, medium, ..BlocksRemoved::default() })]);
                }
                MediaStep::Clear => writer.apply(&[KvEvent::Cleared]),
                MediaStep::Read { tier, most } => drop(tiers[tier].read(&log, &index, most)),
            }
        }
        for tier in &mut tiers {
            while tier.read(&log, &index, 3) {}
            let (ours, theirs) = (log.inner.lock().mirror.blocks(tier.tier).digest(), index.digest(tier.slot));
            prop_assert_eq!((ours.count, ours.xor), (theirs.count, theirs.xor));
        }
    }
}
