//! What this host has for engines: its name, its GPUs, the program that becomes an engine, and from these the plan of one replica per GPU. Everything is decided once, when the agent starts.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use crate::arguments::value_of;
use crate::config::{AgentConfig, EngineKind};
use crate::engine::version::Version;

/// The driver normally answers within 20 ms; one with a lost GPU may never do.
const DRIVER_DEADLINE: Duration = Duration::from_secs(30);

/// Simulated engines on a host that names no number: two, so that placement has a choice.
const SIMULATED_REPLICAS: u32 = 2;

/// The simulated engine's default of `--max-num-batched-tokens`.
const SIMULATED_TOKEN_BUDGET: u32 = 8_192;

/// GPUs of 160 GiB and more have larger steps by default in this release; whether earlier ones had is not known here.
const LARGE_STEPS_SINCE: Version = Version::new(0, 32);

/// One GPU as the driver describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Position in PCI order, which is the driver's order and not CUDA's default one.
    pub index: u32,
    /// The driver's name for this one device, `GPU-…`.
    pub uuid: String,
    /// The product name.
    pub name: String,
    /// Its memory; 0 where the driver does not say.
    pub memory_bytes: u64,
}

/// This host.
#[derive(Debug, Clone)]
pub struct Host {
    /// The host name, as the kernel knows it.
    pub name: String,
    /// The GPUs that this process may use, in the order of `CUDA_VISIBLE_DEVICES` where that is set.
    pub gpus: Vec<Gpu>,
    /// Why there is no GPU, for the log; `None` when there is one.
    pub no_gpu_because: Option<String>,
}

/// One replica that this host shall have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaPlan {
    /// Its number on this node, from 0.
    pub index: u32,
    /// The GPU it has for itself, or none for an engine on CPU.
    pub gpu: Option<Gpu>,
}

/// Which program becomes an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resolved {
    /// A real vLLM.
    Vllm {
        /// The program that was found.
        program: PathBuf,
    },
    /// The simulated engine.
    Simulated {
        /// This program itself.
        program: PathBuf,
    },
}

/// Where the `vllm` program was looked for and what was found.
#[derive(Debug, Clone)]
pub struct Lookup {
    /// The configured name or path.
    pub name: PathBuf,
    /// Where a name was looked for, in words.
    pub searched: String,
    /// The program, if it exists and may be run.
    pub found: Option<PathBuf>,
}

/// Why no engine can be started here. Each says what to change.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum HostError {
    /// The scheduler gave this job no GPU.
    #[error(
        "CUDA_VISIBLE_DEVICES is set but names no GPU, so this job has none: ask the scheduler for GPUs, unset the variable, or use --engine simulated"
    )]
    NoVisibleGpu,
    /// The driver is there and does not work.
    #[error("the NVIDIA driver does not work on this host: {reason}; `nvidia-smi` should show the same")]
    Driver {
        /// What went wrong.
        reason: String,
    },
    /// An entry of the variable matches nothing.
    #[error("CUDA_VISIBLE_DEVICES names `{entry}`, but the GPUs of this host are {known}")]
    UnknownGpu {
        /// The entry.
        entry: String,
        /// The GPUs there are.
        known: String,
    },
    /// An entry of the variable matches several GPUs.
    #[error("CUDA_VISIBLE_DEVICES names `{entry}`, which is the beginning of several UUIDs")]
    AmbiguousGpu {
        /// The entry.
        entry: String,
    },
    /// A slice of a GPU.
    #[error("CUDA_VISIBLE_DEVICES names the MIG slice `{entry}`, and only whole GPUs are supported")]
    MigSlice {
        /// The entry.
        entry: String,
    },
    /// One GPU cannot hold two engines.
    #[error("{replicas} replicas were asked for, but the number of GPUs is {gpus}: use --replicas {gpus} or fewer")]
    TooManyReplicas {
        /// Asked for.
        replicas: u32,
        /// There.
        gpus: u32,
    },
    /// A model was given and nothing can serve it.
    #[error(
        "cannot find the program `{name}` (looked for {searched}): install it with `pip install vllm`, name it with --vllm-bin PATH, or use --engine simulated"
    )]
    NoVllm {
        /// The configured name or path.
        name: String,
        /// Where it was looked for.
        searched: String,
    },
    /// vLLM is there and nobody said what it shall serve.
    #[error("no model was given: name one with --model PATH_OR_ID, or use --engine simulated")]
    NoModel,
    /// An engine argument that the agent must decide itself.
    #[error("the engine argument `{argument}` cannot be used: {because}")]
    ReservedArgument {
        /// The argument.
        argument: String,
        /// The reason.
        because: &'static str,
    },
}

impl Host {
    /// Asks the kernel for the name and, for a real engine, the NVIDIA driver for the GPUs, of which it keeps those that `CUDA_VISIBLE_DEVICES` allows. A host without a driver has no GPUs and is no error. Takes 30 s at most.
    pub async fn discover(engine: &Resolved) -> Result<Self, HostError> {
        let devices = match engine {
            Resolved::Simulated { .. } => Err("the simulated engine needs none"),
            Resolved::Vllm { .. } => match ask_driver().await {
                Ok(devices) => Ok(devices),
                Err(NoGpus::NoDriver) => Err("there is no NVIDIA driver"),
                Err(NoGpus::Broken(reason)) => return Err(HostError::Driver { reason }),
            },
        };
        let visible = env::var("CUDA_VISIBLE_DEVICES").ok();
        let (gpus, no_gpu_because) = match devices {
            Ok(devices) if devices.is_empty() && visible.is_none() => (devices, Some("the NVIDIA driver shows no GPU".to_owned())),
            Ok(devices) => (select(&devices, visible.as_deref())?, None),
            Err(reason) => (Vec::new(), Some(reason.to_owned())),
        };
        Ok(Self { name: host_name(), gpus, no_gpu_because })
    }
}

/// The replicas of this host: one per GPU, or as many as the configuration says.
pub fn plan(host: &Host, engine: &Resolved, config: &AgentConfig) -> Result<Vec<ReplicaPlan>, HostError> {
    let on_gpus = matches!(engine, Resolved::Vllm { .. }) && !host.gpus.is_empty();
    if !on_gpus {
        let default = match engine {
            Resolved::Vllm { .. } => 1,
            Resolved::Simulated { .. } => SIMULATED_REPLICAS,
        };
        let replicas = if config.replicas == 0 { default } else { config.replicas };
        return Ok((0..replicas).map(|index| ReplicaPlan { index, gpu: None }).collect());
    }
    let gpus = u32::try_from(host.gpus.len()).expect("a host has few GPUs");
    let replicas = if config.replicas == 0 { gpus } else { config.replicas };
    if replicas > gpus {
        return Err(HostError::TooManyReplicas { replicas, gpus });
    }
    Ok((0..replicas).zip(&host.gpus).map(|(index, gpu)| ReplicaPlan { index, gpu: Some(gpu.clone()) }).collect())
}

/// Which program becomes an engine. `this_program` is what the simulated engine is part of.
pub fn resolve(kind: EngineKind, model_given: bool, vllm: &Lookup, this_program: &Path) -> Result<Resolved, HostError> {
    let simulated = Resolved::Simulated { program: this_program.to_owned() };
    match (kind, model_given, &vllm.found) {
        (EngineKind::Simulated, _, _) | (EngineKind::Auto, false, None) => Ok(simulated),
        (EngineKind::Auto | EngineKind::Vllm, true, Some(program)) => Ok(Resolved::Vllm { program: program.clone() }),
        (EngineKind::Auto | EngineKind::Vllm, true, None) => {
            Err(HostError::NoVllm { name: vllm.name.display().to_string(), searched: vllm.searched.clone() })
        }
        (EngineKind::Auto, false, Some(_)) | (EngineKind::Vllm, false, _) => Err(HostError::NoModel),
    }
}

/// GiB of memory that each of `engines` engines without a GPU may use as KV cache: half of what is free now, so that as much is left
/// for weights, and 32 at most, since a cache is touched before an engine is ready. `None` where somebody has set vLLM's own
/// variable, or the free memory is unknown.
pub fn kv_cache_gib(engines: usize) -> Option<u64> {
    if env::var_os("VLLM_CPU_KVCACHE_SPACE").is_some() {
        return None;
    }
    let page = fs::read_to_string("/proc/meminfo").ok()?;
    let kib: u64 = page.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB")?.parse().ok())?;
    Some((kib / (1 << 20) / (2 * engines.max(1) as u64)).clamp(1, 32))
}

/// Tokens that an engine computes in one step at most: what its arguments say, else its default on this GPU; 0 when neither is known.
/// What vLLM makes of its default for models with unusual limits is not followed.
pub fn token_budget(engine: &Resolved, version: Option<Version>, gpu: Option<&Gpu>, arguments: &[String]) -> u32 {
    if let Some(given) = value_of(arguments, "--max-num-batched-tokens") {
        return human_number(given).unwrap_or(0);
    }
    if matches!(engine, Resolved::Simulated { .. }) {
        return SIMULATED_TOKEN_BUDGET;
    }
    // The file may name the number.
    if value_of(arguments, "--config").is_some() {
        return 0;
    }
    let is_a100 = gpu.is_some_and(|gpu| gpu.name.to_lowercase().contains("a100"));
    let default = match gpu.map_or(0, |gpu| gpu.memory_bytes >> 30) {
        160.. if version.is_some_and(|version| version >= LARGE_STEPS_SINCE) => 16_384,
        70.. if !is_a100 => 8_192,
        _ => 2_048,
    };
    let doubled = value_of(arguments, "--performance-mode") == Some("throughput");
    if doubled { 2 * default } else { default }
}

/// A number as vLLM's arguments take it: plain, in thousands (`8k`, `2.5k`) or in 1,024s (`8K`), and so on for millions.
fn human_number(text: &str) -> Option<u32> {
    let text = text.trim();
    let (number, factor) = match text.char_indices().last()? {
        (at, 'k') => (&text[..at], 1e3),
        (at, 'm') => (&text[..at], 1e6),
        (at, 'K') => (&text[..at], f64::from(1 << 10)),
        (at, 'M') => (&text[..at], f64::from(1 << 20)),
        _ => return text.parse().ok(),
    };
    let number = number.parse::<f64>().ok()? * factor;
    // Truncated as the engine does it; what is negative, or too large for a budget, is none.
    format!("{:.0}", number.trunc()).parse().ok()
}

/// Looks for a program: a path as it is, a name in each directory of `search_path` (the value of `PATH`).
pub fn look_up(name: &Path, search_path: Option<&OsStr>) -> Lookup {
    let runnable = |path: &PathBuf| fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0);
    if name.components().count() > 1 {
        return Lookup {
            name: name.to_owned(),
            searched: "a program at that path".to_owned(),
            found: Some(name.to_owned()).filter(runnable),
        };
    }
    let search_path = search_path.unwrap_or_default();
    Lookup {
        name: name.to_owned(),
        searched: format!("that name in PATH={}", search_path.display()),
        found: env::split_paths(search_path).map(|directory| directory.join(name)).find(runnable),
    }
}

/// The GPUs that a value of `CUDA_VISIBLE_DEVICES` allows, in its order. Entries are positions in PCI order or beginnings of UUIDs, as CUDA takes them.
fn select(devices: &[Gpu], visible: Option<&str>) -> Result<Vec<Gpu>, HostError> {
    let Some(visible) = visible else {
        return Ok(devices.to_vec());
    };
    let mut selected: Vec<Gpu> = Vec::new();
    for entry in visible.split(',').map(str::trim) {
        // CUDA reads an empty entry or a negative number as the end of the list.
        if entry.is_empty() || entry.starts_with('-') || entry == "NoDevFiles" {
            break;
        }
        let gpu = find(devices, entry)?;
        if !selected.contains(gpu) {
            selected.push(gpu.clone());
        }
    }
    if selected.is_empty() {
        return Err(HostError::NoVisibleGpu);
    }
    Ok(selected)
}

fn find<'a>(devices: &'a [Gpu], entry: &str) -> Result<&'a Gpu, HostError> {
    let entry_owned = || entry.to_owned();
    if entry.starts_with("MIG-") {
        return Err(HostError::MigSlice { entry: entry_owned() });
    }
    let position = entry.parse::<u32>().ok();
    let mut matches = devices.iter().filter(|gpu| match position {
        Some(position) => gpu.index == position,
        None => gpu.uuid.starts_with(entry),
    });
    match (matches.next(), matches.next()) {
        (Some(gpu), None) => Ok(gpu),
        (Some(_), Some(_)) => Err(HostError::AmbiguousGpu { entry: entry_owned() }),
        (None, _) => Err(HostError::UnknownGpu { entry: entry_owned(), known: describe(devices) }),
    }
}

fn describe(devices: &[Gpu]) -> String {
    if devices.is_empty() {
        return "none at all".to_owned();
    }
    let named: Vec<String> = devices.iter().map(|gpu| format!("{} ({})", gpu.index, gpu.uuid)).collect();
    named.join(", ")
}

/// Why the driver names no GPUs.
enum NoGpus {
    /// There is none, so this is a host without GPUs.
    NoDriver,
    /// There is one that does not work: to go on without GPUs would be a guess.
    Broken(String),
}

async fn ask_driver() -> Result<Vec<Gpu>, NoGpus> {
    let asked = tokio::task::spawn_blocking(enumerate);
    match tokio::time::timeout(DRIVER_DEADLINE, asked).await {
        Ok(Ok(devices)) => devices,
        Ok(Err(panic)) => Err(NoGpus::Broken(format!("asking it failed: {panic}"))),
        Err(_) => Err(NoGpus::Broken("it does not answer".to_owned())),
    }
}

/// All GPUs of the driver. Blocks, and for ever if the driver hangs.
fn enumerate() -> Result<Vec<Gpu>, NoGpus> {
    let driver = Nvml::init().map_err(|error| match error {
        NvmlError::LibloadingError(_) => NoGpus::NoDriver,
        other => NoGpus::Broken(format!("it cannot be used: {other}")),
    })?;
    let count = driver.device_count().map_err(|error| NoGpus::Broken(format!("it cannot count its GPUs: {error}")))?;
    // One GPU that is lost must not hide the others; where it was asked for by name, `select` says that it is not there.
    let described = (0..count).filter_map(|index| match gpu_at(&driver, index) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            tracing::warn!(gpu = index, %error, "a GPU does not describe itself and is left out");
            None
        }
    });
    Ok(described.collect())
}

fn gpu_at(driver: &Nvml, index: u32) -> Result<Gpu, NvmlError> {
    let device = driver.device_by_index(index)?;
    // A GPU that shares its host's memory has none of its own to name.
    let memory_bytes = device.memory_info().map_or(0, |memory| memory.total);
    Ok(Gpu { index, uuid: device.uuid()?, name: device.name()?, memory_bytes })
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
