//! `hostler controller`: a router and, beside it, the loop that keeps the size of a fleet of batch
//! jobs. It runs on a login or service node, or in a batch job of its own.

mod leaving;
mod place;

use std::fs::File;
use std::net::TcpListener;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Instant, SystemTime};

use anyhow::{Context, bail, ensure};
use clap::Args;
use hostler_agent::AgentConfig;
use hostler_boot::listen::ListenError;
use hostler_boot::socket::SocketError;
use hostler_boot::{Settings, Shutdown};
use hostler_controller::{ClusterConfig, Controller, ControllerSetup, Endpoint, FleetFolder, JobSettings, ProgramFile, check_scheduler};
use hostler_router::{Router, RouterConfig, StartError, is_replaceable};
use hostler_tls::write_private;
use rustix::stdio::{dup2_stderr, dup2_stdout};
use tokio::runtime::Handle;
use tokio::time::sleep;

use self::leaving::wait_to_drain;
use self::place::{PLACE_PATIENCE, POLL_INTERVAL, take_place, wait_for_place};
use crate::AdjustRouter;
use crate::host_names::{certified_names, find_host_names, this_host};
use crate::router::{announce, keep_state, router_config};
use crate::settings::user_key_file;

#[derive(Debug, Args)]
pub(crate) struct ControllerArgs {
    /// In a session of its own, as `hostler up` starts it: it goes on when the terminal is closed.
    #[arg(long)]
    background: bool,
    /// In a batch job of its own, as `hostler up` submits it where cluster.controller is `job`: it
    /// waits for the place of the one before it.
    #[arg(long, conflicts_with = "background")]
    job: bool,
    /// Start it in the background unless it runs or nothing is wanted: for cron and timers, as
    /// `hostler init --service` makes them.
    #[arg(long, conflicts_with_all = ["background", "job"])]
    pub(crate) ensure: bool,
}

/// Runs both until nothing is wanted any more, or a signal ends them. In the latter case jobs run
/// on.
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
    let began = SystemTime::now();
    let config: ClusterConfig = settings.section("cluster")?;
    let scheduler = config.find_scheduler()?;
    let folder = FleetFolder::open(&config)?;
    check_scheduler(&folder, scheduler).await?;
    let agent: AgentConfig = settings.section("agent")?;
    let shutdown = Shutdown::new();
    let _signals = shutdown.install_signal_handlers(hostler_agent::signal_source(&agent))?;
    let own_job = if args.job { Some(enter_job(&folder)?) } else { None };
    let lock = match &own_job {
        None => tokio::select! {
            lock = take_place(&folder) => lock?,
            () = shutdown.wait_drain() => return Ok(()),
        },
        Some(job) => match wait_for_place(&folder, job, &shutdown).await? {
            Some(lock) => lock,
            None => return Ok(()),
        },
    };
    let former = folder.endpoint()?;
    let ports = if own_job.is_none() { former_ports(former.as_ref()).await } else { FormerPorts::IfFree };
    let mut configured = router_config(settings, adjust)?;
    keep_state(&mut configured, settings, Some(folder.path()));
    let router_config = configure_router(settings, configured, former.as_ref().map(|former| (former, ports)), own_job.is_some())?;
    let (authority, keys_file) = (std::path::absolute(&router_config.tls_dir)?, router_config.keys_file.clone());
    let drain_timeout = router_config.drain_timeout;
    let certifies = router_config.tls_cert.as_os_str().is_empty();
    hostler_boot::raise_file_limit();
    let router = match &own_job {
        None => bind_on_login_node(router_config, ports, &config).await?,
        Some(_) => tokio::select! {
            router = bind_in_job(router_config, &config) => router?,
            () = shutdown.wait_drain() => return Ok(()),
        },
    };
    let router = router.with_kill_grace(hostler_agent::read_kill_grace(&agent).await);
    let shown = certifies.then(|| authority.join("ca.crt"));
    let program = args.background.then(|| ProgramFile::of_this_process(env!("CARGO_PKG_VERSION"))).transpose()?;
    let endpoint = Endpoint { job: own_job, authority: shown, program, ..describe_endpoint(&router, &config, &keys_file)? };
    let endpoint = if endpoint.job.is_some() { open_to_other_hosts(endpoint, &router, &folder)? } else { endpoint };
    let controller = Controller::new(ControllerSetup {
        folder: folder.clone(),
        jobs: JobSettings {
            program: std::env::current_exe().context("this program does not know its own path")?,
            settings_file: file.map(std::path::absolute).transpose()?,
            engine_args: agent.engine_args.clone(),
            cluster: config,
        },
        scheduler,
        endpoint: endpoint.clone(),
        authority,
        predecessor: former.and_then(|former| former.job),
        began,
        drain_timeout,
    })?;
    announce(&router);
    let place = router.place();
    folder.write_endpoint(&endpoint)?;
    let mut routing = tokio::spawn(router.run(shutdown.clone()));
    let (runtime, ends) = (Handle::current(), shutdown.clone());
    // A hanging file system stops only this thread.
    let mut keeping = tokio::task::spawn_blocking(move || runtime.block_on(controller.run(ends)));
    tokio::select! {
        ended = &mut routing => {
            shutdown.drain();
            keeping.await?;
            Ok(ended??)
        }
        kept = &mut keeping => {
            // The next controller need not wait for this one's last answers.
            drop(lock);
            wait_to_drain(kept?, &place, &shutdown).await;
            shutdown.drain();
            Ok(routing.await??)
        }
    }
}

/// The batch job of this process. It logs to the log of every controller of the fleet, because a
/// scheduler shows a job's output late, if at all.
fn enter_job(folder: &FleetFolder) -> anyhow::Result<String> {
    let job = hostler_agent::current_job_id().context("this is no batch job, which --job is for: `hostler up` submits one")?;
    let path = folder.controller_log();
    let log = File::options().create(true).append(true).mode(0o600).open(&path);
    let log = log.with_context(|| format!("cannot write {}", path.display()))?;
    dup2_stdout(&log).and_then(|()| dup2_stderr(&log)).with_context(|| format!("cannot log to {}", path.display()))?;
    Ok(job)
}

/// Names by which clients may reach this host.
async fn host_names(cluster: &ClusterConfig) -> Vec<String> {
    let mut names = find_host_names().await;
    names.extend(Some(cluster.router_host.clone()).filter(|name| !name.is_empty()));
    certified_names(&names)
}

/// A router whose clients share this host with other users. It takes the place of the former one if
/// that is still here.
async fn bind_on_login_node(router: RouterConfig, former: FormerPorts, cluster: &ClusterConfig) -> Result<Router, StartError> {
    let names = host_names(cluster).await;
    match former {
        FormerPorts::Taken => Router::follow_on_shared_host(router, &names).await,
        FormerPorts::IfFree => Router::bind_on_shared_host(router, &names).await,
    }
}

/// A router whose clients and operators are on other hosts, with TLS throughout.
async fn bind_in_job(router: RouterConfig, cluster: &ClusterConfig) -> anyhow::Result<Router> {
    let (names, began) = (host_names(cluster).await, Instant::now());
    let router = loop {
        match Router::bind_for_other_hosts(router.clone(), &names).await {
            // The router of the job before this one may still drain on this host, and holds
            // configured ports as long as that takes.
            Err(error) if is_in_use(&error) && began.elapsed() < PLACE_PATIENCE => sleep(POLL_INTERVAL).await,
            bound => break bound?,
        }
    };
    let is_reached = !router.edge_address().ip().is_loopback() && !router.admin_address().ip().is_loopback();
    ensure!(
        is_reached,
        "no other host reaches a loopback address: leave router.listen and router.admin_listen out for a controller in a job"
    );
    Ok(router)
}

/// Whether another process has a port or the socket.
fn is_in_use(error: &StartError) -> bool {
    matches!(
        error,
        StartError::Listen(ListenError::InUse { .. })
            | StartError::Replaceable(ListenError::InUse { .. })
            | StartError::Socket(SocketError::InUse { .. })
    )
}

/// Completes the endpoint with addresses that are valid on every host, and writes the key for
/// operators.
fn open_to_other_hosts(endpoint: Endpoint, router: &Router, folder: &FleetFolder) -> anyhow::Result<Endpoint> {
    write_private(&folder.operator_key(), format!("{}\n", router.operator_key().reveal()).as_bytes())?;
    let (host, _) = endpoint.agents.rsplit_once(':').unwrap_or((&endpoint.host, ""));
    Ok(Endpoint {
        edge: format!("{}://{host}:{}", router.edge_scheme(), router.edge_address().port()),
        admin: format!("{host}:{}", router.admin_address().port()),
        ..endpoint
    })
}

/// Fate of a former controller's ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FormerPorts {
    IfFree,
    /// The former router still has them, and gives them up.
    Taken,
}

/// Whether the former controller's router is still on this host and gives up its place.
async fn former_ports(former: Option<&Endpoint>) -> FormerPorts {
    match former.filter(|former| former.job.is_none() && former.host == this_host()) {
        Some(former) if is_replaceable(&former.operators_socket).await => FormerPorts::Taken,
        _ => FormerPorts::IfFree,
    }
}

/// The router's settings, with free ports unless set. A former controller's ports are used again,
/// because clients have its address.
fn configure_router(
    settings: &Settings,
    mut config: RouterConfig,
    former: Option<(&Endpoint, FormerPorts)>,
    is_in_job: bool,
) -> anyhow::Result<RouterConfig> {
    if config.tls_dir.as_os_str().is_empty() {
        bail!("jobs have no authority to join by (router.tls_dir): run `hostler init` first");
    }
    if config.keys_file.as_os_str().is_empty() {
        bail!("every user of this host reaches the fleet, and there are no keys (router.keys_file): run `hostler init` first");
    }
    if is_in_job && !config.tls_cert.as_os_str().is_empty() {
        bail!(
            "router.tls_cert is a certificate for another host than the job's: leave router.tls_cert and router.tls_key out, and the fleet's authority \
             certifies each host on which the controller runs"
        );
    }
    let own = if is_in_job { "0.0.0.0" } else { "127.0.0.1" };
    let addresses = [
        ("listen", &mut config.listen, own, former.map(|(former, _)| &former.edge)),
        ("agents_listen", &mut config.agents_listen, "0.0.0.0", former.map(|(former, _)| &former.agents)),
        ("admin_listen", &mut config.admin_listen, own, former.map(|(former, _)| &former.admin)),
    ];
    for (setting, address, host, known) in addresses {
        if !settings.is_set("router", setting) {
            let known = known.map(String::as_str);
            let is_taken = former.is_some_and(|(_, ports)| ports == FormerPorts::Taken);
            let port = if is_taken { known.and_then(port_of).unwrap_or(0) } else { free_port(host, known) };
            *address = format!("{host}:{port}");
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

/// Port at the end of an address or URL.
fn port_of(address: &str) -> Option<u16> {
    address.rsplit_once(':')?.1.parse().ok()
}

fn describe_endpoint(router: &Router, config: &ClusterConfig, keys_file: &Path) -> anyhow::Result<Endpoint> {
    let socket = router.operators_socket().context(
        "there is no folder for the socket by which the controller asks the router: set router.operators_socket to a path in a folder that is yours alone",
    )?;
    let host = this_host();
    let edge = router.edge_address();
    // Not `localhost`: another user could listen on its other address on this host, which clients
    // may try first.
    let loopback = edge.ip().to_string();
    let edge_host = if edge.ip().is_loopback() { &loopback } else { &host };
    let agents_host = if config.router_host.is_empty() { &host } else { &config.router_host };
    Ok(Endpoint {
        pid: std::process::id(),
        job: None,
        authority: None,
        program: None,
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

    #[test]
    fn a_former_controllers_port_is_reused_when_free() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let taken = other.local_addr().unwrap().port();
        assert_eq!(free_port("127.0.0.1", Some(&format!("http://127.0.0.1:{taken}"))), 0);
        drop(other);
        assert_eq!(free_port("127.0.0.1", Some(&format!("http://127.0.0.1:{taken}"))), taken);
        assert_eq!([free_port("127.0.0.1", None), free_port("127.0.0.1", Some("login1"))], [0, 0]);
    }
}
