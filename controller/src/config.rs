//! What a site's batch jobs need: one field each, documented here and nowhere else. `hostler init --site` fills them in.

use std::path::PathBuf;

use hostler_scheduler::{NoScheduler, Scheduler, UnknownScheduler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The settings of the fleet's batch jobs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ClusterConfig {
    /// Which scheduler the fleet's jobs are submitted to: `pbs` or `slurm`; empty means the one whose commands this host has.
    pub scheduler: String,
    /// Whose time jobs are charged to; empty where the site does not ask.
    pub account: String,
    /// The queue, or Slurm's partition; empty means the site's default.
    pub queue: String,
    /// What each job, which is one node, gets. For PBS the chunk to select, such as `1:ncpus=16:ngpus=4`; for Slurm words for `sbatch`, such as
    /// `--gpus-per-node=4 --cpus-per-task=16`.
    pub resources: String,
    /// Further words for `qsub` or `sbatch`, unchanged, such as `-l` and `filesystems=home:eagle`.
    pub options: Vec<String>,
    /// Lines for a login shell before the agent starts, such as `module load cuda` or `. ~/vllm/bin/activate`. They may hold a
    /// secret: `ps`, `qstat` and `squeue` do not show them to others. PBS's jobs find them in a file of mode 0600 in `cluster.state_dir`.
    pub setup: Vec<String>,
    /// The name by which compute nodes reach the host where the controller and its router run; empty means this host's own.
    pub router_host: String,
    /// Where the fleet's state is kept: what is wanted, the endpoint, the jobs' logs. Compute nodes have to see it too. Empty means
    /// `$XDG_STATE_HOME/hostler/fleet`, else `~/.local/state/hostler/fleet`.
    pub state_dir: PathBuf,
}

/// Why it cannot be said which scheduler jobs are submitted to.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SchedulerError {
    #[error("cluster.scheduler: {0}")]
    Unknown(#[from] UnknownScheduler),
    #[error("{0}; cluster.scheduler says which")]
    Ambiguous(NoScheduler),
    #[error(transparent)]
    Absent(NoScheduler),
}

impl ClusterConfig {
    /// The scheduler that is set, else the one whose commands this host has.
    ///
    /// # Errors
    /// When there is none, or no telling.
    pub fn find_scheduler(&self) -> Result<Scheduler, SchedulerError> {
        if !self.scheduler.is_empty() {
            return Ok(self.scheduler.parse()?);
        }
        Scheduler::find().map_err(|error| match error {
            NoScheduler::Ambiguous => SchedulerError::Ambiguous(error),
            NoScheduler::Absent { .. } => SchedulerError::Absent(error),
        })
    }
}
