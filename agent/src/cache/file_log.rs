//! Log of the blocks in files that the engines of a host share, read by sessions with routers.
//!
//! A node has one log: any of its engines loads what another has written, also after the end of the
//! one that wrote it. Engines report what they write and never what is gone, so the keeper of the
//! folder says which files are left.

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::block_set::BlockSet;
use super::change_log::{Change, ChangeLog};
use super::cursor::{CacheDelta, Cursor, LoggedTier};
use super::mirror::FileBlocks;

/// Number of this tier in cache reports.
pub(crate) const FILE_TIER: u32 = 2;

/// Blocks in files that this node's engines have written.
#[derive(Debug, Default)]
pub(crate) struct FileLog {
    inner: Mutex<FileSet>,
}

#[derive(Debug, Default)]
struct FileSet {
    blocks: BlockSet,
    changes: ChangeLog,
    /// Files by the engine's hash of their last block, after which they are named.
    files: FxHashMap<u64, WrittenFile>,
    /// Files reported so far.
    reported: u64,
}

#[derive(Debug)]
struct WrittenFile {
    /// How many were reported before.
    number: u64,
    /// Last block of the file that this one continues.
    parent: Option<u64>,
    hashes: Box<[u64]>,
}

impl FileLog {
    /// Adds files that an engine reports, each with all its blocks.
    pub(super) fn add(&self, files: Vec<FileBlocks>) {
        if files.is_empty() {
            return;
        }
        let mut inner = self.inner.lock();
        let mut changes = Vec::new();
        for FileBlocks { parent, blocks } in files {
            let Some((name, _)) = blocks.last() else { continue };
            let (number, name) = (inner.reported, *name);
            inner.reported += 1;
            if let Some(known) = inner.files.get_mut(&name) {
                known.number = number;
                continue;
            }
            inner.files.insert(name, WrittenFile { number, parent, hashes: blocks.iter().map(|(hash, _)| *hash).collect() });
            let new = blocks.into_iter().filter(|(hash, key)| inner.blocks.store(*hash, *key, true));
            changes.extend(new.map(|(_, key)| Change::Stored(key)));
        }
        inner.log(changes);
    }

    /// For each file the one that it continues, both by the hash of their last block.
    pub(crate) fn parents(&self) -> FxHashMap<u64, u64> {
        let inner = self.inner.lock();
        inner.files.iter().filter_map(|(name, file)| Some((*name, file.parent?))).collect()
    }

    /// Files reported until now. Whoever looks at the folder asks before that.
    pub(crate) fn reported(&self) -> u64 {
        self.inner.lock().reported
    }

    /// Forgets the files that are gone, among those that were reported before the folder was looked
    /// at. `is_left` takes the hash of a file's last block.
    pub(crate) fn forget_missing(&self, reported_before: u64, is_left: impl Fn(u64) -> bool) {
        let mut inner = self.inner.lock();
        let FileSet { files, blocks, .. } = &mut *inner;
        let gone = files.extract_if(|name, file| file.number < reported_before && !is_left(*name));
        let gone = gone.flat_map(|(_, file)| file.hashes).filter_map(|hash| blocks.remove(hash)).filter(|gone| gone.is_last);
        let changes = gone.map(|gone| Change::Removed(gone.key)).collect();
        inner.log(changes);
    }

    /// Changes since this cursor was last read, with at most `most` blocks; `None` if nothing has
    /// changed, or no file was ever reported.
    pub(crate) fn read(&self, cursor: &mut Cursor, most: usize) -> Option<CacheDelta> {
        let inner = self.inner.lock();
        // Files outlive the engines, so they belong to no life.
        let tier = LoggedTier { epoch: 0, blocks: &inner.blocks, changes: &inner.changes };
        (inner.reported > 0).then(|| cursor.read(&tier, most)).flatten()
    }
}

impl FileSet {
    fn log(&mut self, changes: Vec<Change>) {
        self.changes.apply(changes, self.blocks.digest().count);
    }
}

#[cfg(test)]
mod tests;
