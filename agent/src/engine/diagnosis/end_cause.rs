//! Why a life of an engine ends, as this agent itself has seen it, before anybody reads what the engine printed.

use std::fmt::{self, Display, Formatter};
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

/// Why a life ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EndCause {
    /// Its first process could not be made, for this reason.
    NotStarted(String),
    /// There is no directory for it, for this reason.
    NoDirectory(String),
    /// Somebody removed its directory while it lived.
    DirectoryRemoved(PathBuf),
    /// Something outside of it has failed it, such as a GPU.
    Failed(String),
    /// It was not ready within this time.
    NotReadyWithin(Duration),
    /// The agent that began it has died, and now it does not answer.
    SilentSinceAdoption,
    /// Requests wait, and nothing comes out of it.
    Stalled {
        /// For how long.
        lasted: Duration,
        /// How many requests wait.
        waiting: u32,
        /// What its processes do, or what came of a test completion.
        why: String,
    },
    /// It failed so many test completions while it was idle, the last one so.
    FailedTests {
        /// In a row.
        tests: u32,
        /// The last one's end, and what its processes did.
        reason: String,
    },
    /// It answered so many health checks badly, the last one so.
    Unhealthy {
        /// In a row.
        checks: u32,
        /// The last answer.
        reason: String,
    },
    /// One of its processes, of which another is the parent, has ended.
    ProcessLost {
        /// Its name and id.
        process: String,
        /// What the health check said then.
        health: String,
    },
    /// Its front-end lacks a route that is needed.
    LacksRoute(String),
    /// Its first process has ended by itself.
    Exited(ExitStatus),
    /// Its keeper has ended, and took it along.
    KeeperLost,
    /// Its keeper does not do what it is told.
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
            Self::Exited(status) => write!(formatter, "the engine ended without having been asked to ({status})"),
            Self::KeeperLost => formatter.write_str("the engine's keeper was lost, and the engine with it"),
            Self::KeeperSilent => formatter.write_str("the engine's keeper did not answer"),
        }
    }
}
