//! What a controller knows from its start on: its folder, its scheduler, where it is reached and what jobs run.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use hostler_scheduler::Scheduler;

use crate::folder::{Endpoint, FleetFolder};
use crate::job_settings::JobSettings;
use crate::step_error::StepError;

/// What a controller is told at its start.
#[derive(Debug, Clone)]
pub struct ControllerSetup {
    pub folder: FleetFolder,
    /// As of the start; what is written in the folder replaces it.
    pub jobs: JobSettings,
    pub scheduler: Scheduler,
    pub endpoint: Endpoint,
    /// The folder of the fleet's authority.
    pub authority: PathBuf,
    /// The batch job whose place this one has taken, if it is in a job itself.
    pub predecessor: Option<String>,
    /// When this process began. In a job of its own, it may have waited for its place for most of the job's time.
    pub began: SystemTime,
    /// How long the router beside it may take to finish running answers.
    pub drain_timeout: Duration,
}

impl ControllerSetup {
    /// Whether this is the fleet's controller still. The lock says so only where the file system has locks for all hosts.
    pub(crate) fn check_place(&self) -> Result<(), StepError> {
        match self.folder.endpoint()? {
            Some(found) if found.is_same_start(&self.endpoint) => Ok(()),
            Some(Endpoint { host, pid, .. }) => Err(StepError::Replaced { host, pid }),
            None => Err(StepError::Forgotten),
        }
    }

    /// Takes over how jobs are to be submitted, if somebody has said so since.
    pub(crate) fn adopt_job_settings(&mut self, written: Option<JobSettings>) {
        if let Some(jobs) = written.filter(|jobs| *jobs != self.jobs) {
            tracing::info!(event = "job_settings_changed", program = %jobs.program.display(), "jobs are submitted with other settings from now on");
            self.jobs = jobs;
        }
    }
}
