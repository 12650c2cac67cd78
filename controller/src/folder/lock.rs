//! Locks in the fleet's folder. They hold between processes, and between hosts if the file system
//! supports that.

use std::fs::File;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::{FdFlags, fcntl_setfd};

use super::{FleetFolder, FolderError};

/// How long another command may take to change the entries.
pub(super) const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// How long another command may take to submit the controller's job.
const SUBMIT_TIMEOUT: Duration = Duration::from_secs(90);

const LOCK_RETRY: Duration = Duration::from_millis(50);

impl FleetFolder {
    /// Holds the place of the only controller until every process with the file has closed it.
    ///
    /// A submission inherits the file. So if its controller dies, the next one does not read a list
    /// that still misses the submitted job.
    ///
    /// # Errors
    /// `Busy` when another controller holds it for longer than `patience`.
    pub fn lock_controller(&self, patience: Duration) -> Result<File, FolderError> {
        let file = self.lock("controller.lock", patience)?;
        // A controller starts no programs but the scheduler's commands, which may inherit the lock.
        fcntl_setfd(&file, FdFlags::empty()).map_err(|errno| FolderError::File {
            what: "lock",
            path: self.path.join("controller.lock"),
            source: errno.into(),
        })?;
        Ok(file)
    }

    /// Keeps other commands from submitting a controller's job until the file is closed.
    ///
    /// # Errors
    /// `Busy` when another command takes too long.
    pub fn lock_submission(&self) -> Result<File, FolderError> {
        self.lock("submit.lock", SUBMIT_TIMEOUT)
    }

    #[expect(clippy::disallowed_methods, reason = "commands take it while nothing else runs, and the controller on a thread of its own")]
    pub(super) fn lock(&self, name: &str, patience: Duration) -> Result<File, FolderError> {
        let path = self.path.join(name);
        let failed = |source| FolderError::File { what: "lock", path: path.clone(), source };
        let file = File::options().create(true).append(true).open(&path).map_err(failed)?;
        let mut tries = patience.as_millis() / LOCK_RETRY.as_millis();
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file),
                Err(rustix::io::Errno::WOULDBLOCK) if tries > 0 => std::thread::sleep(LOCK_RETRY),
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(FolderError::Busy { path }),
                Err(errno) => return Err(failed(errno.into())),
            }
            tries -= 1;
        }
    }
}
