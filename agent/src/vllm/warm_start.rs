//! Starts of vLLM from a process that has imported it before: which engines can start so, and how
//! that process is created.
//!
//! `vllm serve` imports its modules in each of its processes: 54 of the 82 s that an engine on an
//! H100 needed from kill -9 until it was ready (0.33, caches warm). The process that runs
//! `hostler_start.py` imports once, waits for the engine's command, and lets the engine's other
//! processes be forks of itself. Decision 33 has the measurements.

use std::fs;
use std::io;
use std::path::Path;

use super::arguments::{EngineArguments, value_of};
use super::command_line::CommandLine;
use super::version::VllmVersion;
use crate::process::ENGINE_OF;

/// First release with which this was tried.
const WARM_START_SINCE: VllmVersion = VllmVersion::new(0, 32);

const SCRIPT_NAME: &str = "hostler_start.py";
const SCRIPT: &str = include_str!("warm_start/hostler_start.py");

/// Variables that belong to one engine. A spare gets them when it becomes that engine.
const OF_ONE_ENGINE: [&str; 5] = [ENGINE_OF, "TMPDIR", "PYTHONPATH", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"];

/// The command that creates a spare in `directory`, for engines with this command.
///
/// `Err` says why these engines cannot start from one.
pub(crate) fn spare_command(
    version: Option<VllmVersion>,
    interpreter: Option<&Path>,
    engine: &CommandLine,
    directory: &Path,
) -> Result<CommandLine, &'static str> {
    if version.is_none_or(|version| version < WARM_START_SINCE) {
        return Err("this was not tried with this release of vLLM");
    }
    let program = interpreter.ok_or("the program is not the script that vLLM installs")?.to_owned();
    let mut set: Vec<_> = engine.set.iter().filter(|(name, _)| !OF_ONE_ENGINE.contains(name)).cloned().collect();
    set.push((ENGINE_OF, directory.into()));
    Ok(CommandLine { program, arguments: vec![directory.join(SCRIPT_NAME).into()], set, ..engine.clone() })
}

/// Whether processes of an engine on this many GPUs may be forks of the first one.
///
/// With several GPUs vLLM starts their workers at the same time only where it spawns them, and it
/// refuses to share images by `torch_shm` with forks (0.33).
pub(crate) fn may_fork(gpus: usize, arguments: &[String]) -> bool {
    let refused = value_of(arguments, "--mm-tensor-ipc") == Some("torch_shm") || EngineArguments(arguments).has("--numa-bind");
    gpus <= 1 && !refused
}

/// Writes the script into a spare's directory, which is created.
pub(crate) fn write(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    fs::write(directory.join(SCRIPT_NAME), SCRIPT)
}

#[cfg(test)]
mod tests;
