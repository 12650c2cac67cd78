//! Copies a model's files block by block, several at once, and checks copies against their hashes.
//!
//! Blocks on both file systems; runs on a thread of its own.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use hostler_tls::hex;
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use super::error::StageError;
use super::manifest::{BlockName, FileIdentity, FileRecord, Journal, Manifest, boot};
use super::progress::StageProgress;
use super::source::{SourceFile, SourceFolder};

/// What is hashed, noted and copied anew as a whole.
pub(super) const BLOCK_BYTES: u64 = 64 << 20;

/// Blocks copied at once: one reader does not fill the line to a parallel file system.
const WORKERS: usize = 8;

/// One read. Parallel file systems have stripes of 1 to 16 MiB.
const CHUNK_BYTES: usize = 8 << 20;

/// A copy of a source in an entry's folder.
pub(super) struct Copy<'a> {
    pub(super) source: &'a SourceFolder,
    pub(super) entry: &'a Path,
    pub(super) block_bytes: u64,
    pub(super) progress: &'a StageProgress,
}

/// What a check has found of each file; `None` has to be copied.
pub(super) type CheckedFiles = Vec<Option<FileRecord>>;

impl Copy<'_> {
    fn target(&self, file: &SourceFile) -> PathBuf {
        self.entry.join("model").join(&file.path)
    }

    fn blocks(&self, file: &SourceFile) -> u64 {
        file.bytes.div_ceil(self.block_bytes)
    }

    fn all_blocks(&self, files: &[usize]) -> Vec<BlockName> {
        files.iter().flat_map(|&file| (0..self.blocks(&self.source.files[file])).map(move |block| (file, block))).collect()
    }

    fn length(&self, (file, block): BlockName) -> u64 {
        (self.source.files[file].bytes - block * self.block_bytes).min(self.block_bytes)
    }

    /// Compares the files with the manifest, and removes those that differ.
    ///
    /// Sizes always count. A file is hashed where it may have changed since the manifest.
    pub(super) fn check(&self, manifest: Option<Manifest>) -> Result<CheckedFiles, StageError> {
        let nothing = || vec![None; self.source.files.len()];
        let Some(manifest) = manifest.filter(|manifest| manifest.block_bytes == self.block_bytes) else { return Ok(nothing()) };
        let is_this_boot = manifest.boot == boot();
        let mut checked = nothing();
        let mut doubtful = Vec::new();
        for (at, record) in manifest.files.into_iter().enumerate().take(self.source.files.len()) {
            let file = &self.source.files[at];
            let Ok(about) = fs::symlink_metadata(self.target(file)) else { continue };
            if record.path != file.path || !about.is_file() || about.len() != file.bytes || record.blocks.len() as u64 != self.blocks(file)
            {
                self.discard(&[at]);
                continue;
            }
            let identity = FileIdentity::of(&about);
            if !is_this_boot || record.identity != identity {
                doubtful.push(at);
            }
            checked[at] = Some(FileRecord { identity, ..record });
        }
        let differs = self.on_workers(&self.all_blocks(&doubtful), |(file, block), chunk| {
            let hash = self.hash_copy((file, block), chunk)?;
            let expected = checked[file].as_ref().and_then(|record| record.blocks.get(usize::try_from(block).ok()?));
            Ok((hash.as_ref() != expected).then_some(file))
        })?;
        for file in differs.into_iter().flatten() {
            if checked[file].take().is_some() {
                tracing::warn!(file = %self.target(&self.source.files[file]).display(), "a staged file was damaged; it is copied again");
                self.discard(&[file]);
            }
        }
        Ok(checked)
    }

    /// Whether the manifest says of each file what a check has found.
    pub(super) fn is_recorded(&self, checked: &CheckedFiles) -> bool {
        let manifest = Manifest::read(self.entry).filter(|manifest| manifest.boot == boot());
        manifest.is_some_and(|manifest| manifest.files.iter().map(Some).eq(checked.iter().map(Option::as_ref)))
    }

    /// Bytes that are still to be written for the files that a check did not find.
    pub(super) fn missing_bytes(&self, checked: &CheckedFiles) -> u64 {
        let lacks = |file: &SourceFile| {
            let has = fs::metadata(self.target(file)).map_or(0, |about| about.blocks() * 512);
            file.bytes.saturating_sub(has)
        };
        self.source.files.iter().zip(checked).filter(|(_, found)| found.is_none()).map(|(file, _)| lacks(file)).sum()
    }

    /// Copies what the check did not find, and writes the manifest.
    ///
    /// Blocks that an earlier copy has noted stay, if they hash to what was noted.
    pub(super) fn run(&self, checked: CheckedFiles) -> Result<(), StageError> {
        let wanted: Vec<usize> = (0..checked.len()).filter(|&at| checked[at].is_none()).collect();
        let copied = self.copy_files(&wanted);
        if let Err(StageError::DiskFull(_)) = copied {
            self.discard(&wanted);
            Journal::remove(self.entry)?;
        }
        let mut hashes = copied?;
        if let Some(path) = self.source.changed_file() {
            self.discard(&wanted);
            Journal::remove(self.entry)?;
            return Err(StageError::SourceChanged(path));
        }
        hashes.sort_unstable();
        let record = |(at, found): (usize, Option<FileRecord>)| match found {
            Some(record) => Ok(record),
            None => {
                let (file, target) = (&self.source.files[at], self.target(&self.source.files[at]));
                let about = fs::metadata(&target).map_err(|error| StageError::target(&target, error))?;
                let blocks = hashes.iter().filter(|((file, _), _)| *file == at).map(|(_, hash)| hash.clone()).collect();
                Ok(FileRecord { path: file.path.clone(), bytes: file.bytes, blocks, identity: FileIdentity::of(&about) })
            }
        };
        let files = checked.into_iter().enumerate().map(record).collect::<Result<_, StageError>>()?;
        let source = self.source.path.display().to_string();
        Manifest { source, boot: boot(), block_bytes: self.block_bytes, files }.write(self.entry)
    }

    fn copy_files(&self, wanted: &[usize]) -> Result<Vec<(BlockName, String)>, StageError> {
        let journal = Journal::open(self.entry)?;
        wanted.iter().try_for_each(|&file| self.reserve(&self.source.files[file]))?;
        self.on_workers(&self.all_blocks(wanted), |block, chunk| {
            let known = journal.known.get(&block);
            if known.is_some() && self.hash_copy(block, chunk)?.as_ref() == known {
                self.progress.add(self.length(block));
                return Ok((block, known.cloned().unwrap_or_default()));
            }
            let hash = self.copy_block(block, chunk)?;
            journal.note(block, &hash)?;
            Ok((block, hash))
        })
    }

    /// Takes the room of a file before anything is read, so that a full disk is found at once.
    fn reserve(&self, file: &SourceFile) -> Result<(), StageError> {
        let path = self.target(file);
        let reserve = || {
            fs::create_dir_all(path.parent().unwrap_or(self.entry))?;
            let target = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path)?;
            if file.bytes > 0 {
                match fallocate(&target, FallocateFlags::empty(), 0, file.bytes) {
                    // Not every file system can.
                    Ok(()) | Err(Errno::OPNOTSUPP) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            target.set_len(file.bytes)
        };
        reserve().map_err(|error: std::io::Error| StageError::target(&path, error))
    }

    fn copy_block(&self, (file, block): BlockName, chunk: &mut [u8]) -> Result<String, StageError> {
        let about = &self.source.files[file];
        let (from, to) = (self.source.path.join(&about.path), self.target(about));
        let source = File::open(&from).map_err(|error| StageError::source(&from, error))?;
        let target = OpenOptions::new().write(true).open(&to).map_err(|error| StageError::target(&to, error))?;
        let mut digest = Sha256::new();
        let (mut offset, end) = (block * self.block_bytes, block * self.block_bytes + self.length((file, block)));
        while offset < end {
            self.check_wanted()?;
            let part = part_of(chunk, end - offset);
            source.read_exact_at(part, offset).map_err(|error| StageError::source(&from, error))?;
            self.progress.add_read(part.len() as u64);
            digest.update(&*part);
            target.write_all_at(part, offset).map_err(|error| StageError::target(&to, error))?;
            self.progress.add(part.len() as u64);
            offset += part.len() as u64;
        }
        Ok(hex(&digest.finalize()))
    }

    /// Hash of a block of the copy; `None` where it cannot be read.
    fn hash_copy(&self, (file, block): BlockName, chunk: &mut [u8]) -> Result<Option<String>, StageError> {
        let Ok(copy) = File::open(self.target(&self.source.files[file])) else { return Ok(None) };
        let mut digest = Sha256::new();
        let (mut offset, end) = (block * self.block_bytes, block * self.block_bytes + self.length((file, block)));
        while offset < end {
            self.check_wanted()?;
            let part = part_of(chunk, end - offset);
            if copy.read_exact_at(part, offset).is_err() {
                return Ok(None);
            }
            digest.update(&*part);
            offset += part.len() as u64;
        }
        Ok(Some(hex(&digest.finalize())))
    }

    fn check_wanted(&self) -> Result<(), StageError> {
        if self.progress.is_cancelled() { Err(StageError::Cancelled) } else { Ok(()) }
    }

    /// Removes copies of files; engines that have opened one keep it.
    fn discard(&self, files: &[usize]) {
        for &file in files {
            let _ = fs::remove_file(self.target(&self.source.files[file]));
        }
    }

    /// Does something for each block, several at once; the first error ends it.
    fn on_workers<T: Send>(
        &self,
        blocks: &[BlockName],
        work: impl Fn(BlockName, &mut [u8]) -> Result<T, StageError> + Sync,
    ) -> Result<Vec<T>, StageError> {
        let (next, outcome) = (AtomicUsize::new(0), Mutex::new(Ok(Vec::new())));
        std::thread::scope(|scope| {
            for _ in 0..WORKERS.min(blocks.len()) {
                scope.spawn(|| {
                    let mut chunk = vec![0; CHUNK_BYTES];
                    while let Some(block) = blocks.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let done = work(*block, &mut chunk);
                        let mut outcome = outcome.lock();
                        match (done, &mut *outcome) {
                            (Ok(done), Ok(all)) => all.push(done),
                            (Err(error), Ok(_)) => *outcome = Err(error),
                            (_, Err(_)) => return,
                        }
                    }
                });
            }
        });
        outcome.into_inner()
    }
}

fn part_of(chunk: &mut [u8], left: u64) -> &mut [u8] {
    let length = usize::try_from(left).unwrap_or(usize::MAX).min(chunk.len());
    &mut chunk[..length]
}

#[cfg(test)]
mod tests;
