//! Command line of one engine: program, arguments and environment for a vLLM of a given version, or
//! for the simulated engine.
//!
//! This module is pure; the process is created elsewhere.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use super::arguments::{EngineArguments, expand_config_file, value_of, without_server_flags};
use super::directory::{socket_path, temporary_path};
use super::flag::{EXECUTOR_FLAG, FlagChoice, FlagOrigin, SCALE_OUT_FLAG, SCALE_OUT_ROUTES};
use super::front_end::FrontEndInUse;
use super::plugin;
use super::releases::{CACHE_EVENTS_SINCE, GPU_UUID_SINCE};
use super::traces::{TRACES_ENVIRONMENT, TRACES_FLAG};
use super::version::VllmVersion;
use crate::cache::KvEventSource;
use crate::config::{AgentConfig, Profile};
use crate::container::{Container, NO_USER_PACKAGES, OF_THE_HOST};
use crate::host::{EngineProgram, HostError, ReplicaPlan};
use crate::process::ENGINE_OF;

/// Model of the simulated engine if none is named.
pub const SIMULATED_MODEL: &str = "simulated";

/// Cache messages, one per step, that an engine keeps to send again if some were missed.
///
/// This is vLLM's own default.
const REPLAY_BUFFER_EVENTS: u32 = 10_000;

/// How long vLLM keeps an idle connection, in seconds.
///
/// Its default of 5 would close pooled connections just as they are used.
const KEEP_ALIVE_SECONDS: &str = "3600";

/// Variable that unlocks the engine's routes for sleeping, among others.
const SLEEP_ROUTES_VARIABLE: &str = "VLLM_SERVER_DEV_MODE";

/// Variable that selects vLLM's Rust front-end. Releases without one do not read it.
const RUST_FRONT_END_VARIABLE: &str = "VLLM_USE_RUST_FRONTEND";

/// Arguments that only the agent may give.
const RESERVED_ARGUMENTS: [(&str, &str); 17] = [
    ("--uds", "the agent gives each engine a socket of its own"),
    ("--api-key", "an engine is reachable through the agent only; guard the router instead"),
    ("--ssl-keyfile", "the engine's socket never leaves this host; encrypt at the router"),
    ("--ssl-certfile", "the engine's socket never leaves this host; encrypt at the router"),
    ("--headless", "the agent decides which part of an engine serves; use --member"),
    ("--grpc", "the agent needs an engine that serves HTTP"),
    ("--tensor-parallel-size", "the agent shares out the GPUs; use --tp"),
    ("-tp", "the agent shares out the GPUs; use --tp"),
    ("--pipeline-parallel-size", "the agent makes as many stages as --tp and --nodes-per-replica leave"),
    ("-pp", "the agent makes as many stages as --tp and --nodes-per-replica leave"),
    ("--nnodes", "the agents of the nodes start the parts of an engine together; use --nodes-per-replica"),
    ("--node-rank", "the agent gives each part its number; use --member"),
    ("--master-addr", "the agents say where the parts of an engine meet; use --head"),
    ("--master-port", "the agents choose a free port for each start; use --head"),
    ("--device-ids", "the agent shares out the GPUs; use --replicas and CUDA_VISIBLE_DEVICES"),
    ("--data-parallel-size", "the agent runs one engine per replica; use --replicas"),
    ("-dp", "the agent runs one engine per replica; use --replicas"),
];

/// Inherited variables that would change an engine although nobody asked for it: a port from
/// Kubernetes, a key that locks the agent out, a key for operators.
///
/// `CUDA_VISIBLE_DEVICES` is kept if the agent sets none, because it may be a scheduler's limit.
const NOT_INHERITED: [&str; 3] = ["VLLM_PORT", "VLLM_API_KEY", "HOSTLER_ADMIN_KEY"];

/// Inputs of the command line.
#[derive(Debug, Clone, Copy)]
pub struct LaunchContext<'a> {
    pub engine: &'a EngineProgram,
    /// Version of vLLM; unknown counts as older than every release.
    pub version: Option<VllmVersion>,
    pub replica: &'a ReplicaPlan,
    /// CPU cores for an engine without a GPU that shares this host with other engines.
    ///
    /// `None` leaves the whole host to it.
    pub cores: Option<u32>,
    /// GiB of memory for the KV cache of an engine without a GPU; `None` leaves the choice to the
    /// engine.
    pub kv_cache_gib: Option<u64>,
    /// Directory of the engine, see `RunDir::engine`.
    pub directory: &'a Path,
    pub config: &'a AgentConfig,
    pub choices: &'a [FlagChoice],
    pub front_end: FrontEndInUse,
    /// The agent's own `PYTHONPATH`; empty if it has none.
    pub python_path: &'a OsStr,
    /// Where Python writes the bytecode that vLLM's own folders lack; `None` leaves it to Python.
    pub bytecode_cache: Option<&'a Path>,
}

impl LaunchContext<'_> {
    fn container(&self) -> Option<&Container> {
        match self.engine {
            EngineProgram::Vllm { container, .. } => container.as_ref(),
            EngineProgram::Simulated { .. } | EngineProgram::Attached { .. } => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandLine {
    /// Words before the program: the runtime of a container; empty without one.
    pub container: Vec<OsString>,
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    pub set: Vec<(&'static str, OsString)>,
    /// Variables that are not passed on unless `set` names them.
    pub unset: Vec<&'static str>,
    /// Routes that the engine has for routers alone, because the agent has turned them on.
    pub withheld_routes: &'static [&'static str],
}

impl CommandLine {
    /// Whether the command starts the engine with the routes for sleeping.
    #[must_use]
    pub(crate) fn unlocks_sleep(&self) -> bool {
        self.set_variable(SLEEP_ROUTES_VARIABLE).is_some()
    }

    /// Whether the engine should load the agent's plugin.
    #[must_use]
    pub(crate) fn has_plugin(&self) -> bool {
        self.set_variable(plugin::SWITCH_INTERVAL_VARIABLE).is_some()
    }

    /// Front-end with which the command starts the engine.
    #[must_use]
    pub fn front_end(&self) -> FrontEndInUse {
        match self.set_variable(RUST_FRONT_END_VARIABLE).is_some_and(|value| value == "1") {
            true => FrontEndInUse::Rust,
            false => FrontEndInUse::Python,
        }
    }

    fn set_variable(&self, name: &str) -> Option<&OsStr> {
        self.set.iter().find(|(set, _)| *set == name).map(|(_, value)| value.as_os_str())
    }
}

/// Sockets to which the engine sends KV events.
///
/// They are Unix sockets in its own directory, where no other user of the host can read prompts in
/// the events or forge them.
pub fn cache_source(launch: &LaunchContext<'_>) -> KvEventSource {
    match cache_events_obstacle(launch) {
        Some(because) => KvEventSource::Nothing { because },
        None => KvEventSource::Sockets { live: launch.directory.join("kv.sock"), replay: launch.directory.join("replay.sock") },
    }
}

fn cache_events_obstacle(launch: &LaunchContext<'_>) -> Option<String> {
    let given = EngineArguments(&launch.config.engine_args);
    if launch.config.member > 0 {
        return Some("the head's part of the engine tells what is cached".to_owned());
    }
    if !launch.config.kv_events {
        return Some("cache events are off: the setting agent.kv_events says so".to_owned());
    }
    if given.has("--kv-events-config") {
        return Some("the engine's arguments have a --kv-events-config of their own".to_owned());
    }
    if given.negates("--enable-prefix-caching") {
        return Some("the engine keeps no cache: its arguments have --no-enable-prefix-caching".to_owned());
    }
    if launch.directory.to_str().is_none() {
        return Some("the run directory's name is not UTF-8, so the engine cannot be told where to send cache events".to_owned());
    }
    match (launch.engine, launch.version) {
        (EngineProgram::Attached { .. }, _) => {
            Some("not ours: attached to an engine that runs already, whose cache events are not known".to_owned())
        }
        (EngineProgram::Vllm { .. }, None) => Some("the version of vLLM is unknown, so its cache events are not asked for".to_owned()),
        (EngineProgram::Vllm { .. }, Some(version)) if version < CACHE_EVENTS_SINCE => {
            Some(format!("vLLM {version} has no cache events that are understood; {CACHE_EVENTS_SINCE} is the first that has"))
        }
        _ => None,
    }
}

/// Flag that makes the engine send KV events, if they are enabled.
fn cache_event_arguments(launch: &LaunchContext<'_>) -> Vec<OsString> {
    let KvEventSource::Sockets { live, replay } = cache_source(launch) else { return Vec::new() };
    let config = serde_json::json!({
        "enable_kv_cache_events": true,
        "publisher": "zmq",
        "endpoint": format!("ipc://{}", live.display()),
        "replay_endpoint": format!("ipc://{}", replay.display()),
        "topic": "",
        "buffer_steps": REPLAY_BUFFER_EVENTS,
    });
    vec!["--kv-events-config".into(), config.to_string().into()]
}

/// Creates the command line for one engine.
///
/// Fails if the configured engine arguments contain one that only the agent may give.
pub fn command_line(launch: &LaunchContext<'_>) -> Result<CommandLine, HostError> {
    let given = expand_config_file(&launch.config.engine_args);
    check_reserved(&EngineArguments(&given))?;
    if let EngineProgram::Attached { program, targets } = launch.engine {
        let target = targets.get(launch.replica.index as usize).map(ToString::to_string).unwrap_or_default();
        let mut arguments = vec!["bridge".into(), target.into(), "--uds".into(), socket_path(launch.directory).into()];
        let key_file = &launch.config.attach_key_file;
        if !key_file.as_os_str().is_empty() {
            // The bridge may have another working directory.
            let key_file = std::path::absolute(key_file).unwrap_or_else(|_| key_file.clone());
            arguments.extend(["--key-file".into(), key_file.into()]);
        }
        return Ok(CommandLine {
            container: Vec::new(),
            program: program.clone(),
            arguments,
            set: Vec::new(),
            unset: NOT_INHERITED.to_vec(),
            withheld_routes: &[],
        });
    }
    let (program, mut arguments) = match launch.engine {
        EngineProgram::Vllm { program, .. } => (program, vllm_arguments(launch)),
        EngineProgram::Simulated { program } | EngineProgram::Attached { program, .. } => (program, simulated_arguments(launch)),
    };
    arguments.extend(launch.choices.iter().flat_map(FlagChoice::to_arguments).map(OsString::from));
    arguments.append(&mut cache_event_arguments(launch));
    arguments.extend(own_arguments(launch.config).iter().map(OsString::from));
    let opens_routes = launch.choices.iter().any(|choice| choice.flag == SCALE_OUT_FLAG && choice.origin == FlagOrigin::Hostler);
    let withheld_routes: &[&str] = if opens_routes { &SCALE_OUT_ROUTES } else { &[] };
    let container = launch.container();
    let mut unset = NOT_INHERITED.to_vec();
    unset.extend(container.iter().flat_map(|_| OF_THE_HOST));
    Ok(CommandLine {
        container: container.map(Container::words).unwrap_or_default(),
        program: program.clone(),
        arguments,
        set: environment(launch, &given)?,
        unset,
        withheld_routes,
    })
}

fn vllm_arguments(launch: &LaunchContext<'_>) -> Vec<OsString> {
    let mut arguments = vec!["serve".into(), launch.config.model.clone().into()];
    arguments.append(&mut place_arguments(launch));
    arguments
}

/// The user's arguments for this node's part of an engine.
fn own_arguments(config: &AgentConfig) -> Vec<String> {
    if config.member > 0 { without_server_flags(&config.engine_args) } else { config.engine_args.clone() }
}

/// Where the engine serves; a part of another node's engine serves nowhere.
fn place_arguments(launch: &LaunchContext<'_>) -> Vec<OsString> {
    match launch.config.member {
        0 => vec!["--uds".into(), socket_path(launch.directory).into()],
        _ => vec!["--headless".into()],
    }
}

fn simulated_arguments(launch: &LaunchContext<'_>) -> Vec<OsString> {
    let model = match launch.config.model.as_str() {
        "" => SIMULATED_MODEL,
        model => model,
    };
    let mut arguments = vec!["sim".into(), "engine".into(), model.into()];
    arguments.append(&mut place_arguments(launch));
    arguments
}

/// Environment of the engine. `all_given` are the user's arguments with those of their file.
fn environment(launch: &LaunchContext<'_>, all_given: &[String]) -> Result<Vec<(&'static str, OsString)>, HostError> {
    let mut set: Vec<(&'static str, OsString)> = vec![
        (ENGINE_OF, launch.directory.into()),
        ("TMPDIR", temporary_path(launch.directory).into()),
        ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", KEEP_ALIVE_SECONDS.into()),
        ("VLLM_NO_USAGE_STATS", "1".into()),
    ];
    // The routes behind `hostler sleep` and `hostler lora`. They are reachable only through the
    // engine's socket, which belongs to this user.
    let given = EngineArguments(&launch.config.engine_args);
    for (flag, unlocks) in [("--enable-sleep-mode", SLEEP_ROUTES_VARIABLE), ("--enable-lora", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")] {
        if given.has(flag) && !given.negates(flag) {
            set.push((unlocks, "1".into()));
        }
    }
    match (&launch.replica.gpus[..], launch.cores) {
        (gpus @ [_, ..], _) => {
            let simulated = matches!(launch.engine, EngineProgram::Simulated { .. });
            let takes_uuid = simulated || launch.version.is_some_and(|version| version >= GPU_UUID_SINCE);
            let entries = gpus.iter().map(|gpu| gpu.visible_entry(takes_uuid)).collect::<Result<Vec<_>, _>>()?;
            // CUDA's own order is fastest first, the driver's is by PCI address.
            set.push(("CUDA_DEVICE_ORDER", "PCI_BUS_ID".into()));
            set.push(("CUDA_VISIBLE_DEVICES", entries.join(",").into()));
        }
        ([], Some(cores)) => {
            // By default each engine binds one thread to every core, so all engines of a host would
            // sit on the same cores. A batch system's value counts the cores of the whole job.
            set.push(("OMP_NUM_THREADS", cores.max(1).to_string().into()));
            set.push(("VLLM_CPU_OMP_THREADS_BIND", "nobind".into()));
        }
        ([], None) => {}
    }
    if let Some(gib) = launch.kv_cache_gib.filter(|_| !EngineArguments(&launch.config.engine_args).has("--gpu-memory-utilization")) {
        // By default each engine wants nine tenths of the host's memory, and fails if that is not
        // free.
        set.push(("VLLM_CPU_KVCACHE_SPACE", gib.to_string().into()));
    }
    if launch.choices.iter().any(|choice| choice.flag == TRACES_FLAG && choice.origin == FlagOrigin::Hostler) {
        set.extend(TRACES_ENVIRONMENT.map(|(name, value)| (name, value.into())));
    }
    if let Some(cache) = launch.bytecode_cache {
        // The second one would forbid to write, if an image or a user has set it.
        set.extend([("PYTHONPYCACHEPREFIX", cache.into()), ("PYTHONDONTWRITEBYTECODE", "".into())]);
    }
    let container = launch.container();
    set.extend(container.map(|_| (NO_USER_PACKAGES.0, NO_USER_PACKAGES.1.into())));
    // Always set the variable, so that an inherited one does not decide.
    set.push((RUST_FRONT_END_VARIABLE, if launch.front_end == FrontEndInUse::Rust { "1" } else { "0" }.into()));
    if matches!(launch.engine, EngineProgram::Vllm { .. }) && needs_plugin(launch, all_given) {
        let inherited = if container.is_some() { OsStr::new("") } else { launch.python_path };
        set.extend(plugin::environment(launch.directory, inherited).into_iter().flatten());
    }
    Ok(set)
}

/// Whether to load the plugin that makes the threads of the engine's core take turns.
///
/// It helps if one of them sends events and none runs the model. A thread of the core runs the
/// model in an engine with a single GPU and no process around its model; that case was not
/// measured.
fn needs_plugin(launch: &LaunchContext<'_>, all_given: &[String]) -> bool {
    let config = launch.config;
    let planned = || launch.choices.iter().find(|choice| choice.flag == EXECUTOR_FLAG).map(|choice| choice.value.as_str());
    let apart = launch.replica.gpus.len() != 1 || value_of(all_given, EXECUTOR_FLAG).or_else(planned) == Some("mp");
    config.profile != Profile::Conservative && apart && matches!(cache_source(launch), KvEventSource::Sockets { .. })
}

/// Refuses arguments that only the agent may give.
fn check_reserved(given: &EngineArguments<'_>) -> Result<(), HostError> {
    match RESERVED_ARGUMENTS.iter().find(|(flag, _)| given.has(flag)) {
        Some((flag, because)) => Err(HostError::ReservedArgument { argument: (*flag).to_owned(), because }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
