//! The controller that waits for the running one's place. It renews its claim, because nobody must
//! wait for a controller that has died.

use std::fs::File;

use hostler_tls::write_private;

use super::heartbeat::set_time_to_now;
use super::{FleetFolder, FolderError, read, remove};

const STANDBY_FILE: &str = "standby";

impl FleetFolder {
    /// Says that the controller in this job waits for the place, whoever has said so before.
    ///
    /// # Errors
    /// When the file cannot be read or written.
    pub fn renew_standby(&self, job: &str) -> Result<(), FolderError> {
        let path = self.path().join(STANDBY_FILE);
        if read(&path)?.as_deref() != Some(job) {
            return Ok(write_private(&path, job.as_bytes())?);
        }
        let renewed = File::open(&path).and_then(|file| set_time_to_now(&file));
        renewed.map_err(|source| FolderError::File { what: "set the time of", path, source })
    }

    /// Withdraws the claim: no controller waits for the place any more.
    ///
    /// # Errors
    /// When the file cannot be removed.
    pub fn remove_standby(&self) -> Result<(), FolderError> {
        remove(&self.path().join(STANDBY_FILE))
    }

    /// The job whose controller has recently said that it waits for the place.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn standby(&self) -> Result<Option<String>, FolderError> {
        let path = self.path().join(STANDBY_FILE);
        let Some(job) = read(&path)? else { return Ok(None) };
        Ok(if self.is_silent(&path)? { None } else { Some(job) })
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::folder::HEARTBEAT_LIFETIME;
    use crate::folder::tests::folder;

    #[test]
    fn a_standby_that_stops_waiting_does_not_count() {
        let (_place, folder) = folder();
        let standby = || folder.standby().unwrap();
        assert_eq!(standby(), None);
        folder.renew_standby("12.head").unwrap();
        assert_eq!(standby().as_deref(), Some("12.head"));
        let file = File::open(folder.path().join(STANDBY_FILE)).unwrap();
        file.set_modified(SystemTime::now() - HEARTBEAT_LIFETIME - Duration::from_secs(5)).unwrap();
        assert_eq!(standby(), None, "it has died");
        folder.renew_standby("12.head").unwrap();
        assert_eq!(standby().as_deref(), Some("12.head"));
        folder.renew_standby("13.head").unwrap();
        assert_eq!(standby().as_deref(), Some("13.head"), "one that died is written over");
        folder.remove_standby().unwrap();
        assert_eq!(standby(), None);
    }
}
