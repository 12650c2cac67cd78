//! Life of one engine as a pure state machine: which event leads where, and which actions follow.
//!
//! The machine waits for nothing, reads no clock and touches no process. The supervisor feeds it
//! events and carries out its actions.

mod events;

use std::time::Duration;

use tokio::time::Instant;

pub(crate) use self::events::{EngineEvent, LeaveDeadlines, SupervisorAction};

/// First pause after a crash; each further crash doubles it.
const INITIAL_BACKOFF: Duration = Duration::from_secs(1);

/// Longest pause between two starts.
pub(crate) const MAX_BACKOFF: Duration = Duration::from_secs(5 * 60);

/// An engine that was ready this long has recovered: its next crash counts as its first.
const RECOVERED_AFTER: Duration = Duration::from_secs(10 * 60);

/// Time for a starting engine to obey SIGTERM. vLLM swallows the signal during its start-up, so
/// waiting longer gains nothing.
const STARTING_GRACE: Duration = Duration::from_secs(2);

/// Time for an engine without requests to obey SIGTERM. Such an engine has nothing to finish.
/// vLLM's own cleanup takes ten seconds and more on busy cores, and the resources it would free go
/// with its processes.
const IDLE_GRACE: Duration = Duration::from_secs(3);

/// Time for an engine that had been ready to answer the agent that adopts it.
///
/// The engine has nothing left to load; an answer takes milliseconds.
const ADOPTION_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limits of each part of an engine's life.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PhaseTimeouts {
    /// From the spawn until the engine is ready.
    pub(crate) startup: Duration,
    /// From the beginning of a drain until the engine is stopped although requests still run.
    pub(crate) drain: Duration,
    /// From SIGTERM until the process group is killed, while requests run.
    pub(crate) grace: Duration,
    /// Longest pause between two starts.
    pub(crate) max_backoff: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterExit {
    Stop,
    Spawn,
    BackOff,
    Quarantine,
    /// Live on without this agent; stay stopped if it dies before.
    Detach,
}

impl AfterExit {
    /// Describes what the engine does next.
    pub(crate) fn describe(self) -> &'static str {
        match self {
            Self::Stop => "stays stopped",
            Self::Spawn | Self::BackOff => "starts again",
            Self::Quarantine => "stays out of service until it is released",
            Self::Detach => "goes on under the next agent",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LiveStage {
    /// The process exists.
    Starting,
    Loading,
    Ready,
    /// The engine has given its memory back until it is woken.
    Sleeping,
}

/// A drain under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Drain {
    /// Stage to which a release returns.
    pub(crate) from: LiveStage,
    /// Next step after the drain.
    pub(crate) then: AfterExit,
    /// When SIGTERM is sent even though requests run.
    pub(crate) until: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EngineState {
    /// No process exists, and none is desired.
    Stopped,
    /// No process exists, and none is allowed until the engine is released.
    Quarantined,
    /// No process exists; the next one starts with a start permit.
    Waiting,
    /// A process exists and is desired.
    Alive(LiveStage),
    /// Running requests may finish.
    Draining(Drain),
    /// SIGTERM was sent.
    Stopping { then: AfterExit, until: Instant },
    /// The group was killed, and some of its processes may still exist.
    Killing { then: AfterExit },
    /// No process exists; the next one starts at `until`.
    BackingOff { until: Instant },
}

/// State of one engine, and the little it must remember between states.
#[derive(Debug, Clone)]
pub(crate) struct EngineStateMachine {
    timeouts: PhaseTimeouts,
    state: EngineState,
    ready_by: Option<Instant>,
    /// When the present life became ready.
    ready_since: Option<Instant>,
    /// Crashes since the engine last recovered.
    crashes: u32,
    /// Another command line exists, to be used once this one has failed to serve.
    may_fall_back: bool,
    /// Only `Release` brings the engine back.
    quarantined: bool,
    /// `Retire`, `HandOver` or `Stop` was seen, so there is no further life.
    closing: bool,
    /// Latest end of a drain, because the agent leaves.
    drained_by: Option<Instant>,
}

impl EngineStateMachine {
    /// A stopped engine; `EngineEvent::Start` begins its first life.
    ///
    /// `may_fall_back` says that it has a second command line.
    pub(crate) fn new(limits: PhaseTimeouts, may_fall_back: bool) -> Self {
        Self {
            timeouts: limits,
            state: EngineState::Stopped,
            ready_by: None,
            ready_since: None,
            crashes: 0,
            may_fall_back,
            quarantined: false,
            closing: false,
            drained_by: None,
        }
    }

    pub(crate) fn state(&self) -> EngineState {
        self.state
    }

    pub(crate) fn is_quarantined(&self) -> bool {
        self.quarantined
    }

    /// Whether something else is known to be able to end the engine: its agent leaves, perhaps with
    /// its job, or its GPU has failed.
    ///
    /// New requests are no longer placed here.
    pub(crate) fn is_on_its_way_out(&self) -> bool {
        self.closing || self.quarantined
    }

    /// Whether the engine was stopped for good and nothing of it is left.
    pub(crate) fn is_finished(&self) -> bool {
        self.closing && self.state == EngineState::Stopped
    }

    /// When the supervisor must deliver the next `Tick`, if ever.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        match self.state {
            EngineState::Alive(LiveStage::Starting | LiveStage::Loading) => self.ready_by,
            EngineState::Draining(Drain { until, .. }) | EngineState::Stopping { until, .. } | EngineState::BackingOff { until } => {
                Some(until)
            }
            EngineState::Stopped | EngineState::Quarantined | EngineState::Waiting => None,
            EngineState::Alive(LiveStage::Ready | LiveStage::Sleeping) | EngineState::Killing { .. } => None,
        }
    }

    /// Longest time until an engine that is down, or about to be, restarts by itself; `None` if it
    /// does not.
    ///
    /// The restart may come sooner.
    pub(crate) fn time_until_next_start(&self, now: Instant) -> Option<Duration> {
        let until = match self.state {
            EngineState::Draining(Drain { then: AfterExit::Spawn, until, .. })
            | EngineState::Stopping { then: AfterExit::Spawn, until } => until,
            EngineState::Killing { then: AfterExit::Spawn } => now,
            EngineState::Killing { then: AfterExit::BackOff } => now + self.backoff(),
            EngineState::BackingOff { until } => until,
            _ => return None,
        };
        (!self.is_on_its_way_out()).then(|| until.saturating_duration_since(now))
    }

    /// Extends the deadline of a starting engine by the time in which neither it nor this program
    /// ran.
    pub(crate) fn postpone_readiness(&mut self, by: Duration) {
        self.ready_by = self.ready_by.map(|at| at + by);
    }

    /// Processes one event and returns the required actions, in order.
    ///
    /// An event that means nothing in the present state is ignored.
    pub(crate) fn handle(&mut self, event: EngineEvent, now: Instant) -> Vec<SupervisorAction> {
        let event = self.record_intent(event, now);
        match self.state {
            EngineState::Stopped | EngineState::Quarantined => self.while_down(event, now),
            EngineState::Waiting => self.while_waiting(event, now),
            EngineState::Alive(stage) => self.while_alive(stage, event, now),
            EngineState::Draining(drain) => self.while_draining(drain, event, now),
            EngineState::Stopping { then, until } => self.while_stopping(then, until, event, now),
            EngineState::Killing { then } => self.while_killing(then, event, now),
            EngineState::BackingOff { until } => self.while_backing_off(until, event, now),
        }
    }

    /// Records the part of an event that holds in every later state: whether the engine may live
    /// again, and at whose request.
    fn record_intent(&mut self, event: EngineEvent, now: Instant) -> EngineEvent {
        match event {
            EngineEvent::Retire(deadlines) => {
                self.closing = true;
                self.shorten(deadlines, now);
                return EngineEvent::Drain;
            }
            EngineEvent::HandOver | EngineEvent::Stop => self.closing = true,
            EngineEvent::Quarantine | EngineEvent::QuarantineNow => self.quarantined = true,
            EngineEvent::Release if !self.closing => {
                self.quarantined = false;
                self.crashes = 0;
            }
            _ => {}
        }
        event
    }

    /// Applies these deadlines to the present and later phases that would last longer.
    fn shorten(&mut self, deadlines: LeaveDeadlines, now: Instant) {
        self.timeouts.grace = self.timeouts.grace.min(deadlines.stop);
        self.drained_by = Some(self.drained_by.map_or(deadlines.drained_by, |by| by.min(deadlines.drained_by)));
        match &mut self.state {
            EngineState::Draining(Drain { until, .. }) => *until = deadlines.drained_by.min(*until),
            EngineState::Stopping { until, .. } => *until = (now + deadlines.stop).min(*until),
            _ => {}
        }
    }

    fn may_start(&self) -> bool {
        !self.closing && !self.quarantined
    }

    fn while_down(&mut self, event: EngineEvent, now: Instant) -> Vec<SupervisorAction> {
        match event {
            EngineEvent::Start | EngineEvent::Restart | EngineEvent::Release if self.may_start() => self.wait_for_start(now),
            EngineEvent::Adopt { was_ready } if self.may_start() => {
                let limit = if was_ready { self.timeouts.startup.min(ADOPTION_TIMEOUT) } else { self.timeouts.startup };
                self.ready_by = Some(now + limit);
                self.ready_since = was_ready.then_some(now);
                self.state = EngineState::Alive(LiveStage::Loading);
                Vec::new()
            }
            EngineEvent::Quarantine | EngineEvent::QuarantineNow if !self.closing => self.enter(EngineState::Quarantined),
            EngineEvent::Drain | EngineEvent::HandOver | EngineEvent::Stop => self.enter(EngineState::Stopped),
            _ => Vec::new(),
        }
    }

    fn while_waiting(&mut self, event: EngineEvent, now: Instant) -> Vec<SupervisorAction> {
        match event {
            EngineEvent::MayStart => self.spawn(now),
            EngineEvent::Fail => {
                self.crashes = self.crashes.saturating_add(1);
                self.enter(EngineState::BackingOff { until: now + self.backoff() })
            }
            EngineEvent::Quarantine | EngineEvent::QuarantineNow => self.enter(EngineState::Quarantined),
            EngineEvent::Drain | EngineEvent::HandOver | EngineEvent::Stop => self.enter(EngineState::Stopped),
            _ => Vec::new(),
        }
    }

    fn while_alive(&mut self, stage: LiveStage, event: EngineEvent, now: Instant) -> Vec<SupervisorAction> {
        match event {
            EngineEvent::Loading if stage == LiveStage::Starting => self.enter(EngineState::Alive(LiveStage::Loading)),
            EngineEvent::Ready if matches!(stage, LiveStage::Starting | LiveStage::Loading) => {
                self.ready_since = Some(now);
                self.enter(EngineState::Alive(LiveStage::Ready))
            }
            EngineEvent::FoundAsleep if matches!(stage, LiveStage::Starting | LiveStage::Loading) => {
                self.ready_since = Some(now);
                self.enter(EngineState::Alive(LiveStage::Sleeping))
            }
            EngineEvent::FallAsleep if stage == LiveStage::Ready => self.enter(EngineState::Alive(LiveStage::Sleeping)),
            EngineEvent::WakeUp if stage == LiveStage::Sleeping => self.enter(EngineState::Alive(LiveStage::Ready)),
            EngineEvent::LacksRoute if self.may_fall_back => self.fall_back(),
            EngineEvent::Exited | EngineEvent::SpawnFailed | EngineEvent::Unhealthy => self.handle_failed_start(now),
            EngineEvent::Tick if self.next_deadline().is_some_and(|at| now >= at) => self.handle_failed_start(now),
            EngineEvent::Fail => self.crash(AfterExit::BackOff, now),
            EngineEvent::Drain => self.drain_or_terminate(stage, AfterExit::Stop, now),
            EngineEvent::HandOver => self.drain_or_terminate(stage, AfterExit::Detach, now),
            EngineEvent::Restart => self.drain_or_terminate(stage, AfterExit::Spawn, now),
            EngineEvent::Quarantine => self.drain_or_terminate(stage, AfterExit::Quarantine, now),
            EngineEvent::QuarantineNow => self.kill(AfterExit::Quarantine),
            EngineEvent::Stop => self.terminate(AfterExit::Stop, self.timeouts.grace, now),
            _ => Vec::new(),
        }
    }

    fn while_draining(&mut self, drain: Drain, event: EngineEvent, now: Instant) -> Vec<SupervisorAction> {
        let Drain { from, then, until } = drain;
        match event {
            EngineEvent::Idle => self.terminate(then, IDLE_GRACE, now),
            EngineEvent::Unattended => self.terminate(then, self.timeouts.grace, now),
            EngineEvent::Tick if now >= until => self.terminate(then, self.timeouts.grace, now),
            EngineEvent::Exited | EngineEvent::Unhealthy | EngineEvent::Fail => self.crash(then, now),
            EngineEvent::Stop => self.terminate(AfterExit::Stop, self.timeouts.grace, now),
            EngineEvent::QuarantineNow => self.kill(self.amend(then, event)),
            // The reason for a quarantine ends only with a new life.
            EngineEvent::Release if then != AfterExit::Quarantine && self.may_start() => self.enter(EngineState::Alive(from)),
            _ => {
                let then = self.amend(then, event);
                self.enter(EngineState::Draining(Drain { then, ..drain }))
            }
        }
    }

    fn while_stopping(&mut self, then: AfterExit, until: Instant, event: EngineEvent, now: Instant) -> Vec<SupervisorAction> {
        match event {
            EngineEvent::Exited | EngineEvent::Fail => self.kill(then),
            EngineEvent::Tick if now >= until => self.kill(then),
            EngineEvent::QuarantineNow => self.kill(self.amend(then, event)),
            _ => {
                let then = self.amend(then, event);
                self.enter(EngineState::Stopping { then, until })
            }
        }
    }

    fn while_killing(&mut self, then: AfterExit, event: EngineEvent, now: Instant) -> Vec<SupervisorAction> {
        if event != EngineEvent::GroupEmpty {
            let then = self.amend(then, event);
            return self.enter(EngineState::Killing { then });
        }
        match then {
            AfterExit::Stop | AfterExit::Detach => self.enter(EngineState::Stopped),
            AfterExit::Quarantine => self.enter(EngineState::Quarantined),
            AfterExit::Spawn => self.wait_for_start(now),
            AfterExit::BackOff => self.enter(EngineState::BackingOff { until: now + self.backoff() }),
        }
    }

    fn while_backing_off(&mut self, until: Instant, event: EngineEvent, now: Instant) -> Vec<SupervisorAction> {
        match event {
            EngineEvent::Tick if now >= until => self.wait_for_start(now),
            EngineEvent::Restart | EngineEvent::Release => self.wait_for_start(now),
            EngineEvent::Quarantine | EngineEvent::QuarantineNow => self.enter(EngineState::Quarantined),
            EngineEvent::Drain | EngineEvent::HandOver | EngineEvent::Stop => self.enter(EngineState::Stopped),
            _ => Vec::new(),
        }
    }

    /// Combines the planned next step with a new event.
    ///
    /// The last request counts, but nothing revives an engine that was stopped for good, and only
    /// `Release` revives one in quarantine.
    fn amend(&self, then: AfterExit, event: EngineEvent) -> AfterExit {
        match event {
            // A leaving agent that is pressed for time sends the event again.
            EngineEvent::HandOver if then == AfterExit::Detach => AfterExit::Detach,
            // An engine that was to end is not left to the next agent.
            EngineEvent::Drain | EngineEvent::HandOver | EngineEvent::Stop => AfterExit::Stop,
            EngineEvent::Quarantine | EngineEvent::QuarantineNow if !self.closing => AfterExit::Quarantine,
            EngineEvent::Restart | EngineEvent::Release if self.may_start() => AfterExit::Spawn,
            _ => then,
        }
    }

    /// Drains or stops the engine: only an engine that serves can have requests to finish.
    fn drain_or_terminate(&mut self, stage: LiveStage, then: AfterExit, now: Instant) -> Vec<SupervisorAction> {
        if !matches!(stage, LiveStage::Ready | LiveStage::Sleeping) {
            return self.terminate(then, STARTING_GRACE, now);
        }
        let until = self.drained_by.unwrap_or(now + self.timeouts.drain);
        self.enter(EngineState::Draining(Drain { from: stage, then, until }))
    }

    fn terminate(&mut self, then: AfterExit, grace: Duration, now: Instant) -> Vec<SupervisorAction> {
        if then == AfterExit::Detach {
            self.state = EngineState::Stopped;
            return vec![SupervisorAction::Detach];
        }
        let grace = if self.ready_since.is_none() { STARTING_GRACE } else { grace };
        self.state = EngineState::Stopping { then, until: now + grace.min(self.timeouts.grace) };
        vec![SupervisorAction::Terminate]
    }

    /// Handles a life that never served.
    ///
    /// If there is another command line to try, the first one gets the blame.
    fn handle_failed_start(&mut self, now: Instant) -> Vec<SupervisorAction> {
        if self.may_fall_back && self.ready_since.is_none() { self.fall_back() } else { self.crash(AfterExit::BackOff, now) }
    }

    /// Switches to the other command line, once. If that fails as well, the usual pauses follow.
    fn fall_back(&mut self) -> Vec<SupervisorAction> {
        self.may_fall_back = false;
        let mut actions = vec![SupervisorAction::FallBack];
        actions.append(&mut self.kill(AfterExit::Spawn));
        actions
    }

    fn crash(&mut self, then: AfterExit, now: Instant) -> Vec<SupervisorAction> {
        self.reset_crashes_if_recovered(now);
        self.crashes = self.crashes.saturating_add(1);
        let mut actions = vec![SupervisorAction::ReportCrash];
        actions.append(&mut self.kill(then));
        actions
    }

    fn kill(&mut self, then: AfterExit) -> Vec<SupervisorAction> {
        self.state = EngineState::Killing { then };
        vec![SupervisorAction::KillGroup]
    }

    /// Pause before the next start.
    fn backoff(&self) -> Duration {
        let doublings = self.crashes.saturating_sub(1).min(16);
        (INITIAL_BACKOFF * 2_u32.pow(doublings)).min(self.timeouts.max_backoff)
    }

    /// Forgets earlier crashes after a long healthy life, however it ends.
    fn reset_crashes_if_recovered(&mut self, now: Instant) {
        if self.ready_since.take().is_some_and(|since| now.saturating_duration_since(since) >= RECOVERED_AFTER) {
            self.crashes = 0;
        }
    }

    fn wait_for_start(&mut self, now: Instant) -> Vec<SupervisorAction> {
        self.reset_crashes_if_recovered(now);
        self.state = EngineState::Waiting;
        vec![SupervisorAction::RequestStart]
    }

    fn spawn(&mut self, now: Instant) -> Vec<SupervisorAction> {
        self.ready_by = Some(now + self.timeouts.startup);
        self.state = EngineState::Alive(LiveStage::Starting);
        vec![SupervisorAction::Spawn]
    }

    fn enter(&mut self, state: EngineState) -> Vec<SupervisorAction> {
        self.state = state;
        Vec::new()
    }
}

#[cfg(test)]
mod tests;
