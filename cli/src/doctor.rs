//! `hostler doctor`: finds what keeps a model from being served here: by batch jobs, on a login
//! node or inside a job, or from this machine where no scheduler is.
//!
//! This module queries the host with deadlines; `findings` and `machine` interpret the answers.

mod findings;
mod machine;

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::io::{ErrorKind, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::bail;
use clap::Args;
use hostler_agent::{AgentConfig, EngineKind, EngineProgram, VllmInImage};
use hostler_boot::Settings;
use hostler_boot::program::run_to_end;
use hostler_cluster::{FleetEntry, FleetSize};
use hostler_controller::{ClusterConfig, ControllerPlace, FleetFolder, JobProgram, build_submission, check_scheduler};
use hostler_proto::fleet::v1::FleetFinding;
use hostler_router::RouterConfig;
use hostler_router::keys::{Secret, read_private};
use hostler_scheduler::{NoScheduler, Scheduler};
use hostler_tls::Authority;
use rustix::process::{Resource, getrlimit};
use tokio::process::Command;
use tokio::time::timeout;

pub(crate) use self::findings::CheckResult;
use self::findings::{HostFacts, InstalledEngine, Verdict, examine};
use self::machine::{MachineEngine, MachineFacts, examine_machine};
use crate::admin::{connect_to_fleet, list_fleet};
use crate::controller_service::find_service;
use crate::fleet_state::has_jobs;
use crate::host_names::this_host;
use crate::local_fleet::{LocalFleet, find_local_fleets, find_other_routers};
use crate::output::{describe, say};
use crate::settings::user_key_file;

/// Deadline of a login shell, which may load modules from a busy file system.
const SHELL_TIMEOUT: Duration = Duration::from_secs(60);

/// Deadline of reading files, which may be on a file system that is away.
const FILE_TIMEOUT: Duration = Duration::from_secs(20);

/// Deadline of the driver: that of a failed GPU may never answer.
const DRIVER_TIMEOUT: Duration = Duration::from_secs(30);

/// Deadline of the fleet's router. A host that cannot reach it waits no longer for its findings.
const ROUTER_TIMEOUT: Duration = Duration::from_secs(5);

/// A walltime that every queue takes.
const SHORT_WALLTIME: Duration = Duration::from_secs(600);

/// A name that no job has: the scheduler only has to answer.
const ASKED_NAME: &str = "hostler-doctor";

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// The model that is to be served, instead of `agent.model`: a folder or a Hugging Face id.
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
}

/// Prints the findings; fails if one is a problem.
pub(crate) async fn doctor(settings: &Settings, args: &DoctorArgs) -> anyhow::Result<()> {
    let findings = examine_host(settings, args.model.as_deref()).await?;
    findings.iter().flat_map(CheckResult::lines).for_each(|line| say(&line));
    match findings.iter().filter(|finding| finding.verdict == Verdict::Problem).count() {
        0 => Ok(()),
        1 => bail!("one problem was found"),
        several => bail!("{several} problems were found"),
    }
}

/// Examines this host, with this model instead of that of the settings.
pub(crate) async fn examine_host(settings: &Settings, model: Option<&str>) -> anyhow::Result<Vec<CheckResult>> {
    let (router, cluster): (RouterConfig, ClusterConfig) = (settings.section("router")?, settings.section("cluster")?);
    let mut agent: AgentConfig = settings.section("agent")?;
    if let Some(model) = model {
        agent.model = model.to_owned();
    }
    let up = find_local_fleets().await;
    if is_one_machine(&cluster, !up.is_empty())? {
        return Ok(examine_machine(&gather_machine(&router, &agent, up).await));
    }
    let mut findings = examine(&gather(&router, &agent, &cluster).await);
    // That of a fleet of jobs is its controller's. A folder that cannot be read is a finding
    // already.
    let is_without_jobs = FleetFolder::find(&cluster).is_ok_and(|folder| has_jobs(folder.as_ref()).is_ok_and(|jobs| !jobs));
    if is_without_jobs {
        findings.extend(find_other_routers().await.iter().map(|router| CheckResult::note("up", router.describe())));
    }
    Ok(findings)
}

/// Whether models are served from this machine alone: nothing says that jobs do, and something is
/// up here or there is no scheduler.
fn is_one_machine(cluster: &ClusterConfig, is_up: bool) -> anyhow::Result<bool> {
    if !cluster.scheduler.is_empty() || hostler_agent::current_job_name().is_some() || has_jobs(FleetFolder::find(cluster)?.as_ref())? {
        return Ok(false);
    }
    Ok(is_up || matches!(Scheduler::find(), Err(NoScheduler::Absent { .. })))
}

async fn gather_machine(router: &RouterConfig, agent: &AgentConfig, up: Vec<LocalFleet>) -> MachineFacts {
    let engine = match hostler_agent::check_engine(agent) {
        Ok(EngineProgram::Vllm { container: Some(_), .. }) => try_image(agent).await.map(MachineEngine::Vllm),
        Ok(EngineProgram::Vllm { program, .. }) => Ok(MachineEngine::Vllm(program.display().to_string())),
        Ok(EngineProgram::Simulated { .. }) => Ok(MachineEngine::Simulated),
        Ok(EngineProgram::Attached { .. }) => Ok(MachineEngine::Attached),
        Err(error) if error.lacks_model() => Ok(MachineEngine::NoModel),
        Err(error) => Err(describe(&error.into())),
    };
    let needs_gpus = matches!(engine, Ok(MachineEngine::Vllm(_) | MachineEngine::NoModel));
    let is_named = !agent.model.is_empty() && needs_gpus;
    let addresses = [("--listen", &router.listen), ("--admin-listen", &router.admin_listen)];
    MachineFacts {
        stage: ask_stage(agent, !agent.stage.is_empty()).await,
        up,
        others: find_other_routers().await,
        taken: addresses.into_iter().filter(|(_, address)| is_taken(address)).map(|(flag, address)| (flag, address.clone())).collect(),
        gpus: ask_driver(agent, needs_gpus).await,
        model: is_named.then(|| hostler_agent::check_model(agent, |name| std::env::var_os(name)).map_err(|error| describe(&error.into()))),
        engine,
        proxy: set_proxy(),
        no_proxy: set_no_proxy(),
        run_dir: hostler_agent::check_run_dir(agent).map_err(|error| describe(&error.into())),
        router_socket: router_socket(router),
    }
}

/// Whether another program listens there.
fn is_taken(address: &str) -> bool {
    TcpListener::bind(address).is_err_and(|error| error.kind() == ErrorKind::AddrInUse)
}

fn set_proxy() -> Option<(&'static str, String)> {
    ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"].into_iter().find_map(|name| Some((name, set_variable(name)?)))
}

fn set_no_proxy() -> String {
    set_variable("no_proxy").or_else(|| set_variable("NO_PROXY")).unwrap_or_default()
}

async fn gather(router: &RouterConfig, agent: &AgentConfig, cluster: &ClusterConfig) -> HostFacts {
    let job = hostler_agent::current_job_name();
    let ((engine, model), scheduler, files, gpus) = tokio::join!(
        ask_shell(agent, cluster),
        ask_scheduler(cluster),
        ask_files(router.clone(), cluster.clone()),
        ask_driver(agent, job.is_some())
    );
    let (fleet, folder, clock_ahead) = files;
    let other_scheduler = match (&scheduler, &folder) {
        (Ok(scheduler), Ok(folder)) => check_scheduler(folder, *scheduler).await.err().map(|error| error.to_string()),
        _ => None,
    };
    let keeps_controller = job.is_none() && cluster.controller == ControllerPlace::Login;
    let service = match &folder {
        Ok(folder) if keeps_controller => Some(find_service(folder).await),
        _ => None,
    };
    let obstacle = match (&scheduler, &folder) {
        (Ok(scheduler), Ok(folder)) if job.is_none() => find_obstacle(*scheduler, cluster, folder).await,
        _ => None,
    };
    let router_findings = match &folder {
        Ok(folder) => timeout(ROUTER_TIMEOUT, ask_router(folder)).await.ok().flatten().unwrap_or_default(),
        Err(_) => Vec::new(),
    };
    let state = folder.map(|folder| folder.path().to_owned());
    HostFacts {
        stage: ask_stage(agent, job.is_some()).await,
        router_findings,
        obstacle,
        service,
        scheduler,
        fleet,
        state,
        other_scheduler,
        process_limit: if keeps_controller { find_process_limit() } else { None },
        clock_ahead,
        proxy: set_proxy(),
        no_proxy: set_no_proxy(),
        engine,
        model,
        run_dir: hostler_agent::check_run_dir(agent).map_err(|error| describe(&error.into())),
        router_socket: router_socket(router),
        gpus,
        job,
    }
}

/// What the router of the fleet finds wrong; `None` if none runs that this host reaches, of which
/// `hostler ps` says more.
async fn ask_router(folder: &FleetFolder) -> Option<Vec<FleetFinding>> {
    let endpoint = folder.endpoint().ok().flatten().filter(|endpoint| endpoint.job.is_some() || endpoint.host == this_host())?;
    let mut router = connect_to_fleet(folder, &endpoint).await.ok()?;
    Some(list_fleet(&mut router).await.ok()?.findings)
}

/// Why no node could run a job with these settings; `None` if one could, or the scheduler does not
/// say.
async fn find_obstacle(scheduler: Scheduler, cluster: &ClusterConfig, folder: &FleetFolder) -> Option<String> {
    let entry = FleetEntry {
        name: "doctor".to_owned(),
        model: "doctor".to_owned(),
        size: FleetSize::Fixed(1),
        walltime: SHORT_WALLTIME,
        engine_args: Vec::new(),
        nodes_per_replica: 1,
        queue: String::new(),
        account: String::new(),
        resources: String::new(),
        budget: hostler_cluster::Budget::default(),
        asked: 0,
    };
    let program = JobProgram { program: Path::new("hostler"), config: None };
    scheduler.find_obstacle(&build_submission(&entry, 1, cluster, folder, &program)).await.ok().flatten()
}

fn set_variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Rule that ends users' processes here, as far as a user can see it. A site may have other means.
fn find_process_limit() -> Option<String> {
    if let Some(seconds) = getrlimit(Resource::Cpu).current {
        return Some(format!("after {} of CPU time, `ulimit -t`", humantime::format_duration(Duration::from_secs(seconds))));
    }
    let dropped = fs::read_dir("/etc/systemd/logind.conf.d").into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let files = std::iter::once(PathBuf::from("/etc/systemd/logind.conf")).chain(dropped);
    files.filter_map(|file| fs::read_to_string(file).ok()).any(|text| kills_at_logout(&text)).then(|| "at logout, logind.conf".to_owned())
}

fn kills_at_logout(text: &str) -> bool {
    let is_on = |value: &str| ["yes", "true", "on", "1"].contains(&value.trim());
    text.lines().filter_map(|line| line.trim().strip_prefix("KillUserProcesses=")).any(is_on)
}

/// Path of the router's socket, with the longest port.
fn router_socket(router: &RouterConfig) -> PathBuf {
    if !router.operators_socket.as_os_str().is_empty() {
        return std::path::absolute(&router.operators_socket).unwrap_or_else(|_| router.operators_socket.clone());
    }
    let folder = hostler_boot::home::run_dirs().into_iter().next().unwrap_or_else(hostler_boot::home::fallback_run_dir);
    folder.join("router-65535.sock")
}

async fn ask_scheduler(cluster: &ClusterConfig) -> Result<Scheduler, String> {
    let named = if cluster.scheduler.is_empty() {
        Scheduler::find().map_err(|error| match error {
            NoScheduler::Ambiguous => format!("{error} with cluster.scheduler"),
            NoScheduler::Absent { .. } => error.to_string(),
        })
    } else {
        cluster.scheduler.parse().map_err(|error| format!("cluster.scheduler: {error}"))
    };
    let scheduler = named?;
    let listed = scheduler.list(ASKED_NAME).await;
    listed.map_err(|error| format!("{error}; run this where jobs are submitted, or ask the site's support"))?;
    Ok(scheduler)
}

/// The fleet's setup, the state folder, and how many seconds this host's clock is ahead of that
/// folder's file server.
type FileAnswers = (Result<PathBuf, String>, Result<FleetFolder, String>, Option<i64>);

async fn ask_files(router: RouterConfig, cluster: ClusterConfig) -> FileAnswers {
    let written = tokio::task::spawn_blocking(move || {
        let fleet = check_fleet(&router).map_err(|error| describe(&error));
        let folder = FleetFolder::open(&cluster).map_err(|error| error.to_string());
        let clock_ahead = folder.as_ref().ok().and_then(|folder| compare_clocks(folder.path()));
        (fleet, folder, clock_ahead)
    });
    let late = || format!("its files do not answer within {} s: tell the site's support", FILE_TIMEOUT.as_secs());
    match timeout(FILE_TIMEOUT, written).await {
        Ok(answers) => answers.expect("looking at files does not panic"),
        Err(_) => (Err(late()), Err(late()), None),
    }
}

fn check_fleet(router: &RouterConfig) -> anyhow::Result<PathBuf> {
    if router.tls_dir.as_os_str().is_empty() || router.keys_file.as_os_str().is_empty() {
        bail!("no fleet is set up (router.tls_dir and router.keys_file): `hostler init` makes one");
    }
    Authority::load(&router.tls_dir)?;
    let key = user_key_file(&router.keys_file);
    if read_private(&key)?.trim().parse::<Secret>().is_err() {
        bail!("{} holds no key: move it away, and `hostler init` makes another", key.display());
    }
    Ok(router.tls_dir.clone())
}

/// Compares this host's clock with that of the file server, which dates a new file if there is one.
fn compare_clocks(folder: &Path) -> Option<i64> {
    let mut file = tempfile::NamedTempFile::new_in(folder).ok()?;
    file.write_all(b"clock").and_then(|()| file.as_file().sync_all()).ok()?;
    let written = file.as_file().metadata().ok()?.modified().ok()?;
    let seconds = |time: Duration| i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    Some(match SystemTime::now().duration_since(written) {
        Ok(ahead) => seconds(ahead),
        Err(behind) => -seconds(behind.duration()),
    })
}

/// Asks for engine and model as a job would: in a login shell, after the site's lines.
async fn ask_shell(agent: &AgentConfig, cluster: &ClusterConfig) -> (InstalledEngine, Option<Result<Option<String>, String>>) {
    const VARIABLES: [&str; 5] = ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"];
    if agent.engine == EngineKind::Simulated {
        return (InstalledEngine::Simulated, None);
    }
    let runtimes = hostler_agent::container_runtimes(agent);
    let needs_container = !runtimes.is_empty();
    let programs = if needs_container { runtimes } else { vec![agent.vllm_bin.clone()] };
    let names: Vec<_> = programs.iter().map(|program| program.display().to_string()).collect();
    let quoted = names.iter().filter_map(|name| shlex::try_quote(name).ok());
    let lookup = quoted.map(|name| format!("command -v {name}")).collect::<Vec<_>>().join(" || ");
    let values = VARIABLES.map(|name| format!("\"${{{name}-}}\"")).join(" ");
    let mut lines = cluster.setup.clone();
    lines.push(format!("printf '\\n%s' {values} \"$({lookup})\""));
    let mut command = Command::new("bash");
    command.args(["-lc", &lines.join("\n")]);
    let ended = run_to_end(command, &[], SHELL_TIMEOUT).await;
    let (printed, error) = match &ended {
        Ok(Some(output)) => (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Ok(None) => ("".into(), format!("a login shell with cluster.setup did not end within {} s", SHELL_TIMEOUT.as_secs())),
        Err(error) => ("".into(), format!("cannot run bash: {error}")),
    };
    // The shell's own output comes before the answer.
    let last: Vec<&str> = printed.rsplit('\n').take(VARIABLES.len() + 1).collect();
    let found = last.first().filter(|path| !path.is_empty()).map(|path| (*path).to_owned());
    let engine = match found {
        Some(runtime) if needs_container => {
            let config = AgentConfig { container: runtime.into(), ..agent.clone() };
            try_image(&config).await.map_or_else(InstalledEngine::Refused, InstalledEngine::Vllm)
        }
        Some(path) => InstalledEngine::Vllm(path),
        None if needs_container => InstalledEngine::NoRuntime(names),
        None => InstalledEngine::Missing { program: names.concat(), error: error.lines().last().unwrap_or_default().to_owned() },
    };
    let seen: HashMap<&str, OsString> = VARIABLES.into_iter().rev().zip(last.iter().skip(1).map(OsString::from)).collect();
    let model = (!agent.model.is_empty())
        .then(|| hostler_agent::check_model(agent, |name| seen.get(name).cloned()).map_err(|error| describe(&error.into())));
    (engine, model)
}

/// Asks the vLLM in the image of the settings who it is; an error says what to do.
async fn try_image(agent: &AgentConfig) -> Result<String, String> {
    match hostler_agent::try_image(agent).await {
        Ok(Some(VllmInImage { version, image, runtime })) => {
            Ok(format!("vLLM {version} in {}, which {} runs", image.display(), runtime.display()))
        }
        Ok(None) => Err("the settings name no image".to_owned()),
        Err(error) => Err(describe(&error.into())),
    }
}

/// Where models are copied to on this host, if that is of interest.
async fn ask_stage(agent: &AgentConfig, is_asked: bool) -> Option<Result<String, String>> {
    let agent = agent.clone();
    let looked = is_asked.then(|| tokio::task::spawn_blocking(move || hostler_agent::describe_stage(&agent)))?;
    let late = || format!("a file system of this host does not answer within {} s", FILE_TIMEOUT.as_secs());
    Some(timeout(FILE_TIMEOUT, looked).await.map_or_else(|_| Err(late()), |found| found.expect("looking at places does not panic")))
}

/// GPUs of this host, where engines run on it; a login node needs none.
async fn ask_driver(agent: &AgentConfig, runs_engines: bool) -> Option<Result<Vec<String>, String>> {
    if !runs_engines || agent.engine == EngineKind::Simulated {
        return None;
    }
    Some(match timeout(DRIVER_TIMEOUT, hostler_agent::find_gpus(agent)).await {
        Ok(Ok(found)) => found.map(|gpus| gpus.into_iter().map(|gpu| gpu.name).collect()),
        Ok(Err(error)) => Err(describe(&error.into())),
        Err(_) => {
            Err(format!("the driver does not answer within {} s: whoever keeps this host has to look after it", DRIVER_TIMEOUT.as_secs()))
        }
    })
}
