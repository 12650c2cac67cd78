//! `hostler wait`: waits until a model serves, for scripts.

use std::path::Path;
use std::time::Duration;

use clap::Args;

use super::Fleet;
use super::controller_start::ensure_controller;
use super::entries::find_entry;
use super::watch::Watch;

/// Exit codes of `hostler wait`, for its help.
pub(crate) const WAIT_EXIT_CODES: &str = "Exit codes: 0 it serves, 3 its jobs fail or it was ended, 4 not in time, 1 another error.";

#[derive(Debug, Args)]
pub(crate) struct WaitArgs {
    /// Its name, as `hostler up` said it; needed where several models are up.
    name: Option<String>,
    /// How long to wait.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "24h")]
    timeout: Duration,
}

pub(crate) async fn wait(args: &WaitArgs, file: Option<&Path>) -> anyhow::Result<()> {
    let fleet = Fleet::open(file)?;
    fleet.check_scheduler().await?;
    let entry = find_entry(&fleet.folder.entries()?, args.name.as_deref())?;
    ensure_controller(&fleet).await?;
    Watch::new(&fleet, &entry.name).run(args.timeout).await
}
