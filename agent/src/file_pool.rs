//! Folder of files with KV blocks, which the engines of one user on a host share.
//!
//! vLLM writes the files and never removes one. Each agent holds a shared lock on the folder and
//! keeps the files within its own bound. The last one to leave removes them; if it is killed, the
//! keeper of its last engine does, or the next agent.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustix::fs::{FlockOperation, flock};
use rustix::process::geteuid;
use tokio_util::sync::CancellationToken;

use crate::sizes::GIB;

/// Time between two looks at the files. An H200 computes up to 30,000 tokens of an 8B model in that
/// time, 4 GB.
const TRIM_INTERVAL: Duration = Duration::from_secs(1);

/// Free bytes that the files leave on their file system.
const RESERVE: u64 = GIB;

/// Part of the bound to which files are removed when they exceed it, so that removals come in
/// groups.
const KEPT_TENTHS: u64 = 9;

/// Name of the lock, which lies beside the folder: the folder's own content is removed.
const LOCK_SUFFIX: &str = ".lock";

#[derive(Debug, thiserror::Error)]
#[error("cannot keep files with KV blocks in {}: {source}; name another folder with --file-cache-dir, or leave --file-cache out", folder.display())]
pub struct FilePoolError {
    folder: PathBuf,
    source: io::Error,
}

/// This agent's hold on the folder.
#[derive(Debug)]
pub(crate) struct FilePool {
    folder: PathBuf,
    /// Most bytes of all files.
    bytes: u64,
    _lock: File,
}

/// The folder of this user below `directory`.
pub(crate) fn pool_folder(directory: &Path) -> PathBuf {
    let directory = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
    directory.join(format!("hostler-kv-{}", geteuid().as_raw()))
}

impl FilePool {
    /// Takes the folder. What dead agents have left there is removed, unless an engine of theirs
    /// lives on.
    pub(crate) fn open(folder: &Path, bytes: u64, has_survivors: bool) -> Result<Self, FilePoolError> {
        Self::take(folder, bytes, has_survivors).map_err(|source| FilePoolError { folder: folder.to_owned(), source })
    }

    fn take(folder: &Path, bytes: u64, has_survivors: bool) -> io::Result<Self> {
        let lock = open_lock(folder)?;
        if !has_survivors && flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            remove_folder(folder)?;
        }
        // From an exclusive lock this is a downgrade. Others hold an exclusive one only while they
        // remove files.
        flock(&lock, FlockOperation::LockShared)?;
        make_private(folder)?;
        Ok(Self { folder: folder.to_owned(), bytes, _lock: lock })
    }

    /// Keeps the files within their bound until `end`.
    pub(crate) async fn keep_bounded(self: Arc<Self>, end: CancellationToken) {
        let mut has_failed = false;
        while end.run_until_cancelled(tokio::time::sleep(TRIM_INTERVAL)).await.is_some() {
            let pool = Arc::clone(&self);
            let trimmed = tokio::task::spawn_blocking(move || pool.trim()).await;
            match trimmed.expect("looking at files does not panic") {
                Ok(0) => has_failed = false,
                Ok(removed) => {
                    has_failed = false;
                    tracing::debug!(removed, "the oldest files with KV blocks made room for new ones");
                }
                Err(error) if !has_failed => {
                    has_failed = true;
                    tracing::warn!(folder = %self.folder.display(), %error, "the files with KV blocks cannot be kept within agent.file_cache");
                }
                Err(_) => {}
            }
        }
    }

    /// Removes the oldest files while all together exceed the bound, and returns their number.
    fn trim(&self) -> io::Result<usize> {
        let files = list_files(&self.folder)?;
        let used: u64 = files.iter().map(|file| file.bytes).sum();
        let free = rustix::fs::statvfs(&self.folder).map(|found| found.f_bavail.saturating_mul(found.f_frsize))?;
        let most = self.bytes.min(used.saturating_add(free).saturating_sub(RESERVE));
        let mut removed = 0;
        for file in excess(files, most) {
            // An engine may have removed it, if it was incomplete.
            removed += usize::from(fs::remove_file(file.path).is_ok());
        }
        Ok(removed)
    }

    /// Lets go of the folder, and removes it if no other agent has it.
    pub(crate) fn leave(self) {
        let Self { folder, _lock: lock, .. } = self;
        drop(lock);
        remove_unused(&folder);
    }
}

/// Removes the folder unless an agent holds it.
pub(crate) fn remove_unused(folder: &Path) {
    let removed = open_lock(folder).and_then(|lock| {
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        remove_folder(folder)
    });
    if let Err(error) = removed
        && error.kind() != io::ErrorKind::WouldBlock
    {
        tracing::warn!(folder = %folder.display(), %error, "files with KV blocks are left");
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct PooledFile {
    /// When it was last written or, as far as the file system says so, read.
    used: SystemTime,
    bytes: u64,
    path: PathBuf,
}

/// The oldest files, without which the others have at most the kept part of `most` bytes; none if
/// all have at most `most`.
fn excess(mut files: Vec<PooledFile>, most: u64) -> Vec<PooledFile> {
    let mut used: u64 = files.iter().map(|file| file.bytes).sum();
    if used <= most {
        return Vec::new();
    }
    files.sort_unstable_by_key(|file| file.used);
    let keeps = most / 10 * KEPT_TENTHS;
    let removed = files.iter().take_while(|file| {
        let exceeds = used > keeps;
        used = used.saturating_sub(file.bytes);
        exceeds
    });
    let removed = removed.count();
    files.truncate(removed);
    files
}

/// All files below a folder. Links are not followed, and what disappears meanwhile is left out.
fn list_files(folder: &Path) -> io::Result<Vec<PooledFile>> {
    let (mut files, mut folders) = (Vec::new(), vec![fs::read_dir(folder)?]);
    while let Some(entries) = folders.pop() {
        for entry in entries.filter_map(Result::ok) {
            let (path, Ok(metadata)) = (entry.path(), entry.metadata()) else { continue };
            if metadata.is_dir() {
                folders.extend(fs::read_dir(&path));
            } else if let Ok(written) = metadata.modified() {
                let used = metadata.accessed().map_or(written, |read| read.max(written));
                files.push(PooledFile { used, bytes: metadata.blocks().saturating_mul(512), path });
            }
        }
    }
    Ok(files)
}

fn open_lock(folder: &Path) -> io::Result<File> {
    let mut path = OsString::from(folder);
    path.push(LOCK_SUFFIX);
    let lock = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
        .open(path)?;
    check_owner(&lock.metadata()?)?;
    Ok(lock)
}

/// Creates the folder for this user alone. Anybody may write to `/dev/shm`, so one that is there
/// may be another's.
fn make_private(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let metadata = fs::symlink_metadata(folder)?;
    if !metadata.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    if metadata.mode() & 0o077 != 0 {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "the folder is open to other users"));
    }
    check_owner(&metadata)
}

fn check_owner(metadata: &fs::Metadata) -> io::Result<()> {
    if metadata.uid() == geteuid().as_raw() {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("it belongs to user {}", metadata.uid())))
}

/// Removes the folder, which may be missing. A link in its place is not followed.
fn remove_folder(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
