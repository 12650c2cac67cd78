//! Events of an engine, and the actions that its supervisor must take.

use std::time::Duration;

use tokio::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EngineEvent {
    /// Begin the first life.
    Start,
    /// Continue a life that another agent began.
    Adopt {
        /// The other agent had seen the engine ready, so it must answer soon.
        was_ready: bool,
    },
    /// The engine has its start permit.
    MayStart,
    Drain,
    /// Like `Drain`, but for good: no restart revives the engine.
    ///
    /// A second one may shorten the first.
    Retire(LeaveDeadlines),
    /// Like `Retire`, but the engine stays alive for the next agent.
    HandOver,
    /// Finish running requests, then start again; also brings back a stopped or failed engine at
    /// once.
    Restart,
    Stop,
    /// Finish running requests, then stay out of service until `Release`.
    Quarantine,
    /// Like `Quarantine`, without waiting for requests or for the engine's own shutdown.
    QuarantineNow,
    /// Start again now, whatever kept the engine down, and forget its crashes.
    ///
    /// A drain that has not stopped the engine yet is cancelled.
    Release,
    /// Something outside the engine has failed; handled as a crash.
    Fail,
    FallAsleep,
    WakeUp,
    SpawnFailed,
    Loading,
    /// The engine answered its readiness probes.
    Ready,
    /// Like `Ready`, but the engine sleeps, because another agent has put it to sleep.
    FoundAsleep,
    /// The engine stopped answering its health probe.
    Unhealthy,
    /// The engine's front-end lacks a required route.
    LacksRoute,
    /// The engine's first process has exited, with whatever code.
    Exited,
    /// No process of the engine's group is left.
    GroupEmpty,
    Idle,
    /// The engine computes answers for which nobody waits, such as responses in the background.
    Unattended,
    /// The clock reached `next_deadline`.
    Tick,
}

/// An action that the supervisor must take now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SupervisorAction {
    /// Report `MayStart` once this engine may start, after giving up any start permit that it still
    /// has.
    RequestStart,
    /// Start every further life with the other command line.
    FallBack,
    /// Start the engine; report `SpawnFailed` if that is impossible.
    Spawn,
    Terminate,
    /// Send SIGKILL to the whole group and report `GroupEmpty` once nothing is left of it.
    KillGroup,
    /// Leave the engine and its keeper to the next agent.
    Detach,
    /// Report that the engine ended although nobody had asked it to.
    ReportCrash,
}

/// Deadlines of an engine whose agent is leaving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LeaveDeadlines {
    /// When SIGTERM is sent even though requests run.
    pub(crate) drained_by: Instant,
    /// From then until the process group is killed.
    pub(crate) stop: Duration,
}
