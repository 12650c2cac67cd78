//! Checks of the environment that an agent would find with given settings.
//!
//! Each answers one question and starts nothing. `hostler doctor` runs them.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::config::AgentConfig;
pub use crate::gang::check_spread;
use crate::gpu::Gpu;
use crate::host::{EngineProgram, Host};
use crate::plan::{ModelFacts, ModelInfo, check_model_path};
use crate::{AgentError, current_job, prompt_files, run_dir};

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
    let engine = EngineProgram::Vllm { program: config.vllm_bin.clone() };
    let host = Host::discover(&engine, config).await?;
    Ok(match host.no_gpu_because {
        Some(reason) => Err(reason),
        None => Ok(host.gpus),
    })
}
