//! `hostler down`: ends models that are up, and watches until none of their jobs is left. Where no
//! fleet of jobs is up, it ends those of this machine.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::bail;
use clap::Args;
use hostler_controller::{ControllerPlace, EntryStatus, FleetFolder, FleetStatus};
use tokio::time::sleep;

use super::Fleet;
use super::controller_job::{end_jobs, wait_until_runs};
use super::controller_process::{HeartbeatWatch, ensure_process, find_controller};
use super::controller_start::{FoundController, ensure_controller};
use super::entries::find_entry;
use super::progress::describe_ending;
use crate::fleet_state::has_jobs;
use crate::local_fleet;
use crate::output::say;
use crate::settings::cluster_config;

const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Deadline for the end of all jobs. The controller cancels a draining job after ten minutes; the
/// rest is for the scheduler.
const END_TIMEOUT: Duration = Duration::from_secs(20 * 60);

/// Time in which the controller's own job ends by itself once nothing is left to keep. Its router
/// finishes running answers first.
const CONTROLLER_PATIENCE: Duration = Duration::from_secs(40);

#[derive(Debug, Args)]
pub(crate) struct DownArgs {
    /// Their names, as `hostler up` said them; without one, all that are up. Where no fleet of jobs
    /// is up, those that `hostler up` serves from this machine, by name or by process.
    pub(crate) names: Vec<String>,
}

pub(crate) async fn down(args: &DownArgs, file: Option<&Path>) -> anyhow::Result<()> {
    let jobs = FleetFolder::find(&cluster_config(file)?)?;
    if !has_jobs(jobs.as_ref())? {
        return local_fleet::down(&args.names).await;
    }
    let fleet = Fleet::open(file)?;
    fleet.check_scheduler().await?;
    let began = SystemTime::now();
    let removed = remove_entries(&fleet.folder, &args.names)?;
    let is_in_job = fleet.config.controller == ControllerPlace::Job;
    let is_last = fleet.folder.entries()?.is_empty();
    let ending = async {
        if is_in_job && is_last && find_controller(&fleet.folder).await?.is_none() {
            // The job may wait in the queue for hours, or start right now.
            end_jobs(&fleet, Duration::ZERO).await?;
        }
        let remembered = fleet.folder.remembered()?;
        if is_in_job && !is_last && removed.iter().all(|name| !remembered.contains(name)) && find_controller(&fleet.folder).await?.is_none()
        {
            // What is remembered is written before a submission, so none of them has a job.
            return Ok(());
        }
        if is_in_job && !fleet.folder.entries()?.is_empty() {
            if let FoundController::Submitted(_) = ensure_controller(&fleet).await? {
                wait_until_runs(&fleet).await?;
            }
        } else {
            // A controller that finds nothing to end says so by ending itself.
            ensure_process(&fleet).await?;
        }
        until_gone(&fleet.folder, &removed, began).await?;
        if is_in_job && is_last && fleet.folder.entries()?.is_empty() {
            end_jobs(&fleet, CONTROLLER_PATIENCE).await?;
        }
        anyhow::Ok(())
    };
    tokio::select! {
        gone = tokio::time::timeout(END_TIMEOUT, ending) => match gone {
            Ok(gone) => gone?,
            Err(_) => {
                let jobs: Vec<String> = removed.iter().map(|name| fleet.folder.job_name(name)).collect();
                bail!("after {} jobs are left, called {}: cancel them with the scheduler's own command, and see {}",
                    humantime::format_duration(END_TIMEOUT), jobs.join(", "), fleet.folder.controller_log().display())
            }
        },
        interrupted = tokio::signal::ctrl_c() => {
            interrupted?;
            bail!("the jobs go on ending without this command: `hostler down` looks on again");
        }
    }
    say(&format!("ended     {}", removed.join(", ")));
    Ok(())
}

/// Removes the entries of these names, or all. Returns the names to wait for, including those that
/// an earlier `down` has not waited for.
fn remove_entries(folder: &FleetFolder, names: &[String]) -> anyhow::Result<Vec<String>> {
    let leftover = folder.remembered()?;
    folder.change_entries(|entries| {
        let mut removed = names.to_vec();
        if names.is_empty() {
            removed.extend(entries.iter().map(|entry| entry.name.clone()).chain(leftover.iter().cloned()));
            removed.sort();
            removed.dedup();
        }
        for name in names.iter().filter(|name| !leftover.contains(name)) {
            find_entry(entries, Some(name))?;
        }
        if removed.is_empty() {
            bail!("nothing is up");
        }
        entries.retain(|entry| !removed.contains(&entry.name));
        Ok(removed)
    })?
}

/// Shows which jobs of these entries are left, until none is.
async fn until_gone(folder: &FleetFolder, names: &[String], began: SystemTime) -> anyhow::Result<()> {
    let (mut printed, mut heartbeat) = (BTreeSet::new(), HeartbeatWatch::new());
    while folder.endpoint()?.is_some() {
        if let Some(FleetStatus { at, entries, trouble }) = folder.status()? {
            let left: Vec<&EntryStatus> = entries.iter().filter(|entry| names.contains(&entry.name)).collect();
            let with_jobs = left.iter().filter(|entry| !entry.jobs.is_empty());
            let lines =
                with_jobs.map(|entry| describe_ending(entry)).chain(Some(format!("trouble   {trouble}")).filter(|_| !trouble.is_empty()));
            for line in lines.filter(|_| at >= began).collect::<BTreeSet<_>>() {
                if printed.insert(line.clone()) {
                    say(&line);
                }
            }
            if left.is_empty() && trouble.is_empty() && at >= began {
                return Ok(());
            }
        }
        if heartbeat.is_silent(folder)? {
            bail!("the controller says nothing any more: see {}; `hostler down` starts it again", folder.controller_log().display());
        }
        sleep(POLL_INTERVAL).await;
    }
    Ok(())
}
