//! `hostler scale`: changes the number of nodes of a model that is up.

use std::path::Path;

use clap::Args;
use hostler_cluster::FleetSize;

use super::controller_start::ensure_controller;
use super::entries::{find_entry, milliseconds_since_1970, parse_nodes, put_entry};
use super::watch::{WATCH_TIMEOUT, Watch};
use super::{Fleet, say_changed_settings};
use crate::output::say;
use crate::settings::agent_config;

#[derive(Debug, Args)]
pub(crate) struct ScaleArgs {
    /// Its name, as `hostler up` said it; needed where several models are up.
    name: Option<String>,
    /// How many nodes serve it from now on, whatever clients want.
    #[arg(long, value_name = "N", value_parser = parse_nodes)]
    nodes: u32,
    /// Do not wait until they do; `hostler wait` does.
    #[arg(long)]
    detach: bool,
}

pub(crate) async fn scale(args: &ScaleArgs, file: Option<&Path>) -> anyhow::Result<()> {
    let fleet = Fleet::open(file)?;
    fleet.check_scheduler().await?;
    let (entry, has_changed) = fleet.folder.change_wanted(fleet.job_settings(&agent_config(file)?)?, |entries| {
        let mut entry = find_entry(entries, args.name.as_deref())?;
        let size = FleetSize::Fixed(args.nodes).of_nodes(&entry.name, entry.nodes_per_replica)?;
        (entry.size, entry.asked) = (size, milliseconds_since_1970());
        entry.check()?;
        put_entry(entries, entry.clone()).map(|()| entry)
    })?;
    let entry = entry?;
    say_changed_settings(&fleet, has_changed)?;
    let watch = Watch::new(&fleet, &entry.name);
    ensure_controller(&fleet).await?;
    say(&format!("fleet     {} is to have {} nodes", entry.name, args.nodes));
    if args.detach {
        return Ok(());
    }
    watch.run(WATCH_TIMEOUT).await
}
