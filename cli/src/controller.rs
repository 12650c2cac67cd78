//! `hostler controller`: a router and, beside it, the loop that keeps the size of a fleet of batch jobs.

use std::fs::File;
use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use hostler_agent::AgentConfig;
use hostler_boot::{Settings, Shutdown};
use hostler_controller::{ClusterConfig, Controller, ControllerSetup, Endpoint, FleetFolder, FolderError, check_scheduler};
use hostler_router::{Router, RouterConfig};
use tokio::runtime::Handle;
use tokio::time::sleep;

use crate::AdjustRouter;
use crate::env::this_host;
use crate::router::{announce, router_config};
use crate::settings::user_key_file;

/// How long the place of the controller may be held by one that leaves, by a scheduler's command that one has left behind, or by one whose host has
/// died. Each has a minute.
const PLACE_PATIENCE: Duration = Duration::from_secs(75);

const POLL_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub(crate) struct ControllerArgs {
    /// In a session of its own, as `hostler up` starts it: it goes on when the terminal is closed.
    #[arg(long)]
    background: bool,
}

/// Runs both until nothing is wanted any more, or a signal ends them. Jobs then run on.
pub(crate) async fn controller(
    settings: &Settings,
    args: &ControllerArgs,
    file: Option<&Path>,
    adjust: AdjustRouter,
) -> anyhow::Result<()> {
    if args.background {
        rustix::process::setsid()
            .context("a shell's own job cannot have a session of its own: start it by `setsid`, or by `hostler up`")?;
    }
    let config: ClusterConfig = settings.section("cluster")?;
    let scheduler = config.find_scheduler()?;
    let folder = FleetFolder::open(&config)?;
    check_scheduler(&folder, scheduler).await?;
    let agent: AgentConfig = settings.section("agent")?;
    let _lock = take_place(&folder).await?;
    let router_config = configure_router(settings, folder.endpoint()?.as_ref(), adjust)?;
    let (authority, keys_file) = (router_config.tls_dir.clone(), router_config.keys_file.clone());
    hostler_boot::raise_file_limit();
    let router = Router::bind(router_config).await?.open_edge_socket().await;
    let endpoint = describe_endpoint(&router, &config, &keys_file)?;
    let controller = Controller::new(ControllerSetup {
        folder: folder.clone(),
        config,
        scheduler,
        endpoint: endpoint.clone(),
        authority: std::path::absolute(authority)?,
        program: std::env::current_exe().context("this program does not know its own path")?,
        settings_file: file.map(std::path::absolute).transpose()?,
        engine_args: agent.engine_args.clone(),
    })?;
    let shutdown = Shutdown::new();
    let _signals = shutdown.install_signal_handlers(hostler_agent::signal_source(&agent))?;
    announce(&router);
    folder.write_endpoint(&endpoint)?;
    let mut routing = tokio::spawn(router.run(shutdown.clone()));
    let (runtime, ends) = (Handle::current(), shutdown.clone());
    // A file system that hangs stops this thread alone.
    let mut keeping = tokio::task::spawn_blocking(move || runtime.block_on(controller.run(ends)));
    tokio::select! {
        ended = &mut routing => {
            shutdown.drain();
            keeping.await?;
            Ok(ended??)
        }
        kept = &mut keeping => {
            shutdown.drain();
            kept?;
            Ok(routing.await??)
        }
    }
}

/// Waits for the place of the fleet's only controller.
async fn take_place(folder: &FleetFolder) -> anyhow::Result<File> {
    let (waiting, began) = (folder.clone(), Instant::now());
    match tokio::task::spawn_blocking(move || waiting.lock_controller(PLACE_PATIENCE)).await? {
        Err(FolderError::Busy { .. }) => Err(taken_place(folder.endpoint()?.as_ref())),
        locked => {
            let lock = locked?;
            while let Some(other) = find_elsewhere(folder, &this_host())? {
                if began.elapsed() >= PLACE_PATIENCE {
                    return Err(taken_place(Some(&other)));
                }
                sleep(POLL_INTERVAL).await;
            }
            Ok(lock)
        }
    }
}

/// The controller that lives on another host, where the file system may have no locks that hold on this one.
fn find_elsewhere(folder: &FleetFolder, this_host: &str) -> anyhow::Result<Option<Endpoint>> {
    let Some(other) = folder.endpoint()?.filter(|endpoint| endpoint.host != this_host) else { return Ok(None) };
    Ok(if folder.is_controller_gone()? { None } else { Some(other) })
}

fn taken_place(other: Option<&Endpoint>) -> anyhow::Error {
    let other = other.map(|other| format!(" on {}, process {}", other.host, other.pid)).unwrap_or_default();
    anyhow!("this fleet has a controller already{other}: SIGTERM ends it, and its jobs run on")
}

/// The router's settings, with free ports where none are set. Those of a former controller are taken again: clients have its address.
fn configure_router(settings: &Settings, former: Option<&Endpoint>, adjust: AdjustRouter) -> anyhow::Result<RouterConfig> {
    let mut config = router_config(settings, adjust)?;
    if config.tls_dir.as_os_str().is_empty() {
        bail!("jobs have no authority to join by (router.tls_dir): run `hostler init` first");
    }
    if config.keys_file.as_os_str().is_empty() {
        bail!("every user of this host reaches the fleet, and there are no keys (router.keys_file): run `hostler init` first");
    }
    let addresses = [
        ("listen", &mut config.listen, "127.0.0.1", former.map(|former| &former.edge)),
        ("agents_listen", &mut config.agents_listen, "0.0.0.0", former.map(|former| &former.agents)),
        ("admin_listen", &mut config.admin_listen, "127.0.0.1", former.map(|former| &former.admin)),
    ];
    for (setting, address, host, former) in addresses {
        if !settings.is_set("router", setting) {
            *address = format!("{host}:{}", free_port(host, former.map(String::as_str)));
        }
    }
    Ok(config)
}

/// The port of a former address if it is free, else 0.
fn free_port(host: &str, former: Option<&str>) -> u16 {
    let Some(port) = former.and_then(port_of) else { return 0 };
    match TcpListener::bind((host, port)) {
        Ok(_) => port,
        Err(error) => {
            tracing::warn!(port, %error, "the former controller's port is not to be had: jobs learn the new address by themselves, clients by `hostler env`");
            0
        }
    }
}

/// The port at the end of an address or URL.
fn port_of(address: &str) -> Option<u16> {
    address.rsplit_once(':')?.1.parse().ok()
}

fn describe_endpoint(router: &Router, config: &ClusterConfig, keys_file: &Path) -> anyhow::Result<Endpoint> {
    let socket = router.operators_socket().context(
        "there is no folder for the socket by which the controller asks the router: set router.operators_socket to a path in a folder that is yours alone",
    )?;
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let edge = router.edge_address();
    // Not `localhost`: another user of the host could listen on the other of its addresses, and get the keys of clients that try that one first.
    let loopback = edge.ip().to_string();
    let edge_host = if edge.ip().is_loopback() { &loopback } else { &host };
    let agents_host = if config.router_host.is_empty() { &host } else { &config.router_host };
    Ok(Endpoint {
        pid: std::process::id(),
        instance: Endpoint::draw_instance(),
        edge: format!("{}://{edge_host}:{}", router.edge_scheme(), edge.port()),
        edge_socket: router.edge_socket().map(std::path::absolute).transpose()?,
        operators_socket: std::path::absolute(socket)?,
        agents: format!("{agents_host}:{}", router.agents_address().port()),
        admin: router.admin_address().to_string(),
        key_file: std::path::absolute(user_key_file(keys_file))?,
        host,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::tests::endpoint;

    #[test]
    fn a_controller_that_lives_on_another_host_keeps_its_place_without_a_lock() {
        let place = tempfile::tempdir().unwrap();
        let folder = FleetFolder::at(&place.path().join("fleet")).unwrap();
        let find = || find_elsewhere(&folder, "login1").unwrap();
        assert_eq!(find(), None);
        let other = endpoint("login2", 7);
        folder.write_endpoint(&other).unwrap();
        assert_eq!(find(), Some(other.clone()));
        assert!(taken_place(Some(&other)).to_string().contains("already on login2, process 7"));
        folder.retire_endpoint(&other).unwrap();
        assert_eq!(find(), None, "it has ended");
        folder.write_endpoint(&endpoint("login1", 7)).unwrap();
        assert_eq!(find(), None, "here the lock says so");
    }

    #[test]
    fn the_port_of_a_former_controller_is_taken_again_where_it_is_free() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let taken = other.local_addr().unwrap().port();
        assert_eq!(free_port("127.0.0.1", Some(&format!("http://127.0.0.1:{taken}"))), 0);
        drop(other);
        assert_eq!(free_port("127.0.0.1", Some(&format!("http://127.0.0.1:{taken}"))), taken);
        assert_eq!([free_port("127.0.0.1", None), free_port("127.0.0.1", Some("login1"))], [0, 0]);
    }
}
