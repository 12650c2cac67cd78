//! `hostler scale`: another number of nodes for a model that is up.

use std::path::Path;

use clap::Args;
use hostler_cluster::FleetSize;

use super::Fleet;
use super::controller_start::ensure_controller;
use super::entries::{find_entry, parse_nodes, put_entry};
use super::watch::{WATCH_TIMEOUT, Watch};
use crate::output::say;

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
    let entry = fleet.folder.change_entries(|entries| {
        let mut entry = find_entry(entries, args.name.as_deref())?;
        entry.size = FleetSize::Fixed(args.nodes);
        entry.check()?;
        put_entry(entries, entry.clone()).map(|()| entry)
    })??;
    let watch = Watch::new(&fleet, &entry.name);
    ensure_controller(&fleet).await?;
    say(&format!("fleet     {} is to have {} nodes", entry.name, args.nodes));
    if args.detach {
        return Ok(());
    }
    watch.run(WATCH_TIMEOUT).await
}
