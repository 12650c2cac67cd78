//! Plan of a node and its reasons: replicas on GPUs, the flags of their engines, and the front-end.
//!
//! `hostler plan` prints it and the agent runs it; both call `plan`. The decisions are pure; the
//! facts about the model are read from the disk first.

pub mod described_gpus;
mod error;
mod file_cache;
mod flags;
mod front_end;
mod host_cache;
mod host_memory;
mod host_resources;
mod hub;
mod inventory;
mod layout;
mod memory;
mod model;
mod model_path;
mod network;
mod setup;
mod shape;
mod spread;
mod stage;
mod standby;
mod text;
mod weights;

use std::path::Path;

pub use self::error::{Alternative, ModelDoesNotFit, NoRoomForStandby, PlanError};
pub use self::file_cache::{FileCache, FilePoolPlan, NoFileCache};
pub use self::front_end::FrontEndChoice;
pub use self::host_cache::{HostCache, HostCacheShare, NoHostCache};
pub use self::host_resources::HostResources;
pub use self::inventory::{Inventory, PlanPreview, PreviewRequest, plan_inventory, preview, probe_installed};
pub use self::layout::{GpuGroupLayout, GpuLayout, SizeReason, UnusedGpu};
pub use self::memory::MemoryBudget;
pub use self::model::{ModelFacts, ModelInfo, WeightSizeSource};
pub(crate) use self::model_path::check_model_path;
pub use self::network::NcclTransport;
use self::setup::PlannedParsers;
pub use self::setup::{EnginePlanSetup, KvCacheFormat, StepLimits};
pub use self::shape::ModelShape;
pub use self::stage::{PipelineStage, ReplicaSpread};
use self::standby::MemoryPart;
pub use self::standby::StandbyMemory;
pub use self::weights::WeightFormat;
use crate::config::AgentConfig;
use crate::gpu::{Gpu, NvlinkTopology};
use crate::host::{EngineProgram, ReplicaPlan};
use crate::prompt_files::{only_engine_reads_prompts, read_template_text};
use crate::vllm::parsers::InstalledParsers;
use crate::vllm::{EngineTraces, FrontEndInUse};
pub use crate::vllm::{FlagChoice, FlagOrigin};

/// Simulated engines on a host that names no number: two, so that placement has a choice.
const SIMULATED_REPLICAS: u32 = 2;

#[derive(Debug, Clone, Copy)]
pub struct PlanInput<'a> {
    pub engine: &'a EngineProgram,
    pub version: Option<crate::vllm::version::VllmVersion>,
    /// Rust front-end of the installed vLLM, if it has one.
    pub rust_front_end: Option<&'a Path>,
    pub gpus: &'a [Gpu],
    pub links: &'a NvlinkTopology,
    pub(crate) parsers: &'a InstalledParsers,
    pub(crate) rust_parsers: &'a InstalledParsers,
    /// CPUs and shared memory for engines.
    pub resources: HostResources,
    /// Network that NCCL would use between nodes.
    pub transport: &'a NcclTransport,
    pub traces: &'a EngineTraces,
    /// Folder of downloaded models.
    pub downloads: &'a Path,
}

/// Engines that a node runs, and why.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Model name as given; empty for the simulated engine's own.
    pub name: String,
    pub replicas: Vec<ReplicaPlan>,
    pub model: ModelInfo,
    pub layout: Option<GpuLayout>,
    pub front_end: FrontEndChoice,
    pub setup: EnginePlanSetup,
    /// Division over several nodes, if a replica has more than one.
    pub spread: Option<ReplicaSpread>,
    /// Network interface between the nodes, if the user has named one.
    pub interface: String,
    /// Network that NCCL would use between the nodes.
    pub transport: NcclTransport,
    /// Memory of the standby, if there is one on GPUs.
    pub standby: Option<StandbyMemory>,
    /// The host's part of the engines' caches.
    pub host_cache: HostCache,
    /// Files with what the host's engines have cached.
    pub file_cache: FileCache,
    /// Each engine has room for a separate process around its model.
    pub has_workers: bool,
    /// Warnings to read before the plan runs, a sentence each.
    pub warnings: Vec<String>,
}

/// Makes the plan. Reads the model's folder, which may take a while on a network disk.
///
/// # Errors
/// When the model does not fit, or the settings ask for the impossible.
pub fn make_plan(ground: &PlanInput<'_>, config: &AgentConfig) -> Result<Plan, PlanError> {
    let setup = EnginePlanSetup { traces: ground.traces.clone(), ..EnginePlanSetup::new(ground.engine, ground.version, config) };
    let model = if setup.simulated {
        ModelInfo::Unknown { because: "the simulated engine has no model".to_owned() }
    } else if setup.attached {
        ModelInfo::Unknown { because: "its engine runs already".to_owned() }
    } else {
        check_model_path(&config.model)?;
        ModelFacts::read(&config.model, &setup.arguments, ground.downloads)
    };
    let parsers = if setup.simulated { setup.parsers.clone() } else { choose_parsers(ground, config, &setup, &model) };
    let architecture = match &model {
        ModelInfo::Known(facts) if facts.is_generative() => Some(facts.architecture.as_str()),
        ModelInfo::Known(_) => None,
        ModelInfo::Unknown { .. } => setup.simulated.then_some(""),
    };
    let only_engine_reads_prompts =
        architecture.is_some_and(|architecture| only_engine_reads_prompts(architecture, &config.model, &setup.arguments, ground.downloads));
    plan_for_model(ground, config, EnginePlanSetup { parsers, only_engine_reads_prompts, ..setup }, model)
}

fn choose_parsers(ground: &PlanInput<'_>, config: &AgentConfig, setup: &EnginePlanSetup, model: &ModelInfo) -> PlannedParsers {
    let facts = match model {
        ModelInfo::Known(facts) if facts.is_generative() => facts,
        ModelInfo::Known(_) => return PlannedParsers::without("it generates no text"),
        ModelInfo::Unknown { .. } => return PlannedParsers::without("its files are not here"),
    };
    let template = read_template_text(&config.model, &setup.arguments, ground.downloads);
    let choose = |installed: &InstalledParsers| installed.choose(&facts.architecture, template.as_deref());
    let (python, mut rust) = (choose(ground.parsers), choose(ground.rust_parsers));
    // The engine's core has the Python one, so that schemas begin after the reasoning.
    if rust.reasoning.as_ref().is_ok_and(|name| !ground.parsers.has_reasoning_parser(name)) {
        rust.reasoning.clone_from(&python.reasoning);
    }
    PlannedParsers { python, rust }
}

/// Like `make_plan`, for a model that was read before.
fn plan_for_model(ground: &PlanInput<'_>, config: &AgentConfig, setup: EnginePlanSetup, model: ModelInfo) -> Result<Plan, PlanError> {
    let setup = setup.for_model(&model);
    let front_end = front_end::choose(config.front_end, ground.rust_front_end, &setup, &model)?;
    let (spread, mut layout, mut replicas) = lay_out(ground, config, &setup, &model)?;
    let has_workers = ground.resources.allows_workers(replicas.len());
    let host_cache = host_cache::choose(config.host_cache, &setup, &model, layout.as_ref(), ground.resources);
    let copies = (&host_cache, replicas.len() as u64);
    let file_cache = file_cache::choose(config.file_cache, &config.file_cache_dir, &setup, copies, ground.resources);
    let mut standby = None;
    let needs_standby = config.standby && replicas.len() == 1;
    if needs_standby {
        if let Some(share) = layout.as_mut().and_then(|layout| layout.shares.first_mut()).filter(|_| !setup.simulated) {
            standby = Some(standby::divide(&setup, &model, share)?);
        }
        replicas.push(ReplicaPlan { index: 1, gpus: replicas[0].gpus.clone(), is_standby: true });
    }
    let name = config.model.clone();
    let (interface, transport) = (config.replica_interface.clone(), ground.transport.clone());
    let warnings = Vec::new();
    let mut plan = Plan {
        name,
        replicas,
        model,
        layout,
        front_end,
        setup,
        spread,
        interface,
        transport,
        standby,
        host_cache,
        file_cache,
        has_workers,
        warnings,
    };
    plan.warnings = text::warnings(&plan);
    if config.standby && !needs_standby {
        let standing_in = "no standby is started: the replicas of this node stand in for each other";
        plan.warnings.push(standing_in.to_owned());
    }
    Ok(plan)
}

type LaidOut = (Option<ReplicaSpread>, Option<GpuLayout>, Vec<ReplicaPlan>);

fn lay_out(ground: &PlanInput<'_>, config: &AgentConfig, setup: &EnginePlanSetup, model: &ModelInfo) -> Result<LaidOut, PlanError> {
    let (nodes, tp) = (config.nodes_per_replica, config.tp);
    if ground.gpus.is_empty() {
        return match nodes {
            0 | 1 => Ok((None, None, plan_cpu_replicas(config, ground.engine, setup)?)),
            _ => {
                Ok((Some(spread::divide(nodes, 1, tp.max(1))?), None, vec![ReplicaPlan { index: 0, gpus: Vec::new(), is_standby: false }]))
            }
        };
    }
    let question = layout::LayoutRequest { model, gpus: ground.gpus, links: ground.links, tp, replicas: config.replicas, nodes, setup };
    let (spread, layout) = match nodes {
        0 | 1 => (None, layout::plan_layout(&question).map_err(|error| spread::with_proposal(error, &question))?),
        _ => spread::plan_spread(&question).map(|(spread, layout)| (Some(spread), layout))?,
    };
    let sets = layout.shares.iter().flat_map(|share| &share.replicas);
    let replicas = (0..).zip(sets).map(|(index, gpus)| ReplicaPlan { index, gpus: gpus.clone(), is_standby: false }).collect();
    Ok((spread, Some(layout), replicas))
}

fn plan_cpu_replicas(config: &AgentConfig, engine: &EngineProgram, setup: &EnginePlanSetup) -> Result<Vec<ReplicaPlan>, PlanError> {
    if config.tp > 1 && !setup.simulated {
        return Err(PlanError::NoGpus { tp: config.tp });
    }
    let default = match engine {
        EngineProgram::Attached { targets, .. } => u32::try_from(targets.len()).unwrap_or(u32::MAX),
        EngineProgram::Simulated { .. } => SIMULATED_REPLICAS,
        EngineProgram::Vllm { .. } => 1,
    };
    let replicas = if config.replicas == 0 { default } else { config.replicas };
    Ok((0..replicas).map(|index| ReplicaPlan { index, gpus: Vec::new(), is_standby: false }).collect())
}

impl Plan {
    /// Layout of the GPUs of this replica's kind; `None` on the CPU.
    #[must_use]
    pub fn share(&self, replica: &ReplicaPlan) -> Option<&GpuGroupLayout> {
        self.layout.as_ref()?.shares.iter().find(|share| share.replicas.contains(&replica.gpus))
    }

    /// Flags of a replica with that front-end, in the order of its command line.
    #[must_use]
    pub fn choices(&self, replica: &ReplicaPlan, front_end: FrontEndInUse) -> Vec<FlagChoice> {
        let share = self.share(replica);
        let place = flags::ReplicaContext {
            gpu: replica.gpus.first(),
            tp: self.spread.map_or_else(|| u32::try_from(replica.gpus.len()).unwrap_or(u32::MAX), |spread| spread.tp),
            stages: self.spread.map_or(1, |spread| spread.stages),
            memory: self.memory_part(replica),
            shortened_context: share.filter(|share| share.is_context_shortened).and_then(|share| share.context),
            front_end,
            host_cache: self.host_share(replica),
            files: self.file_pool(),
            has_workers: self.has_workers,
        };
        flags::choose_flags(&self.setup, &place)
    }

    /// An engine's copies in the host's memory, if it keeps some.
    pub(crate) fn host_share(&self, replica: &ReplicaPlan) -> Option<&HostCacheShare> {
        match &self.host_cache {
            HostCache::On(share) if !replica.is_standby => Some(share),
            HostCache::On(_) | HostCache::Off(_) => None,
        }
    }

    /// Why there are no copies or files where the settings ask for them, a sentence each.
    pub(crate) fn missing_tiers(&self) -> impl Iterator<Item = String> {
        let copies = match &self.host_cache {
            HostCache::Off(because) if *because != NoHostCache::Unset => Some(format!("agent.host_cache has no effect: {because}")),
            HostCache::Off(_) | HostCache::On(_) => None,
        };
        let files = match &self.file_cache {
            FileCache::Off(because) if *because != NoFileCache::Unset => Some(format!("agent.file_cache has no effect: {because}")),
            FileCache::Off(_) | FileCache::On(_) => None,
        };
        copies.into_iter().chain(files)
    }

    /// The folder of files that engines share, if they keep some.
    pub(crate) fn file_pool(&self) -> Option<&FilePoolPlan> {
        match &self.file_cache {
            FileCache::On(pool) => Some(pool),
            FileCache::Off(_) => None,
        }
    }

    /// Most tokens that an engine computes in one step; 0 if unknown.
    #[must_use]
    pub fn token_budget(&self, replica: &ReplicaPlan) -> u32 {
        match self.memory_part(replica) {
            MemoryPart::Standby(standby) => standby.steps.tokens,
            MemoryPart::Alone | MemoryPart::BesideStandby(_) => self.setup.token_budget(replica.gpus.first()),
        }
    }

    /// Share of its GPUs' memory that an engine may use.
    #[must_use]
    pub fn utilization(&self, replica: &ReplicaPlan) -> f64 {
        self.memory_part(replica).utilization(&self.setup)
    }

    /// Replicas that take requests at any time.
    pub fn in_service(&self) -> impl Iterator<Item = &ReplicaPlan> {
        self.replicas.iter().filter(|replica| !replica.is_standby)
    }

    fn memory_part(&self, replica: &ReplicaPlan) -> MemoryPart<'_> {
        match &self.standby {
            None => MemoryPart::Alone,
            Some(standby) if replica.is_standby => MemoryPart::Standby(standby),
            Some(standby) => MemoryPart::BesideStandby(standby),
        }
    }

    /// Plan in one paragraph, for the log.
    #[must_use]
    pub fn summary(&self) -> String {
        text::summary(self)
    }

    /// Plan for people: GPUs, layout, flags, front-end, warnings, each with its reason.
    #[must_use]
    pub fn page(&self) -> String {
        text::page(self)
    }

    #[must_use]
    pub fn json(&self) -> serde_json::Value {
        text::json::of(self)
    }
}

#[cfg(test)]
mod tests;
