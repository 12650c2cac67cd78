//! Inventory of this host for a plan: the installed vLLM, and the contents of the model's folder.
//!
//! This module does the waiting around `plan`.

use std::path::{Path, PathBuf};

use hostler_boot::TraceSettings;

use super::described_gpus::DescribedGpus;
use super::host_resources::{CPUS_PER_ENGINE, SHARED_BYTES_PER_ENGINE};
use super::{HostResources, ModelInfo, NcclTransport, Plan, PlanError, PlanInput, front_end, hub, make_plan};
use crate::config::{AgentConfig, EngineKind};
use crate::container::Container;
use crate::gpu::{Gpu, NvlinkTopology};
use crate::host::{EngineProgram, Host, HostError};
use crate::prompt_files;
use crate::vllm::EngineTraces;
use crate::vllm::arguments::expand_config_file;
use crate::vllm::parsers::InstalledParsers;
use crate::vllm::releases::{NEWEST_KNOWN, RUST_FRONT_END_SINCE};
use crate::vllm::version::{self, InstalledVllm, VllmVersion, VllmVersionError};
use crate::{AgentError, engine_lookup};

/// Finds out which vLLM a program is.
///
/// `None` for the simulated engine, and for a vLLM that does not report its version. Takes seconds.
///
/// # Errors
/// When the program, or the container that it runs in, cannot be started.
pub async fn probe_installed(engine: &EngineProgram) -> Result<Option<InstalledVllm>, VllmVersionError> {
    let EngineProgram::Vllm { program, container } = engine else { return Ok(None) };
    match version::probe(program, container.as_ref()).await {
        Ok(installed) => Ok(Some(installed)),
        Err(error @ (VllmVersionError::Start { .. } | VllmVersionError::NoContainer { .. })) => Err(error),
        Err(error) => {
            tracing::warn!(%error, "the version of vLLM is unknown; only flags that every release has are used");
            Ok(None)
        }
    }
}

/// Resources for engines, found here or assumed by a preview.
#[derive(Debug)]
pub struct Inventory {
    pub engine: EngineProgram,
    /// Installed vLLM, if the program is one and reported its version.
    pub installed: Option<InstalledVllm>,
    pub gpus: Vec<Gpu>,
    pub links: NvlinkTopology,
    /// CPUs and shared memory for engines.
    pub resources: HostResources,
    /// Network that NCCL would use between nodes.
    pub transport: NcclTransport,
}

/// Reads the model's folder and plans, on its own thread, because the folder may be on a slow disk.
///
/// # Errors
/// When the model does not fit, or the settings ask for the impossible.
pub async fn plan_inventory(found: Inventory, config: AgentConfig) -> Result<Plan, PlanError> {
    let Inventory { engine, installed, gpus, links, resources: room, transport } = found;
    let container = match &engine {
        EngineProgram::Vllm { container, .. } => container.clone(),
        EngineProgram::Simulated { .. } | EngineProgram::Attached { .. } => None,
    };
    // A container does not inherit that variable.
    let variable = std::env::var_os("VLLM_RUST_FRONTEND_PATH").filter(|_| container.is_none());
    let named = front_end::binary_from_environment(variable);
    let rust: Option<PathBuf> = named.or_else(|| installed.as_ref()?.rust_front_end.clone());
    let parsers = installed.as_ref().map_or_else(InstalledParsers::default, |installed| installed.parsers.clone());
    let rust_parsers = match &rust {
        Some(binary) if parsers != InstalledParsers::Assumed => InstalledParsers::of_rust_front_end(binary, container.as_ref()).await,
        _ => parsers.clone(),
    };
    let downloads = prompt_files::hub_cache(|name| std::env::var_os(name));
    let interpreter = installed.as_ref().and_then(|installed| installed.interpreter.as_deref());
    let python = interpreter.map(|interpreter| (interpreter, container.as_ref()));
    let not_fetched = fetch_description(python, &config, &downloads).await;
    let planned = tokio::task::spawn_blocking(move || {
        let traces = match engine {
            EngineProgram::Simulated { .. } | EngineProgram::Attached { .. } => EngineTraces::Unasked,
            EngineProgram::Vllm { .. } => EngineTraces::of(TraceSettings::from_process(), installed.as_ref()),
        };
        let ground = PlanInput {
            engine: &engine,
            version: installed.as_ref().map(|installed| installed.version),
            rust_front_end: rust.as_deref(),
            gpus: &gpus,
            links: &links,
            resources: room,
            transport: &transport,
            traces: &traces,
            parsers: &parsers,
            rust_parsers: &rust_parsers,
            downloads: &downloads,
        };
        make_plan(&ground, &config)
    });
    let mut plan = planned.await.expect("planning does not panic")?;
    let wants_facts = !plan.setup.simulated && !plan.setup.attached;
    if let (ModelInfo::Unknown { because }, Some(reason)) = (&mut plan.model, not_fetched.filter(|_| wants_facts)) {
        *because = reason;
    }
    Ok(plan)
}

/// Fetches the small files of a model that is not downloaded yet. Without them, the engine starts with
/// its own defaults. Returns why they are not here.
async fn fetch_description(python: Option<(&Path, Option<&Container>)>, config: &AgentConfig, downloads: &Path) -> Option<String> {
    let (name, given, folder) = (config.model.clone(), config.engine_args.clone(), downloads.to_owned());
    // The folder of downloads may be on a slow disk, and a router may serve on this thread already.
    let looked = tokio::task::spawn_blocking(move || {
        let arguments = expand_config_file(&given);
        hub::may_fetch(&name, &arguments, &folder, |name| std::env::var_os(name)).then_some(arguments)
    });
    let arguments = looked.await.expect("looking for a model does not panic")?;
    let model = &config.model;
    let Some((interpreter, container)) = python else {
        let folder = downloads.display();
        return Some(format!(
            "it is not downloaded to {folder}, and nobody was asked whether there is such a model, because that takes vLLM's Python: \
             `hf download {model} config.json` first, or decide with --tp"
        ));
    };
    tracing::info!(model = config.model, "fetching the model's description: it is not downloaded yet");
    let error = hub::fetch(interpreter, container, &config.model, &arguments).await.err()?;
    tracing::warn!(model = config.model, %error, "the model's description cannot be fetched, so nothing can be computed for it");
    Some(error.explain(model))
}

/// Assumptions of a preview in place of this host.
#[derive(Debug, Clone, Default)]
pub struct PreviewRequest {
    pub described_gpus: Option<DescribedGpus>,
    /// Release of vLLM. It is assumed to have the Rust front-end if such releases have it.
    pub version: Option<VllmVersion>,
}

/// A plan that starts nothing.
#[derive(Debug, Clone)]
pub struct PlanPreview {
    pub plan: Plan,
    /// Assumptions of the preview, a sentence each.
    pub assumptions: Vec<String>,
}

/// Plans as the agent would, even on a host without vLLM or GPUs.
///
/// # Errors
/// Same as the agent's start: when nothing can be run, the model does not fit, or the settings ask
/// for the impossible.
pub async fn preview(config: AgentConfig, supposed: PreviewRequest) -> Result<PlanPreview, AgentError> {
    let mut supposes = Vec::new();
    if supposed.described_gpus.is_some() && config.model.is_empty() && config.engine != EngineKind::Simulated {
        return Err(HostError::NoModel.into());
    }
    let this_program = std::env::current_exe().map_err(AgentError::OwnPath)?;
    let (engine, installed) = match engine_lookup::find_engine(&config, &this_program) {
        Ok(engine) => (engine.clone(), probe_installed(&engine).await?),
        Err(HostError::NoVllm { name, .. }) => {
            if supposed.version.is_none() {
                supposes
                    .push(format!("vLLM is not installed here: the plan is for {NEWEST_KNOWN}; another one is named with --vllm-version"));
            }
            (EngineProgram::Vllm { program: name.into(), container: None }, Some(assume_installed(NEWEST_KNOWN)))
        }
        Err(other) => return Err(other.into()),
    };
    let installed = supposed.version.map(assume_installed).or(installed);
    let (gpus, links, room, transport) = match supposed.described_gpus {
        Some(DescribedGpus { gpus, links }) => {
            let shared_mib = SHARED_BYTES_PER_ENGINE >> 20;
            supposes.push(format!("each engine has at least {CPUS_PER_ENGINE} CPUs, and {shared_mib} MiB of shared memory"));
            (gpus, links, HostResources::unlimited(), NcclTransport::Unknown)
        }
        None => {
            let host = Host::discover(&engine, &config).await?;
            if let (Some(reason), EngineProgram::Vllm { .. }) = (&host.no_gpu_because, &engine) {
                supposes.push(format!("{reason}: to plan for another host, describe its GPUs, as with --gpus 4x80 --nvlink"));
            }
            let links = host.driver.map(|driver| driver.links().clone()).unwrap_or_default();
            (host.gpus, links, HostResources::detect(&config.file_cache_dir), NcclTransport::detect())
        }
    };
    Ok(PlanPreview {
        plan: plan_inventory(Inventory { engine, installed, gpus, links, resources: room, transport }, config).await?,
        assumptions: supposes,
    })
}

/// Assumes a release built for GPUs, which includes OpenTelemetry by now.
///
/// The location of its Rust front-end does not matter to a plan.
fn assume_installed(version: VllmVersion) -> InstalledVllm {
    let rust_front_end = (version >= RUST_FRONT_END_SINCE).then(|| Path::new("vllm-rs").to_owned());
    InstalledVllm {
        version,
        interpreter: None,
        lacks_bytecode: false,
        rust_front_end,
        has_opentelemetry: true,
        parsers: InstalledParsers::Assumed,
    }
}
