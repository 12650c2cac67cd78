//! The scheduler that has the fleet's jobs, as recorded in the folder. The list of another
//! scheduler would make all jobs look gone.

use hostler_scheduler::SchedulerIdentity;

use super::lock::LOCK_TIMEOUT;
use super::{FleetFolder, FolderError};

impl FleetFolder {
    /// The scheduler that has the fleet's jobs, if known.
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

    /// Records which scheduler has the fleet's jobs, unless that is known.
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
