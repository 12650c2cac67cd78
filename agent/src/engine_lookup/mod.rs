//! Lookup of the program that becomes an engine, on this host or in the image of the settings.
//!
//! It looks at files and starts nothing. The agent's start, previews and checks call it.

mod needed_files;

use std::env;
use std::path::Path;

use hostler_boot::program::find_program;

use crate::config::{AgentConfig, EngineKind};
use crate::container::{Container, ContainerError};
use crate::host::{EngineProgram, HostError, choose_program};

/// Finds the program that becomes an engine. `this_program` contains the simulated engine.
pub(crate) fn find_engine(config: &AgentConfig, this_program: &Path) -> Result<EngineProgram, HostError> {
    let container = if config.engine == EngineKind::Simulated { None } else { find_container(config)? };
    let mut vllm = find_program(&config.vllm_bin, env::var_os("PATH").as_deref());
    if container.is_some() {
        // Whether the image has it shows when it is asked for its version.
        vllm.found = Some(config.vllm_bin.clone());
    }
    Ok(match choose_program(config.engine, !config.model.is_empty(), &vllm, this_program)? {
        EngineProgram::Vllm { program, .. } => EngineProgram::Vllm { program, container },
        other => other,
    })
}

/// Container of the settings, with the files of the host that an engine needs; `None` if they name
/// no image.
pub(crate) fn find_container(config: &AgentConfig) -> Result<Option<Container>, ContainerError> {
    let container = Container::of(config)?;
    container.map(|container| container.with_binds(needed_files::find(config, |name| env::var_os(name)))).transpose()
}
