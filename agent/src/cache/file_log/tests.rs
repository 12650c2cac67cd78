//! What a reader has after files come and go.

use std::collections::BTreeSet;

use hostler_placement::block_keys::BlockKey;

use super::*;

impl FileLog {
    /// A log of files of one block each, by that block's hash, key and parent.
    pub(crate) fn with_files(files: &[(u64, BlockKey, Option<u64>)]) -> Self {
        let log = Self::default();
        log.add(files.iter().map(|&(name, key, parent)| FileBlocks { parent, blocks: vec![(name, key)] }).collect());
        log
    }
}

/// A file of two blocks, named after the second; a key is ten times its hash.
fn file(name: u64) -> FileBlocks {
    FileBlocks { parent: None, blocks: vec![(name - 1, 10 * (name - 1)), (name, 10 * name)] }
}

/// Reads all changes and applies them.
fn read(log: &FileLog, cursor: &mut Cursor, keys: &mut BTreeSet<BlockKey>) {
    while let Some(delta) = log.read(cursor, 3) {
        if delta.is_snapshot {
            keys.clear();
        }
        keys.extend(delta.stored);
        delta.removed.iter().for_each(|key| assert!(keys.remove(key)));
        let digest = (keys.len() as u64, keys.iter().fold(0, |xor, key| xor ^ key));
        assert!(delta.is_partial || (delta.count, delta.xor) == digest);
    }
}

#[test]
fn a_node_whose_engines_have_written_nothing_reports_nothing() {
    let log = FileLog::default();
    log.add(Vec::new());
    assert_eq!(log.read(&mut Cursor::default(), 10), None);
}

#[test]
fn blocks_stay_until_their_file_is_missing() {
    let (log, mut cursor, mut keys) = (FileLog::default(), Cursor::default(), BTreeSet::new());
    log.add(vec![file(2), file(4)]);
    read(&log, &mut cursor, &mut keys);
    assert_eq!(keys, BTreeSet::from([10, 20, 30, 40]));
    log.add(vec![file(6)]);
    log.forget_missing(log.reported(), |name| name != 4);
    read(&log, &mut cursor, &mut keys);
    assert_eq!(keys, BTreeSet::from([10, 20, 50, 60]));
    log.forget_missing(log.reported(), |_| false);
    read(&log, &mut cursor, &mut keys);
    assert!(keys.is_empty());
}

#[test]
fn a_file_that_was_written_while_the_folder_was_looked_at_stays() {
    let log = FileLog::default();
    log.add(vec![file(2), file(4)]);
    let reported = log.reported();
    // The second file was removed, and is written again.
    log.add(vec![file(6), file(4)]);
    log.forget_missing(reported, |_| false);
    let mut keys = BTreeSet::new();
    read(&log, &mut Cursor::default(), &mut keys);
    assert_eq!(keys, BTreeSet::from([30, 40, 50, 60]));
}

#[test]
fn a_block_of_two_files_stays_until_both_are_gone() {
    let log = FileLog::default();
    let file = |last| FileBlocks { parent: None, blocks: vec![(1, 10), (last, 10 * last)] };
    log.add(vec![file(2), file(3)]);
    log.forget_missing(log.reported(), |name| name == 3);
    let mut keys = BTreeSet::new();
    read(&log, &mut Cursor::default(), &mut keys);
    assert_eq!(keys, BTreeSet::from([10, 30]));
}
