//! How a command has the fleet's controller run: as a process of this host or as a batch job, as `cluster.controller` says.

use std::fmt;

use anyhow::Context;
use hostler_controller::{ControllerPlace, Endpoint};

use super::Fleet;
use super::controller_job::ensure_job;
use super::controller_process::{ensure_process, find_controller};

/// The controller that keeps the fleet, or is to.
#[derive(Debug)]
pub(super) enum FoundController {
    Running(Box<Endpoint>),
    /// The batch job that is to bring it, by its id.
    Submitted(String),
}

impl fmt::Display for FoundController {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Running(endpoint) => match &endpoint.job {
                None => write!(formatter, "on {}", endpoint.host),
                Some(job) => write!(formatter, "in job {job} on {}", endpoint.host),
            },
            Self::Submitted(job) => write!(formatter, "in job {job}"),
        }
    }
}

/// Has the controller run, now or as soon as its job starts.
///
/// # Errors
/// When it cannot be started or submitted, or has found nothing to keep.
pub(super) async fn ensure_controller(fleet: &Fleet) -> anyhow::Result<FoundController> {
    if let Some(endpoint) = find_controller(&fleet.folder).await? {
        return Ok(FoundController::Running(endpoint.into()));
    }
    match fleet.config.controller {
        ControllerPlace::Job => Ok(FoundController::Submitted(ensure_job(fleet).await?)),
        ControllerPlace::Login => {
            let started = ensure_process(fleet).await?;
            started
                .map(|endpoint| FoundController::Running(endpoint.into()))
                .context("the controller has ended: another command has ended what was to serve")
        }
    }
}
