//! Checks of the environment that an agent would find with given settings.
//!
//! Each answers one question, and only `try_image` starts something. `hostler doctor` runs them.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::config::AgentConfig;
use crate::engine_lookup::find_container;
pub use crate::gang::check_spread;
use crate::gpu::Gpu;
use crate::host::{EngineProgram, Host, HostError};
use crate::plan::{ModelFacts, ModelInfo, check_model_path};
use crate::vllm::version::{VllmVersion, probe};
use crate::{AgentError, container, current_job, prompt_files, run_dir};

/// Batch job that this process belongs to, in words.
#[must_use]
pub fn current_job_name() -> Option<String> {
    current_job().map(|job| format!("{} {job}", job.scheduler.as_str()))
}

/// Id of the batch job of this process, as the scheduler's own commands take it.
#[must_use]
pub fn current_job_id() -> Option<String> {
    current_job().map(|job| job.id)
}

/// Checks that the model exists.
///
/// `Some` says why a plan would know nothing of the model: it may have to be downloaded first.
/// `variable` reads the environment of engines.
///
/// # Errors
/// When the settings name a path that does not exist.
pub fn check_model(config: &AgentConfig, variable: impl Fn(&str) -> Option<OsString>) -> Result<Option<String>, AgentError> {
    check_model_path(&config.model)?;
    match ModelFacts::read(&config.model, &config.engine_args, &prompt_files::hub_cache(variable)) {
        ModelInfo::Known(_) => Ok(None),
        ModelInfo::Unknown { because } => Ok(Some(because)),
    }
}

/// Directory where the agent's sockets would be.
///
/// # Errors
/// When others could reach the sockets there, or their paths would be too long.
pub fn check_run_dir(config: &AgentConfig) -> Result<PathBuf, AgentError> {
    Ok(run_dir::check(&config.run_dir)?)
}

/// GPUs that engines may use, or why there are none.
///
/// # Errors
/// When the driver does not work, or this process may use none of its GPUs.
pub async fn find_gpus(config: &AgentConfig) -> Result<Result<Vec<Gpu>, String>, AgentError> {
    let engine = EngineProgram::Vllm { program: config.vllm_bin.clone(), container: None };
    let host = Host::discover(&engine, config).await?;
    Ok(match host.no_gpu_because {
        Some(reason) => Err(reason),
        None => Ok(host.gpus),
    })
}

/// A vLLM that answers in a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VllmInImage {
    pub version: VllmVersion,
    pub image: PathBuf,
    pub runtime: PathBuf,
}

/// Programs that run the image of the settings, in the order in which they are looked for; empty if
/// the settings name no image.
#[must_use]
pub fn container_runtimes(config: &AgentConfig) -> Vec<PathBuf> {
    match (config.image.as_os_str().is_empty(), config.container.as_os_str().is_empty()) {
        (true, _) => Vec::new(),
        (false, true) => container::RUNTIMES.map(PathBuf::from).to_vec(),
        (false, false) => vec![config.container.clone()],
    }
}

/// Asks the vLLM in the image of the settings for its version. `None` if they name no image.
///
/// Takes up to three minutes.
///
/// # Errors
/// When runtime or image are missing, or no vLLM answers in it.
pub async fn try_image(config: &AgentConfig) -> Result<Option<VllmInImage>, AgentError> {
    let Some(container) = find_container(config).map_err(HostError::from)? else { return Ok(None) };
    let version = probe(&config.vllm_bin, Some(&container)).await?.version;
    Ok(Some(VllmInImage { version, image: container.image().to_owned(), runtime: container.runtime().to_owned() }))
}
