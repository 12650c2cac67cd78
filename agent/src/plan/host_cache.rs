//! Host memory as a second tier of the engines' prefix cache: whether, how much, and why not.
//!
//! vLLM copies blocks there as they are computed, and loads them when a prompt needs what has left
//! the GPU. On an H100 whose cache was too small for its agents' contexts that gave 31 % more turns
//! a second, and cost nothing where everything fitted. The decision is pure.

use std::fmt;

use super::host_memory::HostMemory;
use super::host_resources::HostResources;
use super::layout::{GpuGroupLayout, GpuLayout};
use super::model::ModelInfo;
use super::setup::EnginePlanSetup;
use crate::config::HostCacheSetting;
use crate::sizes::{GIB, format_gib};
use crate::vllm::arguments::EngineArguments;
use crate::vllm::releases::HOST_CACHE_SINCE;

/// Flag with the connector that copies blocks to the host's memory.
pub(super) const TRANSFER_FLAG: &str = "--kv-transfer-config";

/// Flags with which the user decides about copies.
const USER_FLAGS: [&str; 2] = [TRANSFER_FLAG, "--kv-offloading-size"];

/// Part of the memory that `auto` leaves to everything else: weights on their way to the GPUs, the
/// engines' own processes, other programs.
const AUTO_DIVISOR: u64 = 2;

/// Memory that `auto` leaves in any case.
pub(super) const MIN_RESERVE: u64 = 16 * GIB;

/// Shared memory that copies leave to the queues of an engine's processes.
pub(super) const SHARED_RESERVE: u64 = 2 * GIB;

/// The host's part of the engines' caches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostCache {
    Off(NoHostCache),
    /// Every engine gets as much.
    On(HostCacheShare),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostCacheShare {
    /// Bytes of one engine, over all its GPUs.
    pub bytes: u64,
    /// Tokens that they hold.
    pub tokens: u64,
    pub(super) setting: HostCacheSetting,
    /// Memory of which `auto` has taken a part.
    memory: HostMemory,
}

/// Why engines keep no copies in the host's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoHostCache {
    Unset,
    /// The user has given this flag.
    UserDecides(&'static str),
    Simulated,
    Attached,
    NoGpu,
    OldRelease,
    /// A replica has several nodes.
    Spread,
    UnknownModel,
    /// The model's layers keep different caches, which copies would have to keep together.
    SeveralCaches,
    /// The host's or the job's memory is not known, or all of it is reserved.
    NoMemory,
    /// The share of an engine is no larger than its GPUs' own cache, of which it holds copies.
    Smaller {
        share: u64,
        gpu: u64,
        /// Memory of which `auto` took that share; `None` for a size.
        memory: Option<HostMemory>,
    },
    /// `/dev/shm`, where vLLM keeps the copies, is too small for what the user wants.
    NoSharedMemory {
        wanted: u64,
        free: u64,
    },
}

impl fmt::Display for NoHostCache {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unset => formatter.write_str("agent.host_cache is off"),
            Self::UserDecides(flag) => write!(formatter, "you gave {flag} after `--`"),
            Self::Simulated => formatter.write_str("the engine is simulated; `-- --sim-host-blocks N` gives it one"),
            Self::Attached => formatter.write_str("somebody else runs the engine"),
            Self::NoGpu => formatter.write_str("engines on a CPU have all of their cache there"),
            Self::OldRelease => write!(formatter, "it needs vLLM {HOST_CACHE_SINCE}"),
            Self::Spread => formatter.write_str("a replica has several nodes"),
            Self::UnknownModel => formatter.write_str("the size of the model's cache is not known"),
            Self::SeveralCaches => formatter.write_str("the model's layers keep different caches"),
            Self::NoMemory => formatter.write_str("the host or the job has no memory to spare, or does not say how much it has"),
            Self::Smaller { share, gpu, memory } => {
                write!(
                    formatter,
                    "{} for each engine would add nothing to the {} that its GPUs hold",
                    format_gib(*share),
                    format_gib(*gpu)
                )?;
                memory.map_or(Ok(()), |memory| write!(formatter, "; that is a part of half of {memory}"))
            }
            Self::NoSharedMemory { wanted, free } => write!(
                formatter,
                "vLLM keeps the copies in /dev/shm, which has room for {} and not for {}; give the container or the host more",
                format_gib(*free),
                format_gib(*wanted)
            ),
        }
    }
}

/// Decides about the copies of `engines` engines in service.
pub(super) fn choose(
    setting: HostCacheSetting,
    setup: &EnginePlanSetup,
    model: &ModelInfo,
    layout: Option<&GpuLayout>,
    resources: HostResources,
) -> HostCache {
    share(setting, setup, model, layout, resources).map_or_else(HostCache::Off, HostCache::On)
}

fn share(
    setting: HostCacheSetting,
    setup: &EnginePlanSetup,
    model: &ModelInfo,
    layout: Option<&GpuLayout>,
    resources: HostResources,
) -> Result<HostCacheShare, NoHostCache> {
    if let Some(flag) = USER_FLAGS.into_iter().find(|flag| EngineArguments(&setup.arguments).has(flag)) {
        return Err(NoHostCache::UserDecides(flag));
    }
    if setting == HostCacheSetting::Off {
        return Err(NoHostCache::Unset);
    }
    check_engine(setup, model)?;
    let layout = layout.ok_or(NoHostCache::NoGpu)?;
    let engines = layout.shares.iter().map(|share| share.replicas.len() as u64).sum::<u64>().max(1);
    let room = resources.shared_bytes.saturating_sub(SHARED_RESERVE);
    let bytes = match setting {
        HostCacheSetting::Bytes(bytes) if bytes > room => return Err(NoHostCache::NoSharedMemory { wanted: bytes, free: room }),
        HostCacheSetting::Bytes(bytes) => bytes / engines,
        _ => automatic(resources).min(room) / engines / GIB * GIB,
    };
    if bytes == 0 {
        return Err(NoHostCache::NoMemory);
    }
    let (gpu, token) = layout.shares.iter().filter_map(gpu_cache).max().ok_or(NoHostCache::UnknownModel)?;
    if bytes <= gpu {
        let memory = (setting == HostCacheSetting::Auto).then_some(resources.memory);
        return Err(NoHostCache::Smaller { share: bytes, gpu, memory });
    }
    Ok(HostCacheShare { bytes, tokens: bytes / token, setting, memory: resources.memory })
}

fn check_engine(setup: &EnginePlanSetup, model: &ModelInfo) -> Result<(), NoHostCache> {
    let shape = model.facts().map(|facts| &facts.shape);
    match shape {
        _ if setup.simulated => Err(NoHostCache::Simulated),
        _ if setup.attached => Err(NoHostCache::Attached),
        _ if !setup.is_at_least(HOST_CACHE_SINCE) => Err(NoHostCache::OldRelease),
        _ if setup.nodes > 1 => Err(NoHostCache::Spread),
        None => Err(NoHostCache::UnknownModel),
        Some(shape) if shape.windowed_layers > 0 || shape.recurrent_layers > 0 => Err(NoHostCache::SeveralCaches),
        Some(_) => Ok(()),
    }
}

/// Bytes that `auto` takes of a node. They follow from what the host or the job has, and not from
/// what is free at the moment: an agent that restarts beside its engines must repeat the plan that
/// they were started with.
fn automatic(resources: HostResources) -> u64 {
    let memory = resources.memory.bytes;
    (memory / AUTO_DIVISOR).min(memory.saturating_sub(MIN_RESERVE))
}

/// Bytes of the cache of one engine, and those of one token there, over all its GPUs.
fn gpu_cache(share: &GpuGroupLayout) -> Option<(u64, u64)> {
    let (memory, gpus) = (share.memory.as_ref()?, u64::from(share.tp));
    Some((memory.cache * gpus, memory.token_bytes() * gpus)).filter(|(_, token)| *token > 0)
}

impl HostCacheShare {
    /// Value of [`TRANSFER_FLAG`], with the settings of further tiers. Without descriptions the
    /// events of copies carry one hash of each chunk and no tokens.
    pub(super) fn transfer_config(&self, tiers: &str) -> String {
        format!(
            r#"{{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{{"cpu_bytes_to_use":{},"self_describing_kv_events":true{tiers}}}}}"#,
            self.bytes
        )
    }

    /// Bytes of one token, over all GPUs of an engine.
    pub(super) fn token_bytes(&self) -> u64 {
        self.bytes.checked_div(self.tokens).unwrap_or(0).max(1)
    }

    /// Why it has this size, in words.
    #[must_use]
    pub fn because(&self) -> String {
        match self.setting {
            HostCacheSetting::Bytes(_) => "an equal part of agent.host_cache".to_owned(),
            HostCacheSetting::Auto | HostCacheSetting::Off => {
                format!("an equal part of half of {}; the other half, and 16 GiB at least, stay free", self.memory)
            }
        }
    }
}

#[cfg(test)]
mod tests;
