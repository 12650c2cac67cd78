//! Resources of this host for engines: its name, its GPUs, the program that becomes an engine, and
//! decisions made once when the agent starts.
//!
//! `plan` decides how the GPUs are used.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use hostler_boot::program::ProgramLookup;

use crate::bridge::{AttachTarget, AttachTargetError, EngineKey, EngineKeyError};
use crate::config::{AgentConfig, EngineKind, FrontEnd, Profile};
use crate::container::{Container, ContainerError};
pub(crate) use crate::gpu::Gpu;
use crate::gpu::visible::{self, VisibleDevicesError};
use crate::gpu::{DriverError, GpuDriver, MigSliceNeedsUuid};
use crate::sizes::GIB;

/// Variable by which batch systems assign GPUs to a job.
const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";

#[derive(Debug, Clone)]
pub(crate) struct Host {
    /// Host name, as the kernel knows it.
    pub name: String,
    /// GPUs that this process may use, in the order of `agent.gpus` or `CUDA_VISIBLE_DEVICES`.
    pub gpus: Vec<Gpu>,
    pub driver: Option<GpuDriver>,
    /// Why there is no GPU, for the log; `None` if there is one.
    pub no_gpu_because: Option<String>,
}

/// One replica that this host should run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaPlan {
    /// Number of the replica on this node, from 0.
    pub index: u32,
    /// GPUs of this replica, in the order of its ranks; none for an engine on CPU. Only a standby
    /// shares them.
    pub gpus: Vec<Gpu>,
    /// Routers use it while no other replica serves its model.
    pub is_standby: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineProgram {
    Vllm {
        /// Program on this host, or the name or path of one in the container.
        program: PathBuf,
        container: Option<Container>,
    },
    Simulated {
        program: PathBuf,
    },
    /// Engines that somebody else runs. A bridge of this program stands in the place of each.
    Attached {
        program: PathBuf,
        targets: Vec<AttachTarget>,
    },
}

impl EngineProgram {
    /// The same program, with a folder of the agent in its container if it has one.
    pub(crate) fn with_bind(self, folder: PathBuf) -> Result<Self, HostError> {
        Ok(match self {
            Self::Vllm { program, container: Some(container) } => Self::Vllm { program, container: Some(container.with_binds([folder])?) },
            other => other,
        })
    }
}

/// Reasons why no engine can be started here. Each says what to change.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum HostError {
    #[error("{by} {source}")]
    Visible { by: &'static str, source: VisibleDevicesError },
    #[error(transparent)]
    Slice(#[from] MigSliceNeedsUuid),
    /// The named library does not exist.
    #[error("cannot load `{library}`, which HOSTLER_NVML_LIB names in place of the NVIDIA driver's library")]
    NoLibrary { library: String },
    #[error("the NVIDIA driver does not work on this host: {reason}; `nvidia-smi` should show the same")]
    Driver { reason: String },
    /// A model was given, but no program can serve it.
    #[error(
        "cannot find the program `{name}` (looked for {searched}): install it with `pip install vllm`, name it with --vllm-bin PATH, or use --engine simulated"
    )]
    NoVllm { name: String, searched: String },
    /// vLLM is installed, but no model was named.
    #[error("no model was given: name one with --model PATH_OR_ID, or use --engine simulated")]
    NoModel,
    #[error(transparent)]
    Attach(#[from] AttachTargetError),
    #[error("--attach serves engines that run already: leave out {what}, which is for engines that the agent starts")]
    AttachOnly { what: &'static str },
    #[error("--gpus (agent.gpus) names `{gpus}`, but {because}: leave it out")]
    GpusUnused { gpus: String, because: String },
    #[error("--attach names one engine twice, as {0} and {1}: an engine is one replica")]
    AttachTwice(AttachTarget, AttachTarget),
    #[error("--attach-key-file is for engines that run already: name them with --attach, or leave it out")]
    KeyWithoutAttach,
    #[error(transparent)]
    EngineKey(#[from] EngineKeyError),
    #[error(transparent)]
    Container(#[from] ContainerError),
    #[error("the engine argument `{argument}` cannot be used: {because}")]
    ReservedArgument { argument: String, because: &'static str },
}

/// Why simulated engines have no GPUs.
const SIMULATED_NEEDS_NONE: &str = "the simulated engine needs none";

impl Host {
    /// Asks the kernel for the name and the NVIDIA driver for the GPUs.
    ///
    /// Only GPUs that `agent.gpus` allows are kept, or `CUDA_VISIBLE_DEVICES` where that is empty.
    /// The simulated engine needs no GPUs and gets them only from a library that was named for the
    /// purpose. A host without a driver has no GPUs, which is no error.
    ///
    /// # Errors
    /// When the driver does not work, or this process may use none of its GPUs.
    pub(crate) async fn discover(engine: &EngineProgram, config: &AgentConfig) -> Result<Self, HostError> {
        let library = Some(config.nvml_lib.as_path()).filter(|path| !path.as_os_str().is_empty());
        let (by, visible) = match Some(&config.gpus).filter(|list| !list.is_empty()) {
            Some(list) => ("agent.gpus", Some(list.clone())),
            None => (VISIBLE_DEVICES, std::env::var(VISIBLE_DEVICES).ok()),
        };
        // GPUs that are named must not be left out silently.
        let without = |reason: &str| match config.gpus.as_str() {
            "" => Ok(Self { name: host_name(), gpus: Vec::new(), driver: None, no_gpu_because: Some(reason.to_owned()) }),
            gpus => Err(HostError::GpusUnused { gpus: gpus.to_owned(), because: reason.to_owned() }),
        };
        match engine {
            EngineProgram::Simulated { .. } if library.is_none() => return without(SIMULATED_NEEDS_NONE),
            EngineProgram::Attached { .. } => return without("attached engines have their own"),
            EngineProgram::Simulated { .. } | EngineProgram::Vllm { .. } => {}
        }
        let driver = match (GpuDriver::open(library).await, library) {
            (Ok(driver), _) => driver,
            (Err(DriverError::Broken(reason)), _) => return Err(HostError::Driver { reason }),
            (Err(DriverError::Absent), Some(library)) => return Err(HostError::NoLibrary { library: library.display().to_string() }),
            (Err(DriverError::Absent), None) => return without("there is no NVIDIA driver"),
        };
        if driver.gpus().is_empty() && visible.is_none() {
            return without("the NVIDIA driver shows no GPU");
        }
        let selected = visible::select(driver.gpus(), visible.as_deref());
        let selection = selected.map_err(|source| HostError::Visible { by, source })?;
        if let Some(entry) = selection.unknown_entry {
            let known = visible::describe(driver.gpus());
            tracing::warn!(entry, known, "{by} names a GPU that is not here; the list ends before it, as it does for CUDA");
        }
        Ok(Self { name: host_name(), gpus: selection.gpus, driver: Some(driver), no_gpu_because: None })
    }
}

/// Refuses GPUs that are named for engines that have none.
pub(crate) fn check_named_gpus(config: &AgentConfig, engine: &EngineProgram) -> Result<(), HostError> {
    let needs_none = matches!(engine, EngineProgram::Simulated { .. }) && config.nvml_lib.as_os_str().is_empty();
    if needs_none && !config.gpus.is_empty() {
        return Err(HostError::GpusUnused { gpus: config.gpus.clone(), because: SIMULATED_NEEDS_NONE.to_owned() });
    }
    Ok(())
}

/// Chooses the program that becomes an engine. `this_program` contains the simulated engine.
pub(crate) fn choose_program(
    kind: EngineKind,
    model_given: bool,
    vllm: &ProgramLookup,
    this_program: &Path,
) -> Result<EngineProgram, HostError> {
    let simulated = EngineProgram::Simulated { program: this_program.to_owned() };
    match (kind, model_given, &vllm.found) {
        (EngineKind::Simulated, _, _) | (EngineKind::Auto, false, None) => Ok(simulated),
        (EngineKind::Auto | EngineKind::Vllm, true, Some(program)) => Ok(EngineProgram::Vllm { program: program.clone(), container: None }),
        (EngineKind::Auto | EngineKind::Vllm, true, None) => {
            Err(HostError::NoVllm { name: vllm.name.display().to_string(), searched: vllm.searched.clone() })
        }
        (EngineKind::Auto, false, Some(_)) | (EngineKind::Vllm, false, _) => Err(HostError::NoModel),
    }
}

/// The engines of `--attach`, if there are some.
pub(crate) fn attached_engines(config: &AgentConfig, this_program: &Path) -> Result<Option<EngineProgram>, HostError> {
    let key_file = &config.attach_key_file;
    let has_key = !key_file.as_os_str().is_empty();
    match (config.attach.is_empty(), has_key) {
        (true, true) => return Err(HostError::KeyWithoutAttach),
        (true, false) => return Ok(None),
        // The engines' own bridges read it again.
        (false, true) => drop(EngineKey::read(key_file)?),
        (false, false) => {}
    }
    let superfluous = [
        ("arguments after `--`", !config.engine_args.is_empty()),
        ("--model", !config.model.is_empty()),
        ("--replicas", config.replicas != 0),
        ("--tp", config.tp > 1),
        ("--profile", config.profile != Profile::Throughput),
        ("--front-end", config.front_end != FrontEnd::Auto),
        ("--standby", config.standby),
        ("--gpus", !config.gpus.is_empty()),
        ("--image", !config.image.as_os_str().is_empty()),
    ];
    if let Some((what, _)) = superfluous.into_iter().find(|(_, is_given)| *is_given) {
        return Err(HostError::AttachOnly { what });
    }
    let targets = config.attach.iter().map(|target| AttachTarget::parse(target)).collect::<Result<Vec<_>, _>>()?;
    let earlier = |index: usize| targets[..index].iter().find(|target| target.is_same_server(&targets[index]));
    if let Some((first, index)) = (1..targets.len()).find_map(|index| Some((earlier(index)?, index))) {
        return Err(HostError::AttachTwice(first.clone(), targets[index].clone()));
    }
    Ok(Some(EngineProgram::Attached { program: this_program.to_owned(), targets }))
}

/// GiB of memory that each of `engines` engines without a GPU may use as KV cache.
///
/// The total is half of the memory free now, so that as much is left for weights. The share is 32
/// at most, because a cache is touched before an engine is ready. `None` if vLLM's own variable is
/// set, or the free memory is unknown.
pub(crate) fn kv_cache_gib(engines: usize) -> Option<u64> {
    if env::var_os("VLLM_CPU_KVCACHE_SPACE").is_some() {
        return None;
    }
    Some((available_memory()? / GIB / (2 * engines.max(1) as u64)).clamp(1, 32))
}

/// Memory that programs may still take, in bytes; `None` if unknown.
pub(crate) fn available_memory() -> Option<u64> {
    let page = fs::read_to_string("/proc/meminfo").ok()?;
    let kib: u64 = page.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB")?.parse().ok())?;
    Some(kib.saturating_mul(1024))
}

fn host_name() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .ok()
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| "localhost".to_owned())
}

#[cfg(test)]
mod tests;
