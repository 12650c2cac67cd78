//! `hostler down`: ends models that are up, and looks on until no job of theirs is left.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::bail;
use clap::Args;
use hostler_controller::{FleetFolder, job_name};
use tokio::time::sleep;

use super::Fleet;
use super::controller_process::{STATUS_LIFETIME, ensure_controller};
use super::entries::find_entry;
use super::progress::EntryProgress;
use crate::output::say;

const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The controller cancels a job that was asked to leave after ten minutes; the rest is for the scheduler.
const END_TIMEOUT: Duration = Duration::from_secs(20 * 60);

#[derive(Debug, Args)]
pub(crate) struct DownArgs {
    /// Their names, as `hostler up` said them; without one, all that are up.
    names: Vec<String>,
}

pub(crate) async fn down(args: &DownArgs, file: Option<&Path>) -> anyhow::Result<()> {
    let fleet = Fleet::open(file)?;
    let began = SystemTime::now();
    let removed = remove_entries(&fleet.folder, &args.names)?;
    // A controller that finds nothing to end says so by ending itself.
    ensure_controller(&fleet).await?;
    let ending = until_gone(&fleet.folder, &removed, began);
    tokio::select! {
        gone = tokio::time::timeout(END_TIMEOUT, ending) => match gone {
            Ok(gone) => gone?,
            Err(_) => {
                let jobs: Vec<String> = removed.iter().map(|name| job_name(name)).collect();
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

/// Removes the entries of these names, or all; returns what is to be gone, which includes what an earlier `down` has not seen to its end.
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

/// Says what the jobs of these entries do until none is left.
async fn until_gone(folder: &FleetFolder, names: &[String], began: SystemTime) -> anyhow::Result<()> {
    let mut progress: BTreeMap<&str, EntryProgress> = BTreeMap::new();
    loop {
        let Some(_) = folder.endpoint()? else { return Ok(()) };
        if let Some(status) = folder.status()?.filter(|status| status.at >= began) {
            let left = status.entries.iter().filter(|entry| names.contains(&entry.name));
            let mut is_any_left = false;
            for entry in left {
                is_any_left = true;
                let lines = progress.entry(names.iter().find(|name| **name == entry.name).map_or("", String::as_str)).or_default();
                lines.lines(entry, &status.trouble).iter().for_each(|line| say(line));
            }
            if !is_any_left && status.trouble.is_empty() {
                return Ok(());
            }
            if status.at.elapsed().unwrap_or_default() > STATUS_LIFETIME {
                bail!("the controller says nothing any more: see {}; `hostler down` starts it again", folder.controller_log().display());
            }
        }
        sleep(POLL_INTERVAL).await;
    }
}
