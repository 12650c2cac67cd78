//! Launch of the replicas in an agent's plan: command lines, engines that an earlier agent has
//! left, CPUs and GPUs.
//!
//! `Agent::run` calls it. A replica over several nodes is launched by `gang_launch`.

use std::path::PathBuf;
use std::sync::Arc;

use tokio_util::task::TaskTracker;

use crate::advise::EngineSetup;
use crate::config::{EngineStart, Profile};
use crate::engine::start_order::StartOrder;
use crate::engine::warm_starts::WarmStarts;
use crate::engine::{AdoptedLife, Engine, EngineSpec};
use crate::host::{EngineProgram, HostError, ReplicaPlan};
use crate::keeper::SurvivingEngine;
use crate::keeper::wire::ProcessSpec;
use crate::stage::ModelStage;
use crate::vllm::arguments::model_names;
use crate::vllm::command_line::{SIMULATED_MODEL, command_line};
use crate::vllm::{CommandLine, FrontEndInUse, LaunchContext, plugin, warm_start};
use crate::{Agent, AgentError, gpu, host, node, prompt_files, run_dir};

pub(crate) type ReplicaLaunch<'a> = (&'a ReplicaPlan, EngineSpec, Option<AdoptedLife>);

/// Launches, other engines that a dead agent left, and how this node's engines start.
type NodeLaunch<'a> = (Vec<ReplicaLaunch<'a>>, Vec<SurvivingEngine>, Option<Arc<WarmStarts>>);

impl Agent {
    /// Creates the launch of each replica.
    ///
    /// If a dead agent left exactly the engine that would be started, its life continues. Also
    /// returns the other engines that the dead agent left.
    pub(crate) fn engine_specs(&self, mut survivors: Vec<SurvivingEngine>) -> Result<NodeLaunch<'_>, AgentError> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // A standby computes only while the other engine does not.
        let in_service = self.plan.in_service().count();
        let cores = u32::try_from(cores / in_service.max(1)).unwrap_or(1).max(1);
        let kv_cache_gib = host::kv_cache_gib(self.plan.replicas.len());
        let python_path = std::env::var_os("PYTHONPATH").unwrap_or_default();
        let spec_in = |plan, directory: PathBuf| {
            let plan: &ReplicaPlan = plan;
            let launch = LaunchContext {
                engine: &self.engine,
                version: self.plan.setup.version,
                replica: plan,
                // A single engine has the host to itself and binds to cores as it likes.
                cores: (plan.gpus.is_empty() && in_service > 1).then_some(cores),
                kv_cache_gib: kv_cache_gib.filter(|_| plan.gpus.is_empty()),
                directory: &directory,
                config: &self.config,
                choices: &self.plan.choices(plan, self.plan.front_end.in_use),
                front_end: self.plan.front_end.in_use,
                python_path: &python_path,
                bytecode_cache: self.bytecode_cache.as_deref(),
            };
            let log = self.logs.join(run_dir::log_name(&self.host, &self.node, plan.index));
            let mut spec = EngineSpec::new(&launch, log, self.keepers.clone())?;
            if self.plan.front_end.may_fall_back {
                let choices = self.plan.choices(plan, FrontEndInUse::Python);
                spec.fallback = Some(command_line(&LaunchContext { choices: &choices, front_end: FrontEndInUse::Python, ..launch })?);
            }
            (spec.node, spec.if_agent_dies) = (self.node.clone(), self.fate);
            spec.run_dirs = Some(self.run_dir.held().clone());
            spec.file_pool = self.plan.file_pool().map(|pool| pool.folder.clone());
            spec.file_log.clone_from(&self.file_log);
            Ok::<_, HostError>(spec)
        };
        let described = self.plan.replicas.iter().map(|plan| {
            if let Some(at) = survivors.iter().position(|survivor| survivor.life_record.index == plan.index) {
                // A surviving engine stays in its directory.
                let spec = spec_in(plan, survivors[at].directory.clone())?;
                if let Some(fell_back) = survivors[at].matches_command(&spec.command, spec.fallback.as_ref(), spec.version) {
                    let adopted = AdoptedLife { survivor: survivors.swap_remove(at), uses_fallback: fell_back };
                    return Ok((plan, spec, Some(adopted)));
                }
            }
            Ok((plan, spec_in(plan, self.run_dir.engine(plan.index))?, None))
        });
        // All commands are known to be valid before the first engine starts.
        let mut described: Vec<_> = described.collect::<Result<_, HostError>>()?;
        let command = described.first().map(|(_, spec, _)| &spec.command);
        if let Some(allowed) = std::env::var_os("VLLM_PLUGINS")
            && command.is_some_and(CommandLine::has_plugin)
            && plugin::is_excluded_by(&allowed)
        {
            tracing::warn!(
                ?allowed,
                "VLLM_PLUGINS does not name `hostler`, so the threads of the engine's core wait longer for each other: add it to that list"
            );
        }
        let start_order = Arc::new(StartOrder::for_replicas(&self.engine, &self.plan.replicas, command, self.config.startup_timeout));
        let warm_starts = command.and_then(|command| self.warm_starts(command)).map(Arc::new);
        // The parts of an engine over several nodes read where the model lies.
        let stage =
            (self.plan.spread.is_none()).then(|| ModelStage::of(&self.config, Arc::clone(&self.load_turns))).flatten().map(Arc::new);
        for (_, spec, _) in &mut described {
            spec.stage.clone_from(&stage);
            spec.start_order = Arc::clone(&start_order);
            spec.warm_starts.clone_from(&warm_starts);
        }
        Ok((self.bind_to_gpus(described), survivors, warm_starts))
    }

    /// How engines with this command start, unless each start is plain.
    fn warm_starts(&self, command: &CommandLine) -> Option<WarmStarts> {
        let is_vllm = matches!(self.engine, EngineProgram::Vllm { .. });
        let is_spread = self.plan.spread.is_some();
        if !is_vllm || is_spread || self.config.engine_start == EngineStart::Plain || self.config.profile == Profile::Conservative {
            return None;
        }
        let directory = self.run_dir.spares();
        let spare = warm_start::spare_command(self.plan.setup.version, self.interpreter.as_deref(), command, &directory)
            .map_err(str::to_owned)
            .and_then(|spare| warm_start::write(&directory).map_err(|error| error.to_string()).map(|()| spare));
        match spare {
            Ok(spare) => {
                let process = ProcessSpec::new(self.keepers.program(), &spare, &directory);
                Some(WarmStarts::new(self.keepers.clone(), process, self.config.engine_start == EngineStart::Spare))
            }
            Err(because) => {
                tracing::info!(because, "engines start without a spare");
                None
            }
        }
    }

    pub(crate) fn start_replicas(&self, described: Vec<ReplicaLaunch<'_>>, supervisors: &TaskTracker) -> Vec<node::Replica> {
        let replica = |(plan, spec, adopted): ReplicaLaunch<'_>| {
            let gpu = plan.gpus.first();
            let traits = node::ReplicaTraits {
                gpu: gpu.map(|gpu| gpu.name.clone()).unwrap_or_default(),
                token_budget: self.plan.token_budget(plan),
                is_standby: plan.is_standby,
                prompt_files: prompt_files::PromptFileSource::new(&self.engine, &self.config),
                setup: self.engine_setup(plan, &spec.command),
            };
            node::Replica::new(plan.index, Engine::supervise(spec, adopted, supervisors), traits)
        };
        described.into_iter().map(replica).collect()
    }

    /// Binds engines to the CPUs next to their GPUs, and lets them start only once those GPUs are
    /// free.
    fn bind_to_gpus<'a>(&self, mut specs: Vec<ReplicaLaunch<'a>>) -> Vec<ReplicaLaunch<'a>> {
        let Some(driver) = &self.driver else { return specs };
        let gpus: Vec<_> = self.plan.in_service().map(|plan| plan.gpus.clone()).collect();
        let bindings = if self.config.bind_cpus { gpu::plan_cpu_bindings(driver, &gpus) } else { vec![None; gpus.len()] };
        for (plan, spec, _) in &mut specs {
            // A standby has the CPUs of the engine that it stands in for.
            let bound = gpus.iter().position(|gpus| *gpus == plan.gpus);
            spec.cpu_binding = bound.and_then(|at| bindings[at].clone());
            spec.gpu_availability =
                (!plan.gpus.is_empty()).then(|| gpu::GpuAvailability::new(driver.clone(), plan.gpus.clone(), self.plan.utilization(plan)));
        }
        specs
    }

    /// Setup of a replica's engine, for the advisor and the routers.
    fn engine_setup(&self, plan: &ReplicaPlan, command: &CommandLine) -> EngineSetup {
        let arguments: Vec<String> = command.arguments.iter().map(|argument| argument.to_string_lossy().into_owned()).collect();
        let model = Some(self.config.model.as_str()).filter(|model| !model.is_empty()).unwrap_or(SIMULATED_MODEL);
        let is_attached = matches!(self.engine, EngineProgram::Attached { .. });
        EngineSetup {
            model_names: if is_attached { Vec::new() } else { model_names(model, &arguments) },
            simulated: matches!(self.engine, EngineProgram::Simulated { .. }),
            attached: is_attached,
            profile: self.config.profile.as_str(),
            path_alias: self.plan.setup.path_alias().map(str::to_owned),
            python_front_end_reason: match self.plan.front_end.in_use {
                FrontEndInUse::Python => self.plan.front_end.because.clone(),
                FrontEndInUse::Rust => String::new(),
            },
            tensor_parallel: u32::try_from(plan.gpus.len()).unwrap_or(u32::MAX).max(1),
            gpus: plan.gpus.clone(),
            has_nvlink_mesh: self.plan.share(plan).is_none_or(|share| !share.over_pcie),
            weights_bytes: self.plan.model.facts().map(|facts| facts.weight_bytes),
            kv_token_bytes: self.plan.share(plan).and_then(|share| Some(share.memory.as_ref()?.token_bytes())).unwrap_or(0),
            host_kv_tokens: self.plan.host_share(plan).map_or(0, |share| share.tokens),
            arguments,
        }
    }
}
