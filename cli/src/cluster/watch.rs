//! Watches an entry until it serves, and shows line by line what its jobs and their engines do. The
//! fleet does not depend on it.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use anyhow::bail;
use hostler_cluster::{BudgetLeft, FleetEntry, FleetSize};
use hostler_controller::{ControllerPlace, Endpoint, EntryStatus, FleetFolder, FleetStatus};
use hostler_proto::fleet::v1::Replica;
use tokio::time::sleep;

use super::Fleet;
use super::controller_job::{ensure_job, wait_until_runs};
use super::controller_process::{HeartbeatWatch, ensure_process};
use super::job_logs::last_words;
use super::progress::{EntryProgress, Outlook, judge};
use crate::admin::{AdminClient, connect_to_fleet, list_fleet};
use crate::host_names::this_host;
use crate::output::say;
use crate::startup_progress::StartupProgress;

const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Default timeout. Jobs may wait in a queue for a long time.
pub(super) const WATCH_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// Reason for ending a wait for an entry. The fleet stays unchanged.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WatchError {
    #[error(
        "no job of `{name}` serves, and none will soon{cause}; what jobs print is in {}; the controller tries again until `hostler down {name}`", logs.display()
    )]
    Failing { name: String, cause: String, logs: PathBuf },
    #[error("`{0}` was ended by another command")]
    Removed(String),
    #[error(
        "the budget of `{name}` has ended ({left}), and nothing is submitted: `hostler up` with another --until or --node-hours, or with none, goes on"
    )]
    BudgetOver { name: String, left: String },
    #[error(
        "`{name}` was not ready within {}; its jobs go on: `hostler wait {name}` waits again, `hostler down {name}` ends them",
        humantime::format_duration(*timeout)
    )]
    Late { name: String, timeout: Duration },
    #[error("`{0}` goes on without this command: `hostler wait {0}` waits again, `hostler down {0}` ends it")]
    Interrupted(String),
}

impl WatchError {
    /// Exit code for scripts; shells report 130 for a program that Ctrl-C has ended.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Failing { .. } | Self::Removed(_) | Self::BudgetOver { .. } => 3,
            Self::Late { .. } => 4,
            Self::Interrupted(_) => 130,
        }
    }
}

/// A wait for an entry.
#[derive(Debug)]
pub(super) struct Watch<'a> {
    fleet: &'a Fleet,
    folder: &'a FleetFolder,
    name: &'a str,
    began: SystemTime,
    heartbeat: HeartbeatWatch,
    progress: EntryProgress,
    engines: EngineWatch,
    /// The entry's failures when first seen.
    failures_before: Option<u32>,
}

impl<'a> Watch<'a> {
    pub(super) fn new(fleet: &'a Fleet, name: &'a str) -> Self {
        let (folder, began, heartbeat) = (&fleet.folder, SystemTime::now(), HeartbeatWatch::new());
        let (progress, engines) = (EntryProgress::default(), EngineWatch::default());
        Self { fleet, folder, name, began, heartbeat, progress, engines, failures_before: None }
    }

    /// Shows what happens until the entry has the nodes that it wants, then how to use them.
    ///
    /// # Errors
    /// `WatchError` when that does not happen in time, or not at all.
    pub(super) async fn run(mut self, timeout: Duration) -> anyhow::Result<()> {
        let name = self.name.to_owned();
        tokio::select! {
            ended = tokio::time::timeout(timeout, self.until_ready()) => ended.map_err(|_| WatchError::Late { name, timeout })?,
            interrupted = tokio::signal::ctrl_c() => {
                interrupted?;
                Err(WatchError::Interrupted(name).into())
            }
        }
    }

    async fn until_ready(&mut self) -> anyhow::Result<()> {
        let is_in_job = self.fleet.config.controller == ControllerPlace::Job;
        if is_in_job {
            wait_until_runs(self.fleet).await?;
        }
        loop {
            let entries = self.folder.entries()?;
            let Some(desired) = entries.iter().find(|entry| entry.name == self.name) else {
                return Err(WatchError::Removed(self.name.to_owned()).into());
            };
            let endpoint = self.folder.endpoint()?;
            let (entry, trouble) = self.read_status(desired)?;
            if let Some(entry) = entry {
                self.progress.lines(&entry, &trouble).iter().for_each(|line| say(line));
                self.engines.look(self.folder, endpoint.as_ref(), &entry).await;
                match judge(&entry, *self.failures_before.get_or_insert(entry.failures)) {
                    Outlook::Coming => {}
                    Outlook::Ready => {
                        explain_use(&entry, &self.engines, endpoint.as_ref());
                        return Ok(());
                    }
                    Outlook::Failing => return Err(self.failing(&entry).into()),
                }
            } else {
                self.progress.trouble_lines(&trouble).iter().for_each(|line| say(line));
            }
            if !is_in_job && self.folder.has_controller_left()? {
                // The controller was told to end just when this command began, or is told so now.
                ensure_process(self.fleet).await?;
            }
            if self.heartbeat.is_silent(self.folder)? {
                if is_in_job {
                    // A job that follows the last one is already there, unless both have died.
                    ensure_job(self.fleet).await?;
                    wait_until_runs(self.fleet).await?;
                    self.heartbeat = HeartbeatWatch::new();
                    continue;
                }
                let log = self.folder.controller_log();
                bail!("the controller says nothing any more: see {}; `hostler wait {}` starts it again", log.display(), self.name);
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// The entry in the controller's view, and the controller's trouble. The entry is `None` until
    /// the controller has read what is wanted now.
    fn read_status(&self, desired: &FleetEntry) -> anyhow::Result<(Option<EntryStatus>, String)> {
        let Some(FleetStatus { at, entries, trouble }) = self.folder.status()? else { return Ok((None, String::new())) };
        let in_nodes = |jobs: u32| jobs.saturating_mul(desired.nodes_per_replica);
        let has_size = |entry: &EntryStatus| match desired.size {
            FleetSize::Fixed(jobs) => entry.wanted == in_nodes(jobs),
            FleetSize::Elastic { min, max, .. } => (in_nodes(min)..=in_nodes(max)).contains(&entry.wanted),
        };
        let is_over = |entry: &EntryStatus| entry.budget.as_ref().is_some_and(BudgetLeft::is_over);
        let is_current = |entry: &EntryStatus| entry.asked >= desired.asked && (has_size(entry) || is_over(entry));
        let entry = entries.into_iter().find(|entry| entry.name == self.name).filter(is_current);
        Ok(if at >= self.began { (entry, trouble) } else { (None, String::new()) })
    }

    fn failing(&self, entry: &EntryStatus) -> WatchError {
        let logs = self.folder.job_logs();
        if let Some(left) = entry.budget.as_ref().filter(|left| left.is_over()) {
            return WatchError::BudgetOver { name: self.name.to_owned(), left: left.describe() };
        }
        let cause = if entry.refusal.is_empty() { self.engines.last_cause.clone() } else { Some(entry.refusal.trim().to_owned()) };
        let cause = cause.or_else(|| last_words(&logs, self.began)).map(|cause| format!(": {cause}")).unwrap_or_default();
        WatchError::Failing { name: self.name.to_owned(), cause, logs }
    }
}

/// State of the engines of an entry's jobs, as reported by a router that this host reaches.
#[derive(Debug, Default)]
struct EngineWatch {
    router: Option<AdminClient>,
    progress: StartupProgress,
    /// All jobs of the entry that were seen.
    jobs: BTreeSet<String>,
    /// Runs of jobs that were seen gone.
    gone: BTreeSet<(String, u32)>,
    /// Why the last job was gone.
    last_cause: Option<String>,
    /// Name by which the entry's replicas serve.
    served_name: Option<String>,
}

impl EngineWatch {
    /// Updates the state of the engines. Nothing depends on it, so trouble with the router is left
    /// to the next time.
    async fn look(&mut self, folder: &FleetFolder, endpoint: Option<&Endpoint>, entry: &EntryStatus) {
        self.jobs.extend(entry.jobs.iter().map(|job| job.id.clone()));
        let Some(endpoint) = endpoint.filter(|endpoint| endpoint.job.is_some() || endpoint.host == this_host()) else { return };
        if let Err(error) = self.ask(folder, endpoint).await {
            tracing::debug!(error = format!("{error:#}"), "the router was not asked");
            self.router = None;
        }
    }

    async fn ask(&mut self, folder: &FleetFolder, endpoint: &Endpoint) -> anyhow::Result<()> {
        if self.router.is_none() {
            self.router = Some(connect_to_fleet(folder, endpoint).await?);
        }
        let router = self.router.as_mut().expect("it has just been set");
        let listed = list_fleet(router).await?;
        let nodes = listed.nodes.into_iter().filter(|node| node.job.as_ref().is_some_and(|job| self.jobs.contains(&job.id)));
        let replicas: Vec<Replica> = nodes.flat_map(|node| node.replicas).collect();
        self.progress.lines(&replicas, Instant::now()).iter().for_each(|line| say(line));
        let serving = replicas.iter().find(|replica| replica.is_ready());
        self.served_name = serving.and_then(|replica| replica.model_ids().next()).map(str::to_owned).or(self.served_name.take());
        for gone in listed.gone_jobs {
            let (job, reason) = (gone.job(), &gone.reason);
            if self.jobs.contains(&job.id) && self.gone.insert((job.id.clone(), job.run)) {
                say(&format!("gone      {}: {reason}", job.id));
                self.last_cause = Some(reason.clone());
            }
        }
        Ok(())
    }
}

fn explain_use(entry: &EntryStatus, engines: &EngineWatch, endpoint: Option<&Endpoint>) {
    if entry.wanted == 0 {
        say("ready     the first request for it brings a node");
    }
    let model = engines.served_name.as_ref().unwrap_or(&entry.model);
    let host = endpoint.filter(|endpoint| endpoint.job.is_none()).map(|endpoint| endpoint.host.clone()).filter(|host| *host != this_host());
    let place = host.map(|host| format!("; on {host}")).unwrap_or_default();
    say(&format!("use       eval \"$(hostler env)\"    # for any client of OpenAI's API, with the model {model}{place}"));
    say(&format!("end       hostler down {}", entry.name));
}
