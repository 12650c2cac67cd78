//! `hostler router`.

use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::Args;
use hostler_boot::{Settings, Shutdown, TraceSettings};
use hostler_router::{Exposure, Router, RouterConfig};

use crate::AdjustRouter;
use crate::local_fleet::{LocalFleet, explain_conflict, find_local_fleets};
use crate::output::say;

/// Advice to a router whose address is that of `hostler up`.
const NOT_UP: &str = "a router takes the place of another `hostler router` alone, because the engines of `hostler up` belong to its process; \
                      `hostler down` ends it, and `hostler up MODEL --takeover` takes its place (docs/upgrade.md)";

#[derive(Debug, Args)]
pub(crate) struct RouterArgs {
    /// Take the place of your router that runs here with the same admin address, without refusing a
    /// request; where none runs, start as ever. That of `hostler up` cannot be taken.
    #[arg(long)]
    takeover: bool,
}

/// Runs a router until it has drained, or until another one has taken its place.
pub(crate) async fn router(settings: &Settings, args: &RouterArgs, adjust: AdjustRouter) -> anyhow::Result<()> {
    let config = router_config(settings, adjust)?;
    hostler_boot::raise_file_limit();
    let is_up_there = |fleet: &LocalFleet| fleet.has_router() && fleet.record.router.admin == config.admin_listen;
    if args.takeover
        && let Some(up) = find_local_fleets().await.iter().find(|fleet| is_up_there(fleet))
    {
        bail!("{} has this place; {NOT_UP}", up.describe());
    }
    let bound = if args.takeover { Router::take_over(config).await } else { Router::bind_replaceable(config).await };
    let router = match bound {
        Ok(router) => router,
        Err(error) => return Err(explain_conflict(error, NOT_UP).await),
    };
    let shutdown = Shutdown::new();
    let agent = settings.section("agent")?;
    let _signals = shutdown.install_signal_handlers(hostler_agent::signal_source(&agent))?;
    let router = router.with_kill_grace(hostler_agent::read_kill_grace(&agent).await);
    announce(&router);
    Ok(router.run(shutdown).await?)
}

/// The router's settings, and where its traces go. A wrong environment, written for other programs,
/// must not keep a router from starting.
pub(crate) fn router_config(settings: &Settings, adjust: AdjustRouter) -> anyhow::Result<RouterConfig> {
    let mut config: RouterConfig = settings.section("router")?;
    config.traces = TraceSettings::from_process().unwrap_or_else(|error| {
        tracing::warn!(%error, "no traces are sent");
        None
    });
    adjust(&mut config);
    Ok(config)
}

/// Has the router keep usage and batches in this folder, unless the settings say where, or that it
/// does not.
pub(crate) fn keep_state(config: &mut RouterConfig, settings: &Settings, folder: Option<&Path>) {
    let kept = [("usage_dir", &mut config.usage_dir, "usage"), ("batches_dir", &mut config.batches_dir, "batches")];
    for (key, path, name) in kept {
        if let Some(folder) = folder.filter(|_| !settings.is_set("router", key)) {
            *path = folder.join(name);
        }
    }
}

/// Where the routers of `hostler up` on this machine keep what outlives them.
pub(crate) fn local_state() -> Option<PathBuf> {
    Some(hostler_boot::home::state_dir()?.join("hostler"))
}

/// Prints the addresses for scripts, and logs what is open for operators.
pub(crate) fn announce(router: &Router) {
    log_exposures(router);
    address_lines(router).iter().for_each(|line| say(line));
}

/// Logs what is open for operators.
pub(crate) fn log_exposures(router: &Router) {
    for opening in router.exposures() {
        let Exposure { setting, address, description } = opening;
        if opening.is_remote() {
            tracing::warn!(setting, %address, "open beyond this host: {description}");
        } else {
            tracing::info!(setting, %address, "open within this host: {description}");
        }
    }
}

/// The router's addresses for scripts, that of the edge first.
pub(crate) fn address_lines(router: &Router) -> Vec<String> {
    let (edge, agents, admin) = (router.edge_address(), router.agents_address(), router.admin_address());
    let mut lines = vec![
        format!("edge    {}://{edge}/v1", router.edge_scheme()),
        format!("agents  {agents}"),
        format!("admin   {}://{admin}", router.admin_scheme()),
    ];
    lines.extend(router.operators_socket().map(|socket| format!("socket  {}", socket.display())));
    lines
}
