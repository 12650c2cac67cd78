//! The folder of staged models on a node, and the entry of one model in it: who uses it, who copies
//! it, and what goes when room is needed.
//!
//! Blocks on the node's disk.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{FlockOperation, flock, statvfs};
use rustix::io::Errno;

use super::error::StageError;
use super::eviction::{Neighbor, Room, choose_evictions};

/// Held shared by agents whose engines use the entry, and exclusively by one that removes it. Its
/// time of change says when the entry was used last.
const USE_LOCK: &str = "use.lock";

/// Held by the agent that checks or copies.
const COPY_LOCK: &str = "copy.lock";

/// Held while room is made, by one agent at a time.
const ROOM_LOCK: &str = "room.lock";

/// How an entry is called that is being removed.
const GONE: &str = "gone-";

/// How long to wait for an agent that removes an entry. A file of 50 GB is removed in a second.
const REMOVAL_ROUNDS: u32 = 500;
const REMOVAL_PAUSE: Duration = Duration::from_millis(20);

/// Deepest folder of a copy.
pub(super) const MAX_DEPTH: usize = 8;

/// The folder of this user's staged models in a place.
#[derive(Debug, Clone)]
pub(super) struct StageFolder(PathBuf);

/// A model's entry. While this lives, nobody removes it.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) folder: PathBuf,
    _in_use: File,
}

impl StageFolder {
    pub(super) fn path_in(place: &Path) -> PathBuf {
        place.join(format!("hostler-stage-{}", rustix::process::geteuid().as_raw()))
    }

    /// Makes the folder, which only this user can enter.
    pub(super) fn open(place: &Path) -> Result<Self, StageError> {
        let (user, path) = (rustix::process::geteuid().as_raw(), Self::path_in(place));
        let refuse = |source| StageError::Target { path: path.clone(), source };
        fs::create_dir_all(place).map_err(|error| StageError::target(place, error))?;
        match DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(StageError::target(&path, error)),
            _ => {}
        }
        // A link does not count: in a folder that is open to everybody, others could have placed
        // it.
        let about = fs::symlink_metadata(&path).map_err(refuse)?;
        if !about.is_dir() || about.uid() != user || about.mode() & 0o077 != 0 {
            return Err(refuse(io::Error::other("it is no folder of this user's alone (chmod 700)")));
        }
        Ok(Self(path))
    }

    /// Opens a model's entry, and makes it if it does not exist.
    #[expect(clippy::disallowed_methods, reason = "blocks by contract, on a thread of its own")]
    pub(super) fn entry(&self, name: &str) -> Result<Entry, StageError> {
        let folder = self.0.join(name);
        for _ in 0..REMOVAL_ROUNDS {
            match DirBuilder::new().mode(0o700).create(&folder) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(StageError::target(&folder, error)),
                _ => {}
            }
            let path = folder.join(USE_LOCK);
            match open_lock(&path).map(|lock| (flock(&lock, FlockOperation::NonBlockingLockShared), lock)) {
                // Whoever removes entries may have moved this one away meanwhile.
                Ok((Ok(()), lock)) if is_at(&lock, &path) => {
                    // Without the time of use it only goes earlier.
                    let _ = lock.set_modified(SystemTime::now());
                    return Ok(Entry { folder, _in_use: lock });
                }
                Ok((Ok(()) | Err(Errno::WOULDBLOCK), _)) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(StageError::target(&path, error)),
                Ok((Err(error), _)) => return Err(StageError::target(&path, error)),
            }
            std::thread::sleep(REMOVAL_PAUSE);
        }
        Err(StageError::target(&folder, Errno::BUSY))
    }

    /// Refuses a model that is beyond the bound by itself.
    pub(super) fn check_bound(&self, bytes: u64, bound: u64) -> Result<(), StageError> {
        let bound = self.bound(bound)?;
        if bytes > bound { Err(StageError::BeyondBound { bytes, bound }) } else { Ok(()) }
    }

    /// Bytes that staged models may have here, by this setting.
    fn bound(&self, bound: u64) -> Result<u64, StageError> {
        let size = statvfs(&self.0).map_err(|error| StageError::target(&self.0, error))?;
        Ok(bound_within(bound, size.f_blocks.saturating_mul(size.f_frsize)))
    }

    /// Removes what was used least, until a model has room within the bound.
    pub(super) fn make_room(&self, own: &str, bytes: u64, missing: u64, bound: u64) -> Result<(), StageError> {
        let lock = open_lock(&self.0.join(ROOM_LOCK)).map_err(|error| StageError::target(&self.0, error))?;
        // Waits as long as another agent removes files.
        flock(&lock, FlockOperation::LockExclusive).map_err(|error| StageError::target(&self.0, error))?;
        let size = statvfs(&self.0).map_err(|error| StageError::target(&self.0, error))?;
        let bound = self.bound(bound)?;
        let room = Room { bytes, missing, bound, free: size.f_bavail.saturating_mul(size.f_frsize) };
        let (mut idle, mut in_use) = (Vec::new(), 0);
        let mut locks = Vec::new();
        for entry in fs::read_dir(&self.0).map_err(|error| StageError::target(&self.0, error))?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = entry.path();
            if name.starts_with(GONE) {
                // Left by an agent that was killed.
                let _ = fs::remove_dir_all(&path);
            } else if name != own && path.is_dir() {
                let bytes = size_of(&path, MAX_DEPTH);
                let lock = open_lock(&path.join(USE_LOCK));
                match lock.map(|lock| (flock(&lock, FlockOperation::NonBlockingLockExclusive), lock)) {
                    Ok((Ok(()), lock)) => {
                        let last_used = lock.metadata().and_then(|about| about.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
                        idle.push(Neighbor { name, bytes, last_used });
                        locks.push(lock);
                    }
                    _ => in_use += bytes,
                }
            }
        }
        let gone = choose_evictions(idle, in_use, room).map_err(|_| StageError::NoRoom {
            bytes,
            place: self.0.clone(),
            free: room.free.min(bound.saturating_sub(in_use)),
        })?;
        for name in gone {
            tracing::info!(event = "staged_model_removed", entry = name, place = %self.0.display(), "a staged model makes room for another");
            let moved = self.0.join(format!("{GONE}{name}-{}", fastrand::u32(..)));
            let removed = fs::rename(self.0.join(&name), &moved).and_then(|()| fs::remove_dir_all(&moved));
            removed.map_err(|error| StageError::target(&moved, error))?;
        }
        Ok(())
    }
}

impl Entry {
    /// Folder that an engine gets.
    pub(super) fn model(&self) -> PathBuf {
        self.folder.join("model")
    }

    /// Becomes the one that checks and copies; `None` while another one does. The kernel frees it
    /// when its process ends, however that comes about.
    pub(super) fn try_lock_copy(&self) -> Result<Option<File>, StageError> {
        let path = self.folder.join(COPY_LOCK);
        let lock = open_lock(&path).map_err(|error| StageError::target(&path, error))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(lock)),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(StageError::target(&path, error)),
        }
    }

    /// When the agent that copies last said that it lives, while it waits for its turn; 0 if never.
    pub(super) fn last_sign(&self) -> u64 {
        let about = fs::metadata(self.folder.join(COPY_LOCK));
        about.map_or(0, |about| about.mtime().unsigned_abs())
    }
}

fn open_lock(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)
}

fn is_at(file: &File, path: &Path) -> bool {
    let inode = |about: io::Result<fs::Metadata>| about.map(|about| (about.dev(), about.ino())).ok();
    inode(file.metadata()).is_some_and(|own| Some(own) == inode(fs::metadata(path)))
}

/// Bytes that staged models may have on a file system of `total` bytes; 0 means half of it.
pub(super) fn bound_within(bound: u64, total: u64) -> u64 {
    if bound == 0 { total / 2 } else { bound }
}

/// Bytes that a folder takes on its disk.
pub(super) fn size_of(folder: &Path, depth: usize) -> u64 {
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(about) if about.is_dir() && depth > 0 => size_of(&entry.path(), depth - 1),
        Ok(about) => about.blocks() * 512,
        Err(_) => 0,
    };
    fs::read_dir(folder).into_iter().flatten().flatten().map(size).sum()
}
