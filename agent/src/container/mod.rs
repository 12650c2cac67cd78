//! The container that vLLM runs in where `agent.image` names an image, and the command of its
//! runtime.
//!
//! The runtime is Apptainer, or Singularity, which takes the same words. A container has its own
//! files and nothing else: processes, network, devices, shared memory and the user are the host's.
//! So the runtime is one more process between keeper and engine, which passes signals on, ends as
//! the engine ends, and takes the engine with it when it is killed. All paths are the same inside,
//! so that nothing else knows of the container.

pub(crate) mod refusal;

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use hostler_boot::program::find_program;
use tokio::process::Command;

use crate::config::AgentConfig;

/// Runtimes that are looked for, in this order.
pub(crate) const RUNTIMES: [&str; 2] = ["apptainer", "singularity"];

/// Runtimes that take other words.
const OTHER_RUNTIMES: [&str; 4] = ["podman", "podman-hpc", "shifter", "docker"];

/// A host with NVIDIA's driver has this device.
const NVIDIA_DEVICE: &str = "/dev/nvidiactl";

/// Variables of the host that do not reach the image's programs, because they name programs,
/// libraries and Python packages of the host.
///
/// A runtime passes all others on. `APPTAINERENV_PYTHONPATH` is its own way to set one of these.
pub(crate) const OF_THE_HOST: [&str; 10] = [
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "PYTHONUSERBASE",
    "LD_PRELOAD",
    "CC",
    "CXX",
    "CUDA_HOME",
    "CUDA_PATH",
    "VLLM_RUST_FRONTEND_PATH",
];

/// Home is the host's, and so are packages that `pip install --user` has left there.
pub(crate) const NO_USER_PACKAGES: (&str, &str) = ("PYTHONNOUSERSITE", "1");

/// Why there is no container to run an image in. Each says what to change.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ContainerError {
    #[error(
        "cannot find {name} (looked for {searched}), which runs the image of agent.image: load its module, or name the program with --container PATH"
    )]
    NoRuntime { name: String, searched: String },
    #[error("`{name}` (agent.container) takes other words than Apptainer: name `apptainer` or `singularity`")]
    OtherRuntime { name: String },
    #[error(
        "cannot read the image {image} (agent.image): {reason}; it is a file of `apptainer build`, or a folder of `apptainer build --sandbox`"
    )]
    NoImage { image: String, reason: String },
    #[error("the image {image} is not on this host: fetch it once with `apptainer pull vllm.sif {image}`, and name that file")]
    NotFetched { image: String },
    #[error("--container (agent.container) is for an image: name one with --image FILE, or leave it out")]
    NoImageNamed,
    #[error("{path} cannot be bound into a container, because its name has a comma or a colon: rename it, or link to it")]
    Unbindable { path: String },
}

/// A container of this host, and what it has of the host's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    runtime: PathBuf,
    image: PathBuf,
    has_nvidia: bool,
    /// Files and folders of the host, which have the same paths inside.
    binds: Vec<PathBuf>,
}

impl Container {
    /// Container of the settings; `None` if they name no image.
    ///
    /// Looks at files, and starts nothing.
    ///
    /// # Errors
    /// When runtime or image are missing.
    pub(crate) fn of(config: &AgentConfig) -> Result<Option<Self>, ContainerError> {
        if config.image.as_os_str().is_empty() {
            return if config.container.as_os_str().is_empty() { Ok(None) } else { Err(ContainerError::NoImageNamed) };
        }
        let image = find_image(&config.image)?;
        let runtime = find_runtime(&config.container, env::var_os("PATH").as_deref())?;
        Ok(Some(Self { runtime, image, has_nvidia: Path::new(NVIDIA_DEVICE).exists(), binds: Vec::new() }))
    }

    /// The container with more of the host's files.
    pub(crate) fn with_binds(mut self, paths: impl IntoIterator<Item = PathBuf>) -> Result<Self, ContainerError> {
        for path in paths {
            if path.as_os_str().as_bytes().iter().any(|byte| b",:".contains(byte)) {
                return Err(ContainerError::Unbindable { path: path.display().to_string() });
            }
            if !self.binds.contains(&path) {
                self.binds.push(path);
            }
        }
        Ok(self)
    }

    /// Words before a program that runs in the container.
    pub(crate) fn words(&self) -> Vec<OsString> {
        let mut words: Vec<OsString> = vec![self.runtime.clone().into(), "exec".into()];
        if self.has_nvidia {
            words.push("--nv".into());
        }
        for path in &self.binds {
            words.extend(["--bind".into(), path.clone().into()]);
        }
        words.push(self.image.clone().into());
        words
    }

    #[must_use]
    pub fn image(&self) -> &Path {
        &self.image
    }

    #[must_use]
    pub fn runtime(&self) -> &Path {
        &self.runtime
    }
}

/// Adds a file of the host to the words of a container; nothing without one.
pub(crate) fn bind(words: &mut Vec<OsString>, path: &Path) {
    // The image comes last.
    if let Some(image) = words.pop() {
        words.extend(["--bind".into(), path.into(), image]);
    }
}

/// Command that runs a program in the container, or on the host if there is none.
pub(crate) fn command(container: Option<&Container>, program: &OsStr) -> Command {
    let Some(container) = container else { return Command::new(program) };
    let words = container.words();
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).arg(program).env(NO_USER_PACKAGES.0, NO_USER_PACKAGES.1);
    for name in OF_THE_HOST {
        command.env_remove(name);
    }
    command
}

fn find_image(named: &Path) -> Result<PathBuf, ContainerError> {
    let image = named.display().to_string();
    if image.contains("://") {
        return Err(ContainerError::NotFetched { image });
    }
    let unreadable = |error: std::io::Error| ContainerError::NoImage { image: image.clone(), reason: error.to_string() };
    // A folder is an unpacked image.
    let is_folder = fs::metadata(named).map_err(unreadable)?.is_dir();
    if !is_folder {
        fs::File::open(named).map_err(unreadable)?;
    }
    std::path::absolute(named).map_err(unreadable)
}

fn find_runtime(named: &Path, search_path: Option<&OsStr>) -> Result<PathBuf, ContainerError> {
    if let Some(name) = named.file_name().and_then(OsStr::to_str).filter(|name| OTHER_RUNTIMES.contains(name)) {
        return Err(ContainerError::OtherRuntime { name: name.to_owned() });
    }
    let names = if named.as_os_str().is_empty() { RUNTIMES.map(Path::new).to_vec() } else { vec![named] };
    let lookups: Vec<_> = names.iter().map(|name| find_program(name, search_path)).collect();
    let found = lookups.iter().find_map(|lookup| lookup.found.clone());
    found.ok_or_else(|| ContainerError::NoRuntime {
        name: names.iter().map(|name| format!("`{}`", name.display())).collect::<Vec<_>>().join(" or "),
        searched: lookups[0].searched.clone(),
    })
}

#[cfg(test)]
mod tests;
