//! The commands that say what is wanted of a fleet of batch jobs: `hostler up --nodes`, `wait`, `scale` and `down`. They write it into the fleet's
//! folder, start the controller where none runs, and look on. The controller does the rest.

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
use self::progress::describe_changed_settings;
pub(crate) use self::scale::{ScaleArgs, scale};
pub(crate) use self::up::{UpArgs, up};
pub(crate) use self::wait::{WAIT_EXIT_CODES, WaitArgs, wait};
pub(crate) use self::watch::WatchError;

/// The user's fleet: its settings, its folder, and the file that the settings are from.
#[derive(Debug)]
struct Fleet {
    config: ClusterConfig,
    folder: FleetFolder,
    /// Absolute: jobs read it, too.
    file: Option<PathBuf>,
    /// When this command began.
    began: SystemTime,
}

impl Fleet {
    fn open(file: Option<&Path>) -> anyhow::Result<Self> {
        Self::with_folder(file, FleetFolder::open)
    }

    /// To show what would be done: nothing is made.
    fn peek(file: Option<&Path>) -> anyhow::Result<Self> {
        Self::with_folder(file, FleetFolder::peek)
    }

    fn with_folder(file: Option<&Path>, find: impl FnOnce(&ClusterConfig) -> Result<FleetFolder, FolderError>) -> anyhow::Result<Self> {
        let config = cluster_config(file)?;
        let folder = find(&config)?;
        let file = file.map(std::path::absolute).transpose().context("there is no working directory")?;
        Ok(Self { config, folder, file, began: SystemTime::now() })
    }

    /// How its jobs are to be submitted from now on.
    fn job_settings(&self, agent: &AgentConfig) -> anyhow::Result<JobSettings> {
        Ok(JobSettings {
            program: std::env::current_exe().context("this program does not know its own path")?,
            settings_file: self.file.clone(),
            engine_args: agent.engine_args.clone(),
            cluster: self.config.clone(),
        })
    }

    /// Refuses the fleet of another cluster. A host that has no scheduler's commands is of none: there the fleet's controller alone does what is said.
    async fn check_scheduler(&self) -> anyhow::Result<()> {
        if let Ok(scheduler) = self.config.find_scheduler() {
            check_scheduler(&self.folder, scheduler).await?;
        }
        Ok(())
    }
}

/// Has the controller run where something is wanted, or jobs are left of what was.
pub(crate) async fn ensure(file: Option<&Path>) -> anyhow::Result<()> {
    let fleet = Fleet::open(file)?;
    if fleet.folder.entries()?.is_empty() && fleet.folder.remembered()?.is_empty() {
        return Ok(());
    }
    fleet.check_scheduler().await?;
    ensure_controller(&fleet).await.map(drop)
}

/// Says which jobs the controller submits anew, and which it leaves, where jobs were submitted with other settings until now.
fn say_changed_settings(fleet: &Fleet, has_changed: bool) -> anyhow::Result<()> {
    let Some(status) = fleet.folder.status()?.filter(|_| has_changed) else { return Ok(()) };
    let jobs: Vec<&JobStatus> = status.entries.iter().flat_map(|entry| &entry.jobs).collect();
    for line in describe_changed_settings(&jobs) {
        say(&line);
    }
    Ok(())
}
