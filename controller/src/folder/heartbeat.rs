//! Whether the endpoint's controller lives. The controller renews the file's time while it does,
//! even while a step waits for a slow scheduler.
//!
//! A file's time is compared with that of a file written just now, because the clocks of hosts
//! differ: NFS takes both from the server's clock. If clients set file times, as on Lustre, these
//! are no worse than times written into the file.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};

use rustix::fs::{Timespec, Timestamps, UTIME_NOW, futimens};

use super::{Endpoint, FleetFolder, FolderError};

/// How often a controller renews its endpoint's time.
pub(crate) const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(10);

/// Silence after which the endpoint's controller counts as gone. NFS clients may see a file's time
/// up to a minute late unless they open the file, which this module does. The rest is for a file
/// server that hangs.
pub const HEARTBEAT_LIFETIME: Duration = Duration::from_secs(60);

impl FleetFolder {
    /// Renews the endpoint's time if the endpoint is this controller's.
    ///
    /// # Errors
    /// When the file cannot be read, or its time cannot be set.
    pub fn renew_endpoint(&self, own: &Endpoint) -> Result<(), FolderError> {
        self.set_time(own, set_time_to_now)
    }

    /// Marks this endpoint's controller as ended, so nobody waits for its silence. The file stays,
    /// because the next controller takes its ports.
    ///
    /// # Errors
    /// As for `renew_endpoint`.
    pub fn retire_endpoint(&self, own: &Endpoint) -> Result<(), FolderError> {
        self.set_time(own, |file| file.set_modified(SystemTime::UNIX_EPOCH))
    }

    /// When the endpoint was last written or renewed, by the file system's clock; `None` if there
    /// is none.
    ///
    /// # Errors
    /// When the file cannot be looked at.
    pub fn last_heartbeat(&self) -> Result<Option<SystemTime>, FolderError> {
        last_change(&self.endpoint_file())
    }

    /// Whether there is no endpoint, or its controller is gone, on whatever host it ran.
    ///
    /// # Errors
    /// As for `last_heartbeat`.
    pub fn is_controller_gone(&self) -> Result<bool, FolderError> {
        self.is_silent(&self.endpoint_file())
    }

    /// Whether the endpoint's controller has said that it ends. Its router may still finish
    /// answers.
    ///
    /// # Errors
    /// As for `last_heartbeat`.
    pub fn has_controller_left(&self) -> Result<bool, FolderError> {
        Ok(self.last_heartbeat()? == Some(SystemTime::UNIX_EPOCH))
    }

    /// Whether a file that somebody renews is missing or was not renewed for too long.
    pub(super) fn is_silent(&self, path: &Path) -> Result<bool, FolderError> {
        let Some(last) = last_change(path)? else { return Ok(true) };
        // If the folder takes no more files, the clients' clocks are the only ones.
        let now = file_time(self.path()).unwrap_or_else(|_| SystemTime::now());
        Ok(now.duration_since(last).is_ok_and(|age| age > HEARTBEAT_LIFETIME))
    }

    /// Acts on the very file that was read: another controller's may have replaced it by then.
    fn set_time(&self, own: &Endpoint, set: impl FnOnce(&File) -> io::Result<()>) -> Result<(), FolderError> {
        let path = self.endpoint_file();
        let failed = |what, source| FolderError::File { what, path: path.clone(), source };
        let mut text = String::new();
        let mut file = match File::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            opened => opened.map_err(|source| failed("read", source))?,
        };
        file.read_to_string(&mut text).map_err(|source| failed("read", source))?;
        match serde_json::from_str::<Endpoint>(&text) {
            Ok(found) if found.is_same_start(own) => set(&file).map_err(|source| failed("set the time of", source)),
            _ => Ok(()),
        }
    }
}

pub(super) fn set_time_to_now(file: &File) -> io::Result<()> {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    Ok(futimens(file, &Timestamps { last_access: now, last_modification: now })?)
}

fn last_change(path: &Path) -> Result<Option<SystemTime>, FolderError> {
    // Opening the file makes an NFS client ask the server for its time.
    match File::open(path).and_then(|file| file.metadata()?.modified()) {
        Ok(time) => Ok(Some(time)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(FolderError::File { what: "look at", path: path.to_owned(), source }),
    }
}

/// Current time by the clock that dates files in this folder.
fn file_time(folder: &Path) -> io::Result<SystemTime> {
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(b"clock")?;
    file.as_file().sync_all()?;
    file.as_file().metadata()?.modified()
}
