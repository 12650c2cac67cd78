//! What a plan needs to know of this host, asked for: which vLLM is installed, and what the model's folder says. The waiting around `plan`.

use std::path::{Path, PathBuf};

use super::what_if::Described;
use super::{Ground, Plan, PlanError, Room, front_end, plan};
use crate::AgentError;
use crate::config::{AgentConfig, EngineKind};
use crate::gpu::{Gpu, Links};
use crate::host::{self, Host, HostError, Resolved};
use crate::prompt_files;
use crate::vllm::releases::{NEWEST, RUST_FRONT_END_SINCE};
use crate::vllm::version::{self, Installed, Version, VersionError};

/// Which vLLM is behind a program; `None` for the simulated engine, and for a vLLM that does not tell its version. Takes seconds.
///
/// # Errors
/// When the program cannot be started.
pub async fn installed(engine: &Resolved) -> Result<Option<Installed>, VersionError> {
    let Resolved::Vllm { program } = engine else { return Ok(None) };
    match version::probe(program).await {
        Ok(installed) => Ok(Some(installed)),
        Err(error @ VersionError::Start { .. }) => Err(error),
        Err(error) => {
            tracing::warn!(%error, "the version of vLLM is unknown; only flags that every release has are used");
            Ok(None)
        }
    }
}

/// What there is to run engines with, or is supposed to be.
#[derive(Debug)]
pub struct Found {
    /// Which program becomes an engine.
    pub engine: Resolved,
    /// The installed vLLM, if it is one and said what it is.
    pub installed: Option<Installed>,
    /// The GPUs that may be used.
    pub gpus: Vec<Gpu>,
    /// Which of them are joined by NVLink.
    pub links: Links,
    /// What else there is for engines.
    pub room: Room,
}

/// Reads the model's folder and plans. On a thread of its own, since the folder may be on a slow disk.
///
/// # Errors
/// When the model does not fit, or what the settings ask for cannot be.
pub async fn make(found: Found, config: AgentConfig) -> Result<Plan, PlanError> {
    let planned = tokio::task::spawn_blocking(move || {
        let Found { engine, installed, gpus, links, room } = found;
        let named = front_end::named_binary(std::env::var_os("VLLM_RUST_FRONTEND_PATH"));
        let rust: Option<PathBuf> = named.or_else(|| installed.as_ref()?.rust_front_end.clone());
        let ground = Ground {
            engine: &engine,
            version: installed.as_ref().map(|installed| installed.version),
            rust_front_end: rust.as_deref(),
            gpus: &gpus,
            links: &links,
            room,
            downloads: &prompt_files::hub_cache(|name| std::env::var_os(name)),
        };
        plan(&ground, &config)
    });
    planned.await.expect("planning does not panic")
}

/// What is planned for somebody who asks, instead of what is here.
#[derive(Debug, Clone, Default)]
pub struct Supposed {
    /// GPUs.
    pub described: Option<Described>,
    /// A release of vLLM. It is taken to have the Rust front-end where such releases have it.
    pub version: Option<Version>,
}

/// A plan that nothing is started from.
#[derive(Debug, Clone)]
pub struct Preview {
    /// The plan.
    pub plan: Plan,
    /// What it supposes, a sentence each.
    pub supposes: Vec<String>,
}

/// Plans as the agent would, also on a host that lacks vLLM or GPUs.
///
/// # Errors
/// As the agent's start: when nothing can be run, the model does not fit, or what the settings ask for cannot be.
pub async fn preview(config: AgentConfig, supposed: Supposed) -> Result<Preview, AgentError> {
    let mut supposes = Vec::new();
    if supposed.described.is_some() && config.model.is_empty() && config.engine != EngineKind::Simulated {
        return Err(HostError::NoModel.into());
    }
    let this_program = std::env::current_exe().map_err(AgentError::OwnPath)?;
    let vllm = host::look_up(&config.vllm_bin, std::env::var_os("PATH").as_deref());
    let (engine, installed) = match host::resolve(config.engine, !config.model.is_empty(), &vllm, &this_program) {
        Ok(engine) => (engine.clone(), installed(&engine).await?),
        Err(HostError::NoVllm { name, .. }) => {
            if supposed.version.is_none() {
                supposes.push(format!("vLLM is not installed here: the plan is for {NEWEST}; another one is named with --vllm-version"));
            }
            (Resolved::Vllm { program: name.into() }, Some(shipped(NEWEST)))
        }
        Err(other) => return Err(other.into()),
    };
    let installed = supposed.version.map(shipped).or(installed);
    let (gpus, links, room) = match supposed.described {
        Some(Described { gpus, links }) => {
            supposes.push("each engine has at least 8 CPUs, and 512 MiB of shared memory".to_owned());
            (gpus, links, Room::ample())
        }
        None => {
            let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
            let host = Host::discover(&engine, &config.nvml_lib, visible.as_deref()).await?;
            if let (Some(reason), Resolved::Vllm { .. }) = (&host.no_gpu_because, &engine) {
                supposes.push(format!("{reason}: to plan for another host, describe its GPUs, as with --gpus 4x80 --nvlink"));
            }
            (host.gpus, host.driver.map(|driver| driver.links().clone()).unwrap_or_default(), Room::here())
        }
    };
    Ok(Preview { plan: make(Found { engine, installed, gpus, links, room }, config).await?, supposes })
}

/// A release as it comes for GPUs. Where its Rust front-end lies does not matter to a plan.
fn shipped(version: Version) -> Installed {
    let rust_front_end = (version >= RUST_FRONT_END_SINCE).then(|| Path::new("vllm-rs").to_owned());
    Installed { version, rust_front_end }
}
