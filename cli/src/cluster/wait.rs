//! `hostler wait`: waits until a model serves, for scripts. Where no fleet of jobs is up, it is one of
//! this machine.

use std::path::Path;
use std::time::Duration;

use clap::Args;
use hostler_controller::FleetFolder;

use super::Fleet;
use super::controller_start::ensure_controller;
use super::entries::find_entry;
use super::watch::Watch;
use crate::fleet_state::has_jobs;
use crate::local_fleet;
use crate::settings::cluster_config;

/// Exit codes of `hostler wait`, for its help.
pub(crate) const WAIT_EXIT_CODES: &str =
    "Exit codes: 0 it serves, 3 its jobs or engines fail or it was ended, 4 not in time, 1 another error.";

#[derive(Debug, Args)]
pub(crate) struct WaitArgs {
    /// Its name, as `hostler up` said it; needed where several models are up. Where no fleet of jobs
    /// is up, that by which clients ask what `hostler up` serves from this machine.
    name: Option<String>,
    /// How long to wait.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "24h")]
    timeout: Duration,
}

pub(crate) async fn wait(args: &WaitArgs, file: Option<&Path>) -> anyhow::Result<()> {
    if !has_jobs(FleetFolder::find(&cluster_config(file)?)?.as_ref())? {
        return local_fleet::wait(args.name.as_deref(), args.timeout).await;
    }
    let fleet = Fleet::open(file)?;
    fleet.check_scheduler().await?;
    let entry = find_entry(&fleet.folder.entries()?, args.name.as_deref())?;
    ensure_controller(&fleet).await?;
    Watch::new(&fleet, &entry.name).run(args.timeout).await
}
