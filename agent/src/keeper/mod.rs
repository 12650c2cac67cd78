//! The keeper: a small process between the agent and one engine.
//!
//! `server` is that process, `client` is the agent's end, and `wire` is their protocol. A killed
//! agent cannot act any more. Its keepers then end the engines with all their processes, or keep
//! them for the next agent, as their agent chose.
//!
//! Keeper and engine are in their own session (decision 20). Batch systems ask a job to end with a
//! signal to the agent's whole session; this signal thus reaches only the agent, which drains. The
//! keeper does the rest of such a signal's work: the engine ends with its agent, and is stopped
//! while its agent is stopped.
//!
//! A keeper is a child subreaper, so every process of the engine stays its descendant, however it
//! forks. If the keeper itself is killed, the engine's first process goes with it (`exec` asks the
//! kernel for that, and in a container `guard` sees to it), and the agent ends the others. The
//! keeper has two threads. One does all the waiting and the other writes files, because a disk may
//! hang and the engine's output must still be read.

mod agent_connection;
mod agent_process;
mod client;
mod guard;
#[cfg(feature = "engines-in-process")]
mod in_process;
mod launch;
mod log_file;
mod output_replay;
mod server;
mod spare;
mod suspension;
pub(crate) mod wire;

use std::ffi::OsString;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use rustix::process::{Pid, Signal, getpid, getppid, getpriority_process, set_child_subreaper, set_parent_process_death_signal, setsid};
use sha2::{Digest, Sha256};

#[cfg(feature = "engines-in-process")]
pub use self::in_process::{EngineLaunch, InProcessEngines};

pub(crate) use self::client::{AdoptionError, KeeperClient, KeeperNotices, PreparedKeeper, SpareState, SurvivingEngine, prepare, start};
use crate::config::IfAgentDies;
use crate::job::Job;
use crate::vllm::CommandLine;
use crate::vllm::version::VllmVersion;

/// How keepers are started.
#[derive(Debug, Clone)]
pub enum KeeperSource {
    /// Program that has the subcommand `keeper`.
    Program(PathBuf),
    #[cfg(feature = "engines-in-process")]
    InProcess(std::sync::Arc<InProcessEngines>),
}

impl From<PathBuf> for KeeperSource {
    fn from(program: PathBuf) -> Self {
        Self::Program(program)
    }
}

impl KeeperSource {
    /// Program that becomes the engine in a last step; errors name it.
    pub(crate) fn program(&self) -> &Path {
        match self {
            Self::Program(program) => program,
            #[cfg(feature = "engines-in-process")]
            Self::InProcess(_) => Path::new("this process"),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentDeathPolicy {
    /// The engine ends completely with its agent.
    Kill,
    /// The engine lives on for the next agent.
    Keep { wait: Duration },
}

impl AgentDeathPolicy {
    /// Policy that a setting means for a process with this environment.
    ///
    /// `auto` keeps engines only under systemd, which restarts the agent. In a batch job or a
    /// terminal no other agent would come. Every program that a service starts inherits its
    /// variables, so only the service's first process counts.
    pub(crate) fn of(setting: IfAgentDies, wait: Duration, variable: impl Fn(&str) -> Option<String>) -> Self {
        let own_id = std::process::id().to_string();
        let is_first = variable("SYSTEMD_EXEC_PID").is_none_or(|first| first == own_id);
        let in_job = Job::detect(&variable).is_some();
        match setting {
            IfAgentDies::Kill => Self::Kill,
            IfAgentDies::Keep => Self::Keep { wait },
            IfAgentDies::Auto if variable("INVOCATION_ID").is_some() && is_first && !in_job => Self::Keep { wait },
            IfAgentDies::Auto => Self::Kill,
        }
    }

    /// How many seconds an engine lives on without an agent; `None` if it ends with the agent.
    pub(crate) fn wait_seconds(self) -> Option<u64> {
        match self {
            Self::Kill => None,
            Self::Keep { wait } => Some(wait.as_secs()),
        }
    }
}

/// Name of keepers in process lists, which show 15 bytes.
///
/// The name does not begin with the program's own name, so killing the program by name leaves the
/// keepers to do their work.
const PROCESS_NAME: &std::ffi::CStr = c"engine-keeper";

/// Makes the allocator take memory only as needed.
///
/// Otherwise the first small allocation was seen to take 8 MiB of huge pages, for a keeper that
/// needs 2.
const ALLOCATOR_SETTING: (&str, &str) = ("MIMALLOC_ARENA_EAGER_COMMIT", "0");

/// Attempts to write the autogroup.
///
/// The kernel accepts one such write in 100 ms, from all of a host's users together, so the keepers
/// of 16 engines that start at once all get their turn.
const AUTOGROUP_ATTEMPTS: u32 = 20;
const AUTOGROUP_PAUSE: Duration = Duration::from_millis(100);

/// Environment variables that do not make two engines different: their values depend on how much
/// memory was free, or on the shell.
const FINGERPRINT_IGNORED: [&str; 2] = ["VLLM_CPU_KVCACHE_SPACE", "PYTHONPATH"];

/// Inherited variables with these prefixes make two engines different.
const FINGERPRINT_PREFIXES: [&[u8]; 3] = [b"VLLM_", b"CUDA_", b"NCCL_"];

/// Socket on which the keeper of an engine with this directory waits for the next agent.
fn socket_path(directory: &Path) -> PathBuf {
    directory.join("keeper.sock")
}

/// File to which the `exec` step writes why there is no engine.
fn exec_error_path(directory: &Path) -> PathBuf {
    directory.join("not-started")
}

/// Runs the subcommand `keeper` of the program.
///
/// Without arguments it is the keeper itself, whose agent is at its standard input. The step that
/// becomes the engine gets `exec`, its keeper's process id, the engine's directory, the program and
/// its arguments. Where the engine runs in a container, the program is the container's runtime, and
/// a third process gets `guard`.
#[must_use]
pub fn run_subcommand(arguments: &[OsString]) -> ExitCode {
    let ended = match arguments {
        [] => run_keeper(),
        [guard] if guard == "guard" => guard::run(),
        [exec, keeper, directory, program, arguments @ ..] if exec == "exec" => {
            Err(exec_engine(keeper, Path::new(directory), program, arguments))
        }
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "the agent starts keepers, nobody else")),
    };
    // Nobody reads a message here, because the agent sees that the connection ends.
    if ended.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run_keeper() -> io::Result<()> {
    // Do this first. Until then a signal to the agent's session or terminal ends this process, and
    // with it the start of an engine that the agent would drain anyway.
    setsid()?;
    let agent = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let _ = rustix::thread::set_name(PROCESS_NAME);
    set_child_subreaper(Some(getpid()))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        carry_niceness_over().await;
        server::run(agent).await
    })
}

/// Gives the new session the agent's niceness.
///
/// Linux makes a scheduling group of each session, in which a process's own niceness counts against
/// that session alone (sched(7), "The autogroup feature"). Engines of an agent that was started
/// with `nice` would otherwise take as much as anyone. If the kernel has no such groups, there is
/// nothing to do.
async fn carry_niceness_over() {
    let Ok(niceness @ (..=-1 | 1..)) = getpriority_process(None) else { return };
    for _ in 0..AUTOGROUP_ATTEMPTS {
        match std::fs::write("/proc/self/autogroup", niceness.to_string()) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(AUTOGROUP_PAUSE).await,
            _ => return,
        }
    }
}

/// Becomes the engine's first process, which the kernel kills when its keeper dies.
///
/// Returns only if that fails.
fn exec_engine(keeper: &OsString, directory: &Path, program: &OsString, arguments: &[OsString]) -> io::Error {
    let keeper = keeper.to_str().and_then(|id| Pid::from_raw(id.parse().ok()?));
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return error.into();
    }
    // The keeper may have died before the kernel knew; then this process has another parent by now.
    if keeper.is_none() || getppid() != keeper {
        return io::ErrorKind::BrokenPipe.into();
    }
    let error = Command::new(program).args(arguments).exec();
    // If the disk is full too, only the exit code remains.
    let _ = std::fs::write(exec_error_path(directory), launch::describe_start_error(program, &error));
    error
}

/// Fingerprint of a command line in a given directory with this release of vLLM. Equal fingerprints
/// mean that the same engine would be started again.
pub(crate) fn fingerprint(line: &CommandLine, version: Option<VllmVersion>) -> String {
    let mut hash = Sha256::new();
    let mut add = |part: &[u8]| {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    };
    line.container.iter().for_each(|word| add(word.as_encoded_bytes()));
    add(line.program.as_os_str().as_encoded_bytes());
    line.arguments.iter().for_each(|argument| add(argument.as_encoded_bytes()));
    for (name, value) in line.set.iter().filter(|(name, _)| !FINGERPRINT_IGNORED.contains(name)) {
        add(name.as_bytes());
        add(value.as_encoded_bytes());
    }
    // A scheduler's limit, and settings of the service, reach the engine through inherited
    // variables.
    let mut inherited: Vec<_> = std::env::vars_os()
        .filter(|(name, _)| FINGERPRINT_PREFIXES.iter().any(|prefix| name.as_encoded_bytes().starts_with(prefix)))
        .collect();
    inherited.sort();
    for (name, value) in inherited {
        add(name.as_encoded_bytes());
        add(value.as_encoded_bytes());
    }
    add(version.map(|version| version.to_string()).unwrap_or_default().as_bytes());
    hostler_tls::hex(&hash.finalize())
}

/// Ends engines that a dead agent has left and this one would not start, because they have another
/// model or other flags.
///
/// Their memory is needed.
pub(crate) async fn end_survivors(rejected: Vec<SurvivingEngine>) {
    for survivor in rejected {
        let directory = survivor.directory.clone();
        let ended = tokio::task::spawn_blocking(move || survivor.end()).await.expect("ending an engine does not panic");
        tracing::warn!(directory = %directory.display(), ?ended, "ended an engine of an agent that had died: this agent would start another one");
    }
}

#[cfg(test)]
pub(crate) mod tests;
