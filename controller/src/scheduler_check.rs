//! Whether this host's scheduler has the fleet's jobs. Every command that changes what is wanted
//! checks this first.

use hostler_scheduler::{Scheduler, SchedulerIdentity};

use crate::{FleetFolder, FolderError};

/// Compares this host's scheduler with the one recorded in the folder.
///
/// If it does not answer, only its kind is compared: a controller asks again before it acts.
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
