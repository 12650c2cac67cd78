//! Folder of files with KV blocks, which the engines of one user on a host share.
//!
//! vLLM writes the files and never removes one. Each agent, and each keeper of an engine, holds a
//! shared lock on the folder, and agents keep the files within their own bounds. The last one to
//! let go removes them; if all are killed at once, the next agent does.

use std::cmp::Reverse;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rustc_hash::{FxHashMap, FxHashSet};
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use rustix::process::geteuid;
use tokio_util::sync::CancellationToken;

use crate::cache::FileLog;
use crate::sizes::GIB;

/// Shortest time between two looks at the files. Two engines of an 8B model on an H200 wrote up to
/// 3 GB a second.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// The next look waits so many times as long as the last one took: a look at 100,000 files takes a
/// quarter of a second. The removals do not count: with them, two engines filled 81 GiB of 24,
/// because 25 GiB take two seconds to remove.
const LOOK_PAUSE: u32 = 20;

/// Longest time between two looks, also after one that a busy disk has held up.
const MAX_LOOK_INTERVAL: Duration = Duration::from_secs(5);

/// Age of an empty folder from which it is removed. vLLM makes a folder just before it writes
/// there.
const EMPTY_AGE: Duration = Duration::from_secs(60);

/// How long to wait for somebody who holds the folder alone, because he removes it.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// How long leaving waits until the folder is removed.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(5);

/// Free bytes that the files leave on their file system.
pub(crate) const RESERVE: u64 = GIB;

/// Part of the bound from which files are removed, because engines write until the next look.
const FULL_TENTHS: u64 = 9;

/// Part of the bound to which files are removed, so that removals come in groups.
const KEPT_TENTHS: u64 = 8;

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
    hold: FolderHold,
    /// Most bytes of all files.
    bytes: u64,
    /// Where this agent's engines write, below the folder.
    root: PathBuf,
    /// Log of the files that they have written.
    log: Arc<FileLog>,
}

/// A shared lock on the folder, with which nobody removes it. An agent has one for as long as it
/// runs, and a keeper for as long as its engine does.
#[derive(Debug)]
pub(crate) struct FolderHold {
    folder: PathBuf,
    lock: File,
}

/// The folder of this user below `directory`.
pub(crate) fn pool_folder(directory: &Path) -> PathBuf {
    let directory = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
    directory.join(format!("hostler-kv-{}", geteuid().as_raw()))
}

impl FolderHold {
    /// Takes the folder, which may be missing.
    pub(crate) fn take(folder: &Path) -> io::Result<Self> {
        let hold = Self::without_lock(folder)?;
        hold.share()?;
        Ok(hold)
    }

    fn without_lock(folder: &Path) -> io::Result<Self> {
        Ok(Self { folder: folder.to_owned(), lock: open_lock(folder)? })
    }

    /// Shares the lock, also after it was held alone.
    #[expect(clippy::disallowed_methods, reason = "agents run it on a thread of its own, and a keeper has nothing else to do yet")]
    fn share(&self) -> io::Result<()> {
        let deadline = Instant::now() + LOCK_TIMEOUT;
        loop {
            match flock(&self.lock, FlockOperation::NonBlockingLockShared) {
                Err(Errno::WOULDBLOCK) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
                Err(Errno::WOULDBLOCK) => {
                    let held = format!("another process holds {} alone", lock_path(&self.folder).display());
                    return Err(io::Error::new(io::ErrorKind::TimedOut, held));
                }
                other => return Ok(other?),
            }
        }
    }

    /// Lets go of the folder, and removes it if nobody else holds it.
    pub(crate) fn remove_if_last(self) {
        // A shared lock becomes one alone only if nobody else has one.
        let removed = match flock(&self.lock, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => Ok(()),
            Err(error) => Err(error.into()),
            Ok(()) => remove_folder(&self.folder),
        };
        if let Err(error) = removed {
            tracing::warn!(folder = %self.folder.display(), %error, "files with KV blocks are left");
        }
    }
}

impl FilePool {
    /// Takes the folder. What dead agents have left there is removed, unless an engine of theirs
    /// lives on.
    pub(crate) async fn open(folder: PathBuf, root: PathBuf, bytes: u64, log: Arc<FileLog>) -> Result<Self, FilePoolError> {
        let taken = folder.clone();
        let opened = tokio::task::spawn_blocking(move || Self::take(&taken, root, bytes, log)).await;
        opened.expect("opening a folder does not panic").map_err(|source| FilePoolError { folder, source })
    }

    fn take(folder: &Path, root: PathBuf, bytes: u64, log: Arc<FileLog>) -> io::Result<Self> {
        let hold = FolderHold::without_lock(folder)?;
        if flock(&hold.lock, FlockOperation::NonBlockingLockExclusive).is_ok() && folder.exists() {
            tracing::info!(folder = %folder.display(), "removing files with KV blocks that a dead agent has left");
            remove_folder(folder)?;
        }
        hold.share()?;
        make_private(folder)?;
        Ok(Self { hold, bytes, root, log })
    }

    /// Keeps the files within their bound until `end`.
    pub(crate) async fn keep_bounded(self: Arc<Self>, end: CancellationToken) {
        let (mut pause, mut trouble) = (LOOK_INTERVAL, String::new());
        while end.run_until_cancelled(tokio::time::sleep(pause)).await.is_some() {
            let pool = Arc::clone(&self);
            let trimmed = tokio::task::spawn_blocking(move || pool.trim()).await.expect("looking at files does not panic");
            pause = trimmed.as_ref().map_or(LOOK_INTERVAL, |trimmed| (trimmed.look * LOOK_PAUSE).clamp(LOOK_INTERVAL, MAX_LOOK_INTERVAL));
            let now = match trimmed {
                Ok(Trimmed { most, .. }) if most < self.bytes / 2 => {
                    "the file system has room for less than half of agent.file_cache".to_owned()
                }
                Ok(_) => String::new(),
                Err(error) => error.to_string(),
            };
            if now != trouble && !now.is_empty() {
                tracing::warn!(folder = %self.hold.folder.display(), trouble = now, "files with KV blocks are not kept as agent.file_cache says");
            }
            trouble = now;
        }
    }

    /// Removes the least recently used files while all together come near the bound, which is less
    /// than asked for where the file system is full, and tells the log what is left.
    fn trim(&self) -> io::Result<Trimmed> {
        let (folder, reported, since) = (&self.hold.folder, self.log.reported(), Instant::now());
        // Somebody may have removed it. An engine would make it anew for everybody to read.
        let is_private = make_private(folder);
        let Listing { mut files, unread } = list_files(folder, &self.root);
        let look = since.elapsed();
        let used: u64 = files.iter().map(|file| file.bytes).sum();
        let free = rustix::fs::statvfs(folder).map(|found| found.f_bavail.saturating_mul(found.f_frsize));
        let most = self.bytes.min(used.saturating_add(free.unwrap_or(u64::MAX)).saturating_sub(RESERVE));
        let excess = split_off_excess(&mut files, most, || self.log.parents());
        let left: FxHashSet<u64> = files.iter().filter_map(|file| file.last_block).collect();
        self.log.forget_missing(reported, |file| left.contains(&file));
        for file in excess {
            ignore_missing(fs::remove_file(file.path))?;
        }
        is_private?;
        unread.map_or(Ok(Trimmed { most, look }), Err)
    }

    /// Lets go of the folder, and removes it if nobody else holds it. The next agent removes what
    /// takes too long.
    pub(crate) async fn leave(self) {
        let folder = self.hold.folder.clone();
        let (done, removed) = tokio::sync::oneshot::channel();
        // Nobody waits for this thread when the program ends.
        std::thread::spawn(move || {
            self.hold.remove_if_last();
            let _ = done.send(());
        });
        if tokio::time::timeout(REMOVAL_TIMEOUT, removed).await.is_err() {
            tracing::warn!(folder = %folder.display(), "files with KV blocks are left: removing them takes long");
        }
    }
}

/// A look at the files, after which the least recently used ones were removed.
#[derive(Debug)]
struct Trimmed {
    /// Most bytes of all files, beside what others have on their file system.
    most: u64,
    /// How long the look took.
    look: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct PooledFile {
    /// The engine's hash of its last block; `None` if this agent's engines do not read the file.
    last_block: Option<u64>,
    /// When it was last written or, as far as the file system says so, read.
    used: SystemTime,
    bytes: u64,
    path: PathBuf,
}

/// Takes out the least recently used files, without which the others have at most the kept part of
/// `most` bytes; none before that bound is nearly reached. `parents` has the file that each one
/// continues, both by their last blocks.
fn split_off_excess(files: &mut Vec<PooledFile>, most: u64, parents: impl FnOnce() -> FxHashMap<u64, u64>) -> Vec<PooledFile> {
    let mut used: u64 = files.iter().map(|file| file.bytes).sum();
    if used <= most / 10 * FULL_TENTHS {
        return Vec::new();
    }
    order_by_use(files, &parents());
    let keeps = most / 10 * KEPT_TENTHS;
    let excess = files.iter().rev().take_while(|file| {
        let exceeds = used > keeps;
        used = used.saturating_sub(file.bytes);
        exceeds
    });
    let excess = excess.count();
    files.split_off(files.len() - excess)
}

/// Orders files by their last use, the latest first. The use of a file counts as that of all files
/// which it continues, and those come before it: what continues a file is of no use without it.
fn order_by_use(files: &mut Vec<PooledFile>, parents: &FxHashMap<u64, u64>) {
    files.sort_unstable_by_key(|file| Reverse(file.used));
    let places: FxHashMap<u64, usize> = files.iter().enumerate().filter_map(|(place, file)| Some((file.last_block?, place))).collect();
    let parent_of = |file: &PooledFile| places.get(parents.get(&file.last_block?)?).copied();
    let mut left: Vec<Option<PooledFile>> = files.drain(..).map(Some).collect();
    for place in 0..left.len() {
        // Each file is reached once, from the latest use that counts for it.
        let (mut chain, mut next) = (Vec::new(), Some(place));
        while let Some(file) = next.and_then(|place| left[place].take()) {
            next = parent_of(&file);
            chain.push(file);
        }
        files.extend(chain.into_iter().rev());
    }
}

/// The engine's hash of a file's last block, 64 bits of it; `None` if the file is not one of vLLM's
/// blocks. vLLM names a file after that block, in hexadecimal digits.
fn last_block(path: &Path) -> Option<u64> {
    let digits = path.file_name()?.to_str()?.strip_suffix(".bin")?;
    u64::from_str_radix(digits.get(digits.len().checked_sub(16)?..)?, 16).ok()
}

/// All files below a folder, and why some could not be looked at.
struct Listing {
    files: Vec<PooledFile>,
    unread: Option<io::Error>,
}

/// Lists all files below a folder; those below `root` are this agent's engines'. Links are not
/// followed, and what disappears meanwhile is left out. Folders that have been empty for a while
/// are removed.
fn list_files(folder: &Path, root: &Path) -> Listing {
    let (mut listing, mut folders) = (Listing { files: Vec::new(), unread: None }, vec![folder.to_owned()]);
    while let Some(path) = folders.pop() {
        match list_folder(&path, root, &mut listing.files, &mut folders) {
            // Another agent may have been first, or vLLM may write there again.
            Ok(true) if path != folder && is_old(&path) => drop(fs::remove_dir(&path)),
            Ok(_) => {}
            Err(error) => listing.unread = Some(error),
        }
    }
    listing
}

/// Adds the files and the folders in one folder. Returns whether it is empty.
fn list_folder(path: &Path, root: &Path, files: &mut Vec<PooledFile>, folders: &mut Vec<PathBuf>) -> io::Result<bool> {
    let Some(entries) = ignore_missing(fs::read_dir(path))? else { return Ok(false) };
    let mut is_empty = true;
    for entry in entries {
        is_empty = false;
        let entry = entry?;
        let Some(metadata) = ignore_missing(entry.metadata())? else { continue };
        if metadata.is_dir() {
            folders.push(entry.path());
        } else if let Ok(written) = metadata.modified() {
            let used = metadata.accessed().map_or(written, |read| read.max(written));
            let (path, bytes) = (entry.path(), metadata.blocks().saturating_mul(512));
            let last_block = if path.starts_with(root) { last_block(&path) } else { None };
            files.push(PooledFile { last_block, used, bytes, path });
        }
    }
    Ok(is_empty)
}

fn is_old(folder: &Path) -> bool {
    let changed = fs::metadata(folder).and_then(|metadata| metadata.modified());
    changed.is_ok_and(|changed| changed.elapsed().is_ok_and(|age| age > EMPTY_AGE))
}

/// `None` for what is not there any more.
fn ignore_missing<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

fn lock_path(folder: &Path) -> PathBuf {
    let mut path = OsString::from(folder);
    path.push(LOCK_SUFFIX);
    path.into()
}

fn open_lock(folder: &Path) -> io::Result<File> {
    // Anybody may have put a link or a pipe there; opening a pipe would wait for ever.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let mut options = OpenOptions::new();
    let lock =
        options.create(true).truncate(false).write(true).mode(0o600).custom_flags(flags.bits().cast_signed()).open(lock_path(folder))?;
    let metadata = lock.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{} is no file", lock_path(folder).display())));
    }
    check_owner(&metadata)?;
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
    check_owner(&metadata)?;
    if metadata.mode() & 0o077 != 0 {
        // An engine makes it anew, open to readers, where somebody has removed it.
        fs::set_permissions(folder, fs::Permissions::from_mode(0o700))?;
    }
    Ok(())
}

fn check_owner(metadata: &fs::Metadata) -> io::Result<()> {
    if metadata.uid() == geteuid().as_raw() {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("it belongs to user {}", metadata.uid())))
}

/// Removes the folder, which may be missing. A link in its place is not followed.
fn remove_folder(folder: &Path) -> io::Result<()> {
    ignore_missing(fs::remove_dir_all(folder)).map(drop)
}

#[cfg(test)]
mod tests;
