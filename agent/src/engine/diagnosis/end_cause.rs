//! Why an engine's life ends, as this agent itself has seen it, before anybody reads the engine's
//! output.

use std::fmt::{self, Display, Formatter};
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use crate::gang::Loss;

/// Reasons why a life ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EndCause {
    /// The engine's first process could not be made, for this reason.
    NotStarted(String),
    /// There is no directory for the engine, for this reason.
    NoDirectory(String),
    /// Somebody removed the engine's directory while it lived.
    DirectoryRemoved(PathBuf),
    /// Something outside the engine, such as a GPU, has failed.
    Failed(String),
    /// The engine was not ready within this time.
    NotReadyWithin(Duration),
    /// The agent that began the life has died, and now the engine does not answer.
    SilentSinceAdoption,
    /// Requests wait, and the engine makes no progress.
    Stalled {
        /// How long the stall lasted.
        lasted: Duration,
        /// Number of waiting requests.
        waiting: u32,
        /// Activity of the engine's processes, or the result of a test completion.
        why: String,
    },
    /// The engine failed this many test completions while it was idle.
    FailedTests {
        /// Failed tests in a row.
        tests: u32,
        /// End of the last test, and the activity of the processes.
        reason: String,
    },
    /// The engine answered this many health checks badly.
    Unhealthy {
        /// Bad checks in a row.
        checks: u32,
        /// Answer to the last check.
        reason: String,
    },
    /// A child process of one of the engine's processes has ended.
    ProcessLost {
        /// Name and id of the process.
        process: String,
        /// Answer of the health check at that time.
        health: String,
    },
    /// The engine's front-end lacks a required route.
    LacksRoute(String),
    /// A process behind the engine's front-end has ended by itself; its status, if it was seen.
    CoreEnded(Option<ExitStatus>),
    /// The engine's first process has ended by itself.
    Exited(ExitStatus),
    /// The part of another node is lost.
    PartLost(Loss),
    /// The engine's keeper has ended and taken the engine with it.
    KeeperLost,
    /// The engine's keeper does not obey.
    KeeperSilent,
}

impl Display for EndCause {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::DirectoryRemoved(path) => {
                write!(formatter, "somebody removed the engine's directory {} while it ran; it is made again", path.display())
            }
            Self::NotStarted(reason) | Self::NoDirectory(reason) | Self::Failed(reason) | Self::LacksRoute(reason) => {
                formatter.write_str(reason)
            }
            Self::NotReadyWithin(limit) => write!(formatter, "the engine was not ready within {} s", limit.as_secs_f32()),
            Self::SilentSinceAdoption => formatter.write_str("the engine that a dead agent left does not answer"),
            Self::Stalled { lasted, waiting, why } => {
                let wait = if *waiting == 1 { "request waits" } else { "requests wait" };
                write!(formatter, "no token for {:.1} s while {waiting} {wait}: {why}", lasted.as_secs_f32())
            }
            Self::FailedTests { tests, reason } => {
                write!(formatter, "a test completion failed {tests} times in a row while no request was running: {reason}")
            }
            Self::Unhealthy { checks, reason } => write!(formatter, "{checks} health checks failed in a row: {reason}"),
            Self::ProcessLost { process, health } => {
                write!(formatter, "its process {process} has ended, and health checks failed: {health}")
            }
            Self::CoreEnded(None) => formatter.write_str("a process behind the engine's front-end has ended"),
            Self::CoreEnded(Some(status)) => write!(formatter, "a process behind the engine's front-end has ended ({status})"),
            Self::Exited(status) => write!(formatter, "the engine ended without having been asked to ({status})"),
            Self::PartLost(loss) => write!(formatter, "a part of the engine is lost, on {}: {}", loss.host, loss.end.cause),
            Self::KeeperLost => formatter.write_str("the engine's keeper was lost, and the engine with it"),
            Self::KeeperSilent => formatter.write_str("the engine's keeper did not answer"),
        }
    }
}
