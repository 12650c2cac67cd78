//! The command line of one engine: program, arguments and environment for a vLLM of a given version, or for the simulated engine. Pure; the process is created elsewhere.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::version::Version;
use crate::cache::Source;
use crate::config::AgentConfig;
use crate::host::{HostError, ReplicaPlan, Resolved};

/// What the simulated engine serves when no model is named.
pub const SIMULATED_MODEL: &str = "simulated";

/// `--shutdown-timeout` exists since this release.
const SHUTDOWN_TIMEOUT_SINCE: Version = Version::new(0, 18);

/// `CUDA_VISIBLE_DEVICES` may hold a UUID since this release; earlier ones read every entry as a number and crash.
const GPU_UUID_SINCE: Version = Version::new(0, 24);

/// Events about the cache have an encoding that we read since this release.
const CACHE_EVENTS_SINCE: Version = Version::new(0, 11);

/// Messages about the cache that an engine keeps, to tell them again where some were missed: one for each of its steps. vLLM's own default.
const CACHE_EVENTS_KEPT: u32 = 10_000;

/// How long vLLM keeps an idle connection, in seconds. Its default of 5 would close pooled connections just as they are used.
const KEEP_ALIVE_SECONDS: &str = "3600";

/// Arguments that would take the engine out of the agent's hands.
const RESERVED: [(&str, &str); 10] = [
    ("--uds", "the agent gives each engine a socket of its own"),
    ("--api-key", "an engine is reachable through the agent only; guard the router instead"),
    ("--ssl-keyfile", "the engine's socket never leaves this host; encrypt at the router"),
    ("--ssl-certfile", "the engine's socket never leaves this host; encrypt at the router"),
    ("--headless", "the agent needs an engine that serves HTTP"),
    ("--grpc", "the agent needs an engine that serves HTTP"),
    ("--tensor-parallel-size", "each replica has one GPU"),
    ("-tp", "each replica has one GPU"),
    ("--data-parallel-size", "the agent runs one engine per replica; use --replicas"),
    ("-dp", "the agent runs one engine per replica; use --replicas"),
];

/// Inherited variables that would change an engine without anyone having asked for it: a port from Kubernetes, a key that locks the agent out. `CUDA_VISIBLE_DEVICES` is kept where the agent sets none: it may be a scheduler's limit.
const NOT_INHERITED: [&str; 2] = ["VLLM_PORT", "VLLM_API_KEY"];

/// Everything the command line depends on.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// Which program becomes the engine.
    pub engine: &'a Resolved,
    /// vLLM's version; unknown counts as older than every release.
    pub version: Option<Version>,
    /// Which replica of this node.
    pub replica: &'a ReplicaPlan,
    /// CPU cores for an engine without a GPU that shares this host with other engines: its part of them. `None` leaves the whole host to it.
    pub cores: Option<u32>,
    /// GiB of memory for the KV cache of an engine without a GPU; `None` leaves it to the engine.
    pub kv_cache_gib: Option<u64>,
    /// The engine's own directory, see `RunDir::engine`.
    pub directory: &'a Path,
    /// The agent's settings.
    pub config: &'a AgentConfig,
}

/// A program with its arguments and its changes to the inherited environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandLine {
    /// What is run.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Variables that are set.
    pub set: Vec<(&'static str, OsString)>,
    /// Variables that are not passed on unless `set` names them.
    pub unset: Vec<&'static str>,
}

/// Where an engine with this directory listens.
pub fn socket_in(directory: &Path) -> PathBuf {
    directory.join("engine.sock")
}

/// Where the engine tells what it has cached: on Unix sockets in its own directory, where no other user of the host can read prompts in the
/// events or forge them.
pub fn cache_source(launch: &Launch<'_>) -> Source {
    match why_no_cache_events(launch) {
        Some(because) => Source::Nothing { because },
        None => Source::Sockets { live: launch.directory.join("kv.sock"), replay: launch.directory.join("replay.sock") },
    }
}

fn why_no_cache_events(launch: &Launch<'_>) -> Option<String> {
    let given = Given(&launch.config.engine_args);
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
        (Resolved::Vllm { .. }, None) => Some("the version of vLLM is unknown, so its cache events are not asked for".to_owned()),
        (Resolved::Vllm { .. }, Some(version)) if version < CACHE_EVENTS_SINCE => {
            Some(format!("vLLM {version} has no cache events that are understood; {CACHE_EVENTS_SINCE} is the first that has"))
        }
        _ => None,
    }
}

/// The flag that makes the engine tell what it caches, if it is to.
fn cache_event_arguments(launch: &Launch<'_>) -> Vec<OsString> {
    let Source::Sockets { live, replay } = cache_source(launch) else { return Vec::new() };
    let config = serde_json::json!({
        "enable_kv_cache_events": true,
        "publisher": "zmq",
        "endpoint": format!("ipc://{}", live.display()),
        "replay_endpoint": format!("ipc://{}", replay.display()),
        "topic": "",
        "buffer_steps": CACHE_EVENTS_KEPT,
    });
    vec!["--kv-events-config".into(), config.to_string().into()]
}

/// Where an engine with this directory keeps temporary files.
pub(crate) fn temporary_in(directory: &Path) -> PathBuf {
    directory.join("tmp")
}

/// The command line for one engine. Fails when the configured engine arguments contain one that only the agent may give.
pub fn command_line(launch: &Launch<'_>) -> Result<CommandLine, HostError> {
    let given = Given(&launch.config.engine_args);
    given.check()?;
    let (program, mut arguments) = match launch.engine {
        Resolved::Vllm { program } => (program, vllm_arguments(launch, &given)),
        Resolved::Simulated { program } => (program, simulated_arguments(launch)),
    };
    // So that routers learn how much of a prompt was cached, and answers carry the id of their request.
    for flag in ["--disable-uvicorn-access-log", "--enable-prompt-tokens-details", "--enable-request-id-headers"] {
        if !given.has(flag) {
            arguments.push(flag.into());
        }
    }
    arguments.append(&mut cache_event_arguments(launch));
    arguments.extend(launch.config.engine_args.iter().map(OsString::from));
    Ok(CommandLine { program: program.clone(), arguments, set: environment(launch), unset: NOT_INHERITED.to_vec() })
}

fn vllm_arguments(launch: &Launch<'_>, given: &Given<'_>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> =
        vec!["serve".into(), launch.config.model.clone().into(), "--uds".into(), socket_in(launch.directory).into()];
    let has_timeout = launch.version.is_some_and(|version| version >= SHUTDOWN_TIMEOUT_SINCE);
    if has_timeout && !given.has("--shutdown-timeout") {
        // A batch system may send SIGTERM to the engine just when it sends it to the agent; without this, the engine would cut every running answer short.
        arguments.push("--shutdown-timeout".into());
        arguments.push(launch.config.drain_timeout.as_secs().to_string().into());
    }
    arguments
}

fn simulated_arguments(launch: &Launch<'_>) -> Vec<OsString> {
    let model = match launch.config.model.as_str() {
        "" => SIMULATED_MODEL,
        model => model,
    };
    vec!["sim".into(), "engine".into(), model.into(), "--uds".into(), socket_in(launch.directory).into()]
}

fn environment(launch: &Launch<'_>) -> Vec<(&'static str, OsString)> {
    let mut set: Vec<(&'static str, OsString)> = vec![
        ("VLLM_RPC_BASE_PATH", launch.directory.into()),
        ("TMPDIR", temporary_in(launch.directory).into()),
        ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", KEEP_ALIVE_SECONDS.into()),
        ("VLLM_NO_USAGE_STATS", "1".into()),
    ];
    match (&launch.replica.gpu, launch.cores) {
        (Some(gpu), _) => {
            let takes_uuid = launch.version.is_some_and(|version| version >= GPU_UUID_SINCE);
            let entry = if takes_uuid { gpu.uuid.clone() } else { gpu.index.to_string() };
            // CUDA's own order is fastest first, the driver's is by PCI address.
            set.push(("CUDA_DEVICE_ORDER", "PCI_BUS_ID".into()));
            set.push(("CUDA_VISIBLE_DEVICES", entry.into()));
        }
        (None, Some(cores)) => {
            // Left to itself each engine binds one thread to every core, so that all engines of one host would sit on the same cores; a batch system's value counts the cores of the whole job.
            set.push(("OMP_NUM_THREADS", cores.max(1).to_string().into()));
            set.push(("VLLM_CPU_OMP_THREADS_BIND", "nobind".into()));
        }
        (None, None) => {}
    }
    if let Some(gib) = launch.kv_cache_gib.filter(|_| !Given(&launch.config.engine_args).has("--gpu-memory-utilization")) {
        // Left to itself each engine wants nine tenths of the host's memory, and fails where they are not free.
        set.push(("VLLM_CPU_KVCACHE_SPACE", gib.to_string().into()));
    }
    set
}

/// The engine arguments of the configuration.
struct Given<'a>(&'a [String]);

impl Given<'_> {
    /// Whether a flag was given, as `--flag`, `--flag=value` or with underscores, or negated as `--no-flag`.
    fn has(&self, flag: &str) -> bool {
        let bare = flag.trim_start_matches('-');
        self.0.iter().any(|argument| {
            let name = argument.split('=').next().unwrap_or_default().replace('_', "-");
            let name = name.strip_prefix("--").or_else(|| name.strip_prefix('-')).unwrap_or_default();
            name == bare || name.strip_prefix("no-") == Some(bare)
        })
    }

    /// Whether a flag was given as `--no-flag`.
    fn negates(&self, flag: &str) -> bool {
        let negated = format!("--no-{}", flag.trim_start_matches('-'));
        self.0.iter().any(|argument| argument.replace('_', "-") == negated)
    }

    fn check(&self) -> Result<(), HostError> {
        match RESERVED.iter().find(|(flag, _)| self.has(flag)) {
            Some((flag, because)) => Err(HostError::ReservedArgument { argument: (*flag).to_owned(), because }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
