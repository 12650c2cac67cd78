//! What a controller knows from its start on: its folder, its scheduler, where it is reached and what jobs run.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use hostler_scheduler::Scheduler;

use crate::ClusterConfig;
use crate::folder::{Endpoint, FleetFolder};
use crate::step_error::StepError;
use crate::submission::JobProgram;

/// What a controller is told at its start.
#[derive(Debug, Clone)]
pub struct ControllerSetup {
    pub folder: FleetFolder,
    pub config: ClusterConfig,
    pub scheduler: Scheduler,
    pub endpoint: Endpoint,
    /// The folder of the fleet's authority.
    pub authority: PathBuf,
    /// This program, by an absolute path that compute nodes have too.
    pub program: PathBuf,
    /// The user's settings, by an absolute path, for the agents.
    pub settings_file: Option<PathBuf>,
    /// The batch job whose place this one has taken, if it is in a job itself.
    pub predecessor: Option<String>,
    /// When this process began. In a job of its own, it may have waited for its place for most of the job's time.
    pub began: SystemTime,
    /// How long the router beside it may take to finish running answers.
    pub drain_timeout: Duration,
    /// What these settings tell the engines of entries that have no arguments of their own.
    pub engine_args: Vec<String>,
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

    /// This program, as jobs start it.
    pub(crate) fn job_program(&self) -> JobProgram<'_> {
        JobProgram { program: &self.program, config: self.settings_file.as_deref() }
    }
}
