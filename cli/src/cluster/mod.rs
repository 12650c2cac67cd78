//! Commands that set the desired state of a fleet of batch jobs: `hostler up --nodes`, `wait`,
//! `scale` and `down`.
//!
//! They write it into the fleet's folder, start the controller if none runs, and watch. The
//! controller does the rest.

mod budget;
mod controller_job;
mod controller_process;
mod controller_start;
mod down;
mod entries;
mod job_logs;
mod progress;
mod scale;
mod up;
mod wait;
mod walltime;
mod watch;

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Context;
use hostler_agent::AgentConfig;
use hostler_controller::{ClusterConfig, FleetFolder, FolderError, JobSettings, JobStatus, check_scheduler};

use crate::output::say;
use crate::settings::cluster_config;

use self::controller_start::ensure_controller;
pub(crate) use self::down::{DownArgs, down};
pub(crate) use self::entries::name_of_model;
use self::progress::describe_changed_settings;
pub(crate) use self::scale::{ScaleArgs, scale};
pub(crate) use self::up::{UpArgs, up};
pub(crate) use self::wait::{WAIT_EXIT_CODES, WaitArgs, wait};
pub(crate) use self::watch::WatchError;

/// The user's fleet: its settings, its folder, and the settings file.
#[derive(Debug)]
struct Fleet {
    config: ClusterConfig,
    folder: FleetFolder,
    /// Absolute path, because jobs read the file, too.
    file: Option<PathBuf>,
    /// When this command began.
    began: SystemTime,
}

impl Fleet {
    fn open(file: Option<&Path>) -> anyhow::Result<Self> {
        Self::with_folder(file, FleetFolder::open)
    }

    /// Opens the fleet without making anything, to show what would be done.
    fn peek(file: Option<&Path>) -> anyhow::Result<Self> {
        Self::with_folder(file, FleetFolder::peek)
    }

    fn with_folder(file: Option<&Path>, find: impl FnOnce(&ClusterConfig) -> Result<FleetFolder, FolderError>) -> anyhow::Result<Self> {
        let config = cluster_config(file)?;
        let folder = find(&config)?;
        let file = file.map(std::path::absolute).transpose().context("there is no working directory")?;
        Ok(Self { config, folder, file, began: SystemTime::now() })
    }

    /// Settings with which jobs are submitted from now on.
    fn job_settings(&self, agent: &AgentConfig) -> anyhow::Result<JobSettings> {
        Ok(JobSettings {
            program: std::env::current_exe().context("this program does not know its own path")?,
            settings_file: self.file.clone(),
            engine_args: agent.engine_args.clone(),
            cluster: self.config.clone(),
        })
    }

    /// Rejects the fleet of another cluster. On a host without a scheduler's commands there is
    /// nothing to compare; the fleet's controller alone carries out the change there.
    async fn check_scheduler(&self) -> anyhow::Result<()> {
        if let Ok(scheduler) = self.config.find_scheduler() {
            check_scheduler(&self.folder, scheduler).await?;
        }
        Ok(())
    }
}

/// Starts the controller if an entry is desired, or jobs are left from before.
pub(crate) async fn ensure(file: Option<&Path>) -> anyhow::Result<()> {
    let fleet = Fleet::open(file)?;
    if fleet.folder.entries()?.is_empty() && fleet.folder.remembered()?.is_empty() {
        return Ok(());
    }
    fleet.check_scheduler().await?;
    ensure_controller(&fleet).await.map(drop)
}

/// If the settings have changed, shows which jobs the controller resubmits and which it leaves.
fn say_changed_settings(fleet: &Fleet, has_changed: bool) -> anyhow::Result<()> {
    let Some(status) = fleet.folder.status()?.filter(|_| has_changed) else { return Ok(()) };
    let jobs: Vec<&JobStatus> = status.entries.iter().flat_map(|entry| &entry.jobs).collect();
    for line in describe_changed_settings(&jobs) {
        say(&line);
    }
    Ok(())
}
