//! What happens to an engine, and what its supervisor is to do about it.

use std::time::Duration;

use tokio::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EngineEvent {
    /// Begin the first life.
    Start,
    /// Go on with a life that another agent began.
    Adopt {
        /// That agent had seen it ready, so it must answer soon.
        was_ready: bool,
    },
    /// The engine has its start permit.
    MayStart,
    Drain,
    /// As `Drain`, and for good: no restart revives it. A second one may shorten the first.
    Retire(LeaveDeadlines),
    /// As `Retire`, but the engine is left to the next agent, alive.
    HandOver,
    /// Finish what runs, then start again; also brings back a stopped or failed engine at once.
    Restart,
    Stop,
    /// Finish what runs, then stay out of service until `Release`.
    Quarantine,
    /// As `Quarantine`, without waiting for requests or for the engine's own way to end.
    QuarantineNow,
    /// Start again now, whatever kept the engine down, and forget its crashes; a drain that has not stopped it yet is called off.
    Release,
    /// Something outside of the engine has failed it; handled as a crash.
    Fail,
    FallAsleep,
    WakeUp,
    SpawnFailed,
    Loading,
    /// The engine answered its readiness probes.
    Ready,
    /// As `Ready`, but it sleeps, because another agent has put it to sleep.
    FoundAsleep,
    /// The engine stopped answering its health probe.
    Unhealthy,
    /// The engine's front-end lacks a route that is needed.
    LacksRoute,
    /// The engine's first process has exited, with whatever code.
    Exited,
    /// No process of the engine's group is left.
    GroupEmpty,
    Idle,
    /// Nobody waits for an answer, but the engine computes some, as for responses in the background.
    Unattended,
    /// The clock reached `next_deadline`.
    Tick,
}

/// What the supervisor must do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SupervisorAction {
    /// Report `MayStart` once this engine may start. A start permit that it still has is given up first.
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
    /// Report that the engine ended without having been asked to.
    ReportCrash,
}

/// When an engine whose agent is leaving must be gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LeaveDeadlines {
    /// When SIGTERM is sent even though requests run.
    pub(crate) drained_by: Instant,
    /// From then until the process group is killed.
    pub(crate) stop: Duration,
}
