//! The scheduler that has the fleet's jobs, as the folder knows it. Another one's list would say that they are all gone.

use hostler_scheduler::SchedulerIdentity;

use super::lock::LOCK_TIMEOUT;
use super::{FleetFolder, FolderError};

impl FleetFolder {
    /// The scheduler that has the fleet's jobs, as far as that is known.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn scheduler(&self) -> Result<Option<SchedulerIdentity>, FolderError> {
        self.read_json("scheduler.json")
    }

    /// # Errors
    /// `OtherScheduler` when the fleet's jobs are with another one.
    pub fn check_scheduler(&self, found: &SchedulerIdentity) -> Result<(), FolderError> {
        match self.scheduler()? {
            Some(known) if !known.may_be(found) => {
                Err(FolderError::OtherScheduler { path: self.path.clone(), known, found: found.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Writes down which scheduler has the fleet's jobs, where that is not known yet.
    ///
    /// # Errors
    /// As for `check_scheduler`, and when the file cannot be written.
    pub fn claim_scheduler(&self, found: &SchedulerIdentity) -> Result<(), FolderError> {
        let _lock = self.lock("fleet.lock", LOCK_TIMEOUT)?;
        self.check_scheduler(found)?;
        match self.scheduler()? {
            Some(known) if known.name.is_some() || found.name.is_none() => Ok(()),
            _ => self.write_json("scheduler.json", found),
        }
    }
}
