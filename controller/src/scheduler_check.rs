//! Whether this host's scheduler is the one that has the fleet's jobs. Every command that changes what is wanted asks it first.

use hostler_scheduler::{Scheduler, SchedulerIdentity};

use crate::{FleetFolder, FolderError};

/// Compares this host's scheduler with the one that the folder knows. One that does not answer is known by its kind alone: before a controller acts,
/// it asks again.
///
/// # Errors
/// `OtherScheduler`, and when the folder cannot be read.
pub async fn check_scheduler(folder: &FleetFolder, scheduler: Scheduler) -> Result<(), FolderError> {
    let found = match scheduler.identify().await {
        Ok(found) => found,
        Err(error) => {
            tracing::debug!(%error, "the scheduler does not say its name");
            SchedulerIdentity { kind: scheduler, name: None }
        }
    };
    folder.check_scheduler(&found)
}
