//! Setup of a controller: its folder, its scheduler, its endpoint and the program of its jobs.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use hostler_scheduler::Scheduler;

use crate::folder::{Endpoint, FleetFolder};
use crate::job_settings::JobSettings;
use crate::step_error::StepError;

/// A controller's input at its start.
#[derive(Debug, Clone)]
pub struct ControllerSetup {
    pub folder: FleetFolder,
    /// Settings as of the start; those written in the folder replace them.
    pub jobs: JobSettings,
    pub scheduler: Scheduler,
    pub endpoint: Endpoint,
    /// The folder of the fleet's authority.
    pub authority: PathBuf,
    /// The batch job whose place this one has taken, if the controller runs in a job.
    pub predecessor: Option<String>,
    /// When this process began. In a job of its own, the process may have waited for its place for
    /// most of the job's time.
    pub began: SystemTime,
    /// How long the router beside the controller may take to finish running answers.
    pub drain_timeout: Duration,
}

impl ControllerSetup {
    /// Whether this is still the fleet's controller. The lock proves it only if the file system has
    /// locks for all hosts.
    pub(crate) fn check_place(&self) -> Result<(), StepError> {
        match self.folder.endpoint()? {
            Some(found) if found.is_same_start(&self.endpoint) => Ok(()),
            Some(Endpoint { host, pid, .. }) => Err(StepError::Replaced { host, pid }),
            None => Err(StepError::Forgotten),
        }
    }

    /// Adopts new settings for submissions, if somebody has written them since.
    pub(crate) fn adopt_job_settings(&mut self, written: Option<JobSettings>) {
        if let Some(jobs) = written.filter(|jobs| *jobs != self.jobs) {
            tracing::info!(event = "job_settings_changed", program = %jobs.program.display(), "jobs are submitted with other settings from now on");
            self.jobs = jobs;
        }
    }
}
