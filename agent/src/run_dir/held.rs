//! Directories that a living agent holds, each with its lock.
//!
//! Cleaners of `/tmp` remove old files, whoever uses them. Then the engine that starts next or the
//! agent's pages, whichever notices first, restore the directory and its lock.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};

use super::{LOCK, RunDirError, check_private, lock_file, make_private, unusable_error};

/// Attempts against an agent that starts at the same moment and clears the directory away before it
/// is locked.
const ATTEMPTS: u32 = 3;

#[derive(Debug)]
pub(crate) struct HeldDirectories {
    base: PathBuf,
    /// Locks that are held as long as the agent lives; the kernel releases them however the agent
    /// ends.
    held: Mutex<Vec<(PathBuf, File)>>,
}

impl HeldDirectories {
    pub(crate) fn base(&self) -> &Path {
        &self.base
    }

    pub(super) fn new(base: PathBuf, held: impl IntoIterator<Item = (PathBuf, File)>) -> Self {
        Self { base, held: Mutex::new(held.into_iter().collect()) }
    }

    /// Restores removed directories. Usually looks at one file each.
    pub(crate) fn restore(&self) -> Result<(), RunDirError> {
        for (path, lock) in self.held.lock().iter_mut().filter(|(path, lock)| !is_lock_of(path, lock)) {
            *lock = self.make_again(path)?;
            tracing::warn!(
                path = %path.display(),
                "somebody removed this agent's run directory; it is made again: name a place that no cleaner empties with --run-dir"
            );
        }
        Ok(())
    }

    /// Stops all further restoring.
    pub(super) fn release(&self) {
        self.held.lock().clear();
    }

    fn make_again(&self, path: &Path) -> Result<File, RunDirError> {
        let mut failed = unusable_error(path, io::ErrorKind::ResourceBusy.into());
        for _ in 0..ATTEMPTS {
            make_private(&self.base)?;
            match DirBuilder::new().mode(0o700).create(path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(unusable_error(path, error)),
                _ => check_private(path)?,
            }
            match lock_file(&path.join(LOCK)) {
                Ok(lock) if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() && is_lock_of(path, &lock) => return Ok(lock),
                Ok(_) => {}
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }
}

/// Whether this open file is the directory's current lock, and not a removed one.
fn is_lock_of(path: &Path, lock: &File) -> bool {
    let (Ok(found), Ok(held)) = (fs::symlink_metadata(path.join(LOCK)), lock.metadata()) else { return false };
    (found.dev(), found.ino()) == (held.dev(), held.ino())
}

#[cfg(test)]
mod tests;
