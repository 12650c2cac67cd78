//! Diagnosis of an engine's death: one sentence with the engine's own key words, and one that names
//! a flag or a command.
//!
//! The diagnosis depends on how the engine ended and what it printed; the supervisor asks once for
//! each crash. `failure_patterns` knows what vLLM, PyTorch and the libraries below them print.

mod end_cause;
mod failure_patterns;
pub(super) mod remedies;

use std::os::unix::process::ExitStatusExt;

pub(crate) use self::end_cause::EndCause;
use super::crash_output::{FinalLines, message};
use crate::container::refusal::{self, Refusal};
use crate::gang::Loss;

/// Longest cause in characters: a few lines of a terminal.
const CAUSE_CAP: usize = 400;

/// How a life ended.
#[derive(Debug, Clone)]
pub(crate) struct LifeEnd {
    /// End that the agent itself has seen.
    pub(crate) cause: EndCause,
    pub(crate) was_ready: bool,
    /// Whether the kernel killed a process for lack of memory during this life; `None` if the
    /// kernel does not tell.
    pub(crate) oom_killed: Option<bool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FailureKind {
    /// The program cannot be started.
    Program,
    /// The runtime of `agent.container` runs nothing in the image.
    Container,
    /// The directory of the engine's sockets cannot be made, or was removed while it was in use.
    RunDir,
    /// A flag is missing, or this release does not have it.
    BadFlag,
    /// A flag has a bad value, or several values do not go together.
    BadValue,
    /// There is no such model, or a part of it is missing.
    ModelMissing,
    /// The model is not on this host and may not or cannot be fetched.
    HubOffline,
    /// The model hub requires a token or an accepted licence.
    HubForbidden,
    CorruptWeights,
    UnsupportedModel,
    /// The cache does not hold one request of the longest context.
    KvTooSmall,
    GpuInUse,
    GpuMemory,
    /// There is no GPU, or not the named one.
    NoGpu,
    /// The GPU or its driver is too old, or does not match this build.
    GpuUnsupported,
    Hardware,
    /// A kernel failed on the GPU.
    GpuFault,
    /// GPUs cannot talk to each other.
    Nccl,
    AddressInUse,
    Permission,
    DiskFull,
    /// `/dev/shm` is too small.
    SharedMemory,
    /// Too few files may be open at once.
    FileLimit,
    /// There is no compiler, or a part that it needs is missing.
    Compiler,
    /// vLLM's installation lacks something.
    Installation,
    HostMemory,
    Killed,
    /// The processor lacks instructions that the engine uses, or the engine ended itself on
    /// purpose.
    Crashed,
    /// A process behind the front-end died.
    CoreDied,
    Hang,
    Unhealthy,
    StartupTimeout,
    /// Another node of the replica cannot do its part, or is lost.
    Member,
    Unknown,
}

impl FailureKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Program => "program",
            Self::Container => "container",
            Self::RunDir => "run-dir",
            Self::BadFlag => "bad-flag",
            Self::BadValue => "bad-value",
            Self::ModelMissing => "model-missing",
            Self::HubOffline => "hub-offline",
            Self::HubForbidden => "hub-forbidden",
            Self::CorruptWeights => "corrupt-weights",
            Self::UnsupportedModel => "unsupported-model",
            Self::KvTooSmall => "kv-too-small",
            Self::GpuInUse => "gpu-in-use",
            Self::GpuMemory => "gpu-memory",
            Self::NoGpu => "no-gpu",
            Self::GpuUnsupported => "gpu-unsupported",
            Self::Hardware => "hardware",
            Self::GpuFault => "gpu-fault",
            Self::Nccl => "nccl",
            Self::AddressInUse => "address-in-use",
            Self::Permission => "permission",
            Self::DiskFull => "disk-full",
            Self::SharedMemory => "shared-memory",
            Self::FileLimit => "file-limit",
            Self::Compiler => "compiler",
            Self::Installation => "installation",
            Self::HostMemory => "host-memory",
            Self::Killed => "killed",
            Self::Crashed => "crashed",
            Self::CoreDied => "core-died",
            Self::Hang => "hang",
            Self::Unhealthy => "unhealthy",
            Self::StartupTimeout => "startup-timeout",
            Self::Member => "member",
            Self::Unknown => "unknown",
        }
    }
}

impl FailureKind {
    /// Kinds that a part of an engine can have, for those that come as words.
    const OF_PARTS: [Self; 14] = [
        Self::Program,
        Self::Container,
        Self::GpuInUse,
        Self::GpuMemory,
        Self::GpuFault,
        Self::Hardware,
        Self::Nccl,
        Self::HostMemory,
        Self::SharedMemory,
        Self::Killed,
        Self::Crashed,
        Self::CoreDied,
        Self::Member,
        Self::Unknown,
    ];

    /// The kind with this name; `Unknown` for others.
    fn of_part(name: &str) -> Self {
        Self::OF_PARTS.into_iter().find(|kind| kind.as_str() == name).unwrap_or(Self::Unknown)
    }

    /// Whether a part fails like this when another node's part has failed before it.
    pub(super) fn may_be_consequence(self) -> bool {
        matches!(self, Self::Nccl | Self::CoreDied | Self::Unhealthy | Self::StartupTimeout | Self::Hang | Self::Unknown)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnosis {
    pub kind: FailureKind,
    pub cause: String,
    pub remedy: String,
}

impl Diagnosis {
    /// What the agent of another node says about the end of its part.
    pub(super) fn of_part(loss: &Loss) -> Self {
        let end = &loss.end;
        let cause = if end.cause.contains(&loss.host) { end.cause.clone() } else { format!("on {}: {}", loss.host, end.cause) };
        Self::new(FailureKind::of_part(&end.kind), cause, end.remedy.clone())
    }

    fn new(kind: FailureKind, cause: impl Into<String>, remedy: impl Into<String>) -> Self {
        let (cause, remedy) = (shorten(&cause.into()), remedy.into());
        Self { kind, cause, remedy }
    }
}

/// Finds the cause in how the engine ended and the lines of its life, oldest first.
pub(crate) fn diagnose(ended: &LifeEnd, lines: &[String]) -> Diagnosis {
    // A decision of the agent is the cause, whatever the engine printed meanwhile.
    if let Some(ours) = diagnose_decision(&ended.cause) {
        return ours;
    }
    if let Some(Refusal { cause, remedy }) = refusal::find(lines.iter().map(String::as_str)).filter(|_| !ended.was_ready) {
        return Diagnosis::new(FailureKind::Container, cause, remedy);
    }
    let ending = FinalLines::from_lines(lines, ended.was_ready);
    if let Some(diagnosis) = failure_patterns::diagnose_output(ending, ended.was_ready) {
        return diagnosis;
    }
    if let EndCause::Exited(status) = ended.cause
        && let Some(signal) = status.signal()
    {
        return diagnose_signal("the engine's first process", signal, ended);
    }
    if let Some((process, signal)) = failure_patterns::failed_process(lines) {
        return diagnose_signal(&format!("its process {process}"), signal, ended);
    }
    let dead = lines.iter().map(|line| message(line)).find_map(failure_patterns::dead_process);
    if let Some((process, Some(signal))) = dead {
        return diagnose_signal(&format!("its process {process}"), signal, ended);
    }
    if let EndCause::CoreEnded(Some(status)) = ended.cause
        && let Some(signal) = status.signal()
    {
        return diagnose_signal("a process behind the front-end", signal, ended);
    }
    let dead = dead.map(|(process, _)| process).or(match &ended.cause {
        EndCause::ProcessLost { process, .. } => Some(process.as_str()),
        _ => None,
    });
    if dead.is_some()
        || ending.messages().any(failure_patterns::is_process_death)
        || matches!(ended.cause, EndCause::CoreEnded(_))
        || (ended.was_ready && matches!(ended.cause, EndCause::Exited(status) if status.success()))
    {
        return diagnose_core_death(dead, ended);
    }
    let exception = ending.exception().filter(|_| !ended.was_ready || ending.has_given_up());
    if let Some(late) = diagnose_timeout(ended, exception) {
        return late;
    }
    let cause = exception.map_or_else(|| ended.cause.to_string(), str::to_owned);
    Diagnosis::new(FailureKind::Unknown, cause, remedies::UNKNOWN)
}

/// Diagnosis that needs no engine output, because the agent itself decided that the life ends.
pub(crate) fn diagnose_decision(cause: &EndCause) -> Option<Diagnosis> {
    if let EndCause::PartLost(loss) = cause {
        return Some(Diagnosis::of_part(loss));
    }
    let (kind, remedy) = match cause {
        EndCause::NotStarted(reason) => (FailureKind::Program, remedies::remedy_for_program(reason)),
        EndCause::NoDirectory(_) => (FailureKind::RunDir, remedies::NO_RUN_DIR),
        EndCause::DirectoryRemoved(_) => (FailureKind::RunDir, remedies::RUN_DIR_REMOVED),
        EndCause::Failed(_) => (FailureKind::Hardware, remedies::HARDWARE),
        EndCause::Stalled { .. } | EndCause::FailedTests { .. } => (FailureKind::Hang, remedies::HANG),
        _ => return None,
    };
    Some(Diagnosis::new(kind, cause.to_string(), remedy))
}

/// Diagnoses a deadline of the agent that passed. Earlier output of the engine may say why.
fn diagnose_timeout(ended: &LifeEnd, exception: Option<&str>) -> Option<Diagnosis> {
    let (kind, remedy) = match ended.cause {
        EndCause::NotReadyWithin(_) => (FailureKind::StartupTimeout, remedies::STARTUP_TIMEOUT),
        EndCause::Unhealthy { .. } => (FailureKind::Unhealthy, remedies::UNHEALTHY),
        _ => return None,
    };
    let cause = match exception {
        Some(exception) => format!("{}; it had printed: {exception}", ended.cause),
        None => ended.cause.to_string(),
    };
    Some(Diagnosis::new(kind, cause, remedy))
}

/// Diagnoses a process that a signal ended.
///
/// `who` is separate because the agent sees only the first process's end.
fn diagnose_signal(who: &str, signal: i32, ended: &LifeEnd) -> Diagnosis {
    const SIGILL: i32 = 4;
    const SIGBUS: i32 = 7;
    const SIGKILL: i32 = 9;
    const SIGTERM: i32 = 15;
    let when = if ended.was_ready { "while it served" } else { "before it was ready" };
    match signal {
        SIGKILL if ended.oom_killed == Some(true) => {
            let cause = format!("{who} was killed {when} by the kernel's out-of-memory killer");
            Diagnosis::new(FailureKind::HostMemory, cause, remedies::HOST_MEMORY)
        }
        SIGKILL => {
            let remedy = if ended.oom_killed.is_some() { remedies::KILLED } else { remedies::KILLED_PERHAPS_BY_KERNEL };
            Diagnosis::new(FailureKind::Killed, format!("{who} was killed {when} (SIGKILL), not by hostler"), remedy)
        }
        SIGTERM => {
            Diagnosis::new(FailureKind::Killed, format!("{who} was told to stop {when} (SIGTERM), not by hostler"), remedies::TERMINATED)
        }
        SIGILL => Diagnosis::new(
            FailureKind::Crashed,
            format!("{who} ended {when} with an illegal instruction (SIGILL)"),
            remedies::ILLEGAL_INSTRUCTION,
        ),
        SIGBUS => {
            Diagnosis::new(FailureKind::SharedMemory, format!("{who} ended {when} with a bus error (SIGBUS)"), remedies::SHARED_MEMORY)
        }
        other => Diagnosis::new(FailureKind::Crashed, format!("{who} ended {when} with {}", signal_name(other)), remedies::CRASHED),
    }
}

fn signal_name(signal: i32) -> String {
    match signal {
        3 => "SIGQUIT".to_owned(),
        6 => "an abort (SIGABRT)".to_owned(),
        8 => "an arithmetic error (SIGFPE)".to_owned(),
        11 => "a segmentation fault (SIGSEGV)".to_owned(),
        other => format!("signal {other}"),
    }
}

/// Diagnoses the death of a process behind the front-end.
///
/// The front-end then exits with code 0, so this is a crash whatever the code.
fn diagnose_core_death(who: Option<&str>, ended: &LifeEnd) -> Diagnosis {
    let who = who.unwrap_or("a process behind the front-end");
    if ended.oom_killed == Some(true) {
        let cause = format!("{who} died; the kernel's out-of-memory killer ended a process at that time");
        return Diagnosis::new(FailureKind::HostMemory, cause, remedies::HOST_MEMORY);
    }
    // This is a conclusion from silence, so the observation comes first.
    let cause = format!("{}: {who} died without saying why, so it was probably killed", ended.cause);
    let remedy = if ended.oom_killed.is_some() { remedies::CORE_DIED } else { remedies::CORE_DIED_PERHAPS_BY_KERNEL };
    Diagnosis::new(FailureKind::CoreDied, cause, remedy)
}

/// Cuts a cause at a word, and puts it on one line.
fn shorten(cause: &str) -> String {
    let one_line = cause.split_whitespace().collect::<Vec<_>>().join(" ");
    match one_line.char_indices().nth(CAUSE_CAP) {
        None => one_line,
        Some((end, _)) => {
            let head = &one_line[..end];
            format!("{} …", head.rsplit_once(' ').map_or(head, |(whole, _)| whole))
        }
    }
}

#[cfg(test)]
mod tests;
