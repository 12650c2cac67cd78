//! The life of one engine as a pure state machine: which event leads where, and what must be done about it. It waits for nothing, reads no clock and touches no process; the driver feeds it events and carries out its actions.

use std::time::Duration;

use tokio::time::Instant;

/// The first pause after a crash; each further crash doubles it.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);

/// The longest pause between two starts.
const LONGEST_BACKOFF: Duration = Duration::from_secs(5 * 60);

/// An engine that was ready this long has recovered: its next crash counts as its first.
const RECOVERED_AFTER: Duration = Duration::from_secs(10 * 60);

/// How long an engine that is still starting may take to obey SIGTERM. vLLM swallows the signal during its start-up, so waiting longer gains nothing.
const STARTING_GRACE: Duration = Duration::from_secs(2);

/// How long each part of an engine's life may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// From the spawn until the engine is ready.
    pub(crate) startup: Duration,
    /// From the beginning of a drain until the engine is told to stop with requests still running.
    pub(crate) drain: Duration,
    /// From SIGTERM until the process group is killed.
    pub(crate) grace: Duration,
}

/// What has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// Begin the first life.
    Start,
    /// Finish what runs, then stop.
    Drain,
    /// As `Drain`, and for good: no restart revives it.
    Retire,
    /// Finish what runs, then start again; also brings back a stopped or failed engine at once.
    Restart,
    /// Stop now and for good.
    Stop,
    /// The process could not be created.
    SpawnFailed,
    /// The engine has begun to load its model.
    Loading,
    /// The engine answered its readiness probes.
    Ready,
    /// The engine stopped answering its health probe.
    Unhealthy,
    /// The engine's first process has exited, with whatever code.
    Exited,
    /// No process of the engine's group is left.
    GroupEmpty,
    /// No request is in flight.
    Idle,
    /// The clock reached `Machine::wake_at`.
    Tick,
}

/// What the driver must do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Start the engine; report `SpawnFailed` if that is impossible.
    Spawn,
    /// Send SIGTERM to the engine's first process.
    Terminate,
    /// Send SIGKILL to the whole group and report `GroupEmpty` once nothing is left of it.
    KillGroup,
    /// Tell people: the engine ended without having been asked to.
    ReportCrash,
}

/// What follows once the process group is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    /// Stay stopped.
    Stop,
    /// Start again at once.
    Spawn,
    /// Start again after a pause.
    BackOff,
}

impl Then {
    /// What the engine does then.
    pub(crate) fn in_words(self) -> &'static str {
        match self {
            Self::Stop => "stays stopped",
            Self::Spawn | Self::BackOff => "starts again",
        }
    }
}

/// How far a living engine has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The process exists.
    Starting,
    /// It loads its model.
    Loading,
    /// It serves.
    Ready,
}

/// Where the engine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// No process, and none wanted.
    Stopped,
    /// A process that is wanted.
    Alive(Stage),
    /// Running requests may finish until `until`.
    Draining {
        /// What follows.
        then: Then,
        /// When SIGTERM is sent even though requests run.
        until: Instant,
    },
    /// SIGTERM was sent.
    Stopping {
        /// What follows.
        then: Then,
        /// When the group is killed.
        until: Instant,
    },
    /// The group was killed, and something of it may still be there.
    Killing {
        /// What follows.
        then: Then,
    },
    /// No process; the next one starts at `until`.
    BackingOff {
        /// When the next life starts.
        until: Instant,
    },
}

/// One engine's state with the little it must remember between states.
#[derive(Debug, Clone)]
pub(crate) struct Machine {
    limits: Limits,
    state: State,
    /// When the present life was spawned.
    spawned: Option<Instant>,
    /// Since when the present life is ready.
    ready: Option<Instant>,
    /// Crashes since the engine last recovered.
    crashes: u32,
    /// `Retire` or `Stop` was seen: no further life.
    closing: bool,
}

impl Machine {
    /// A stopped engine; `Event::Start` begins its first life.
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, state: State::Stopped, spawned: None, ready: None, crashes: 0, closing: false }
    }

    /// Where the engine is.
    pub(crate) fn state(&self) -> State {
        self.state
    }

    /// Whether the engine was stopped for good and nothing of it is left.
    pub(crate) fn is_finished(&self) -> bool {
        self.closing && self.state == State::Stopped
    }

    /// When the driver must deliver the next `Tick`, if ever.
    pub(crate) fn wake_at(&self) -> Option<Instant> {
        match self.state {
            State::Alive(Stage::Starting | Stage::Loading) => self.spawned.map(|spawned| spawned + self.limits.startup),
            State::Draining { until, .. } | State::Stopping { until, .. } | State::BackingOff { until } => Some(until),
            State::Stopped | State::Alive(Stage::Ready) | State::Killing { .. } => None,
        }
    }

    /// Takes one event into account and returns what must be done, in order. An event that means nothing in the present state is ignored.
    pub(crate) fn on(&mut self, event: Event, now: Instant) -> Vec<Action> {
        self.closing |= matches!(event, Event::Retire | Event::Stop);
        let event = if event == Event::Retire { Event::Drain } else { event };
        match self.state {
            State::Stopped => self.while_stopped(event, now),
            State::Alive(stage) => self.while_alive(stage, event, now),
            State::Draining { then, until } => self.while_draining(then, until, event, now),
            State::Stopping { then, until } => self.while_stopping(then, until, event, now),
            State::Killing { then } => self.while_killing(then, event, now),
            State::BackingOff { until } => self.while_backing_off(until, event, now),
        }
    }

    fn while_stopped(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Start | Event::Restart if !self.closing => self.spawn(now),
            _ => Vec::new(),
        }
    }

    fn while_alive(&mut self, stage: Stage, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Loading if stage == Stage::Starting => {
                self.state = State::Alive(Stage::Loading);
                Vec::new()
            }
            Event::Ready if stage != Stage::Ready => {
                self.ready = Some(now);
                self.state = State::Alive(Stage::Ready);
                Vec::new()
            }
            Event::Exited | Event::SpawnFailed | Event::Unhealthy => self.crash(Then::BackOff, now),
            Event::Tick if self.wake_at().is_some_and(|at| now >= at) => self.crash(Then::BackOff, now),
            Event::Drain => self.leave(stage, Then::Stop, now),
            Event::Restart => self.leave(stage, Then::Spawn, now),
            Event::Stop => self.terminate(Then::Stop, now),
            _ => Vec::new(),
        }
    }

    fn while_draining(&mut self, then: Then, until: Instant, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Idle => self.terminate(then, now),
            Event::Tick if now >= until => self.terminate(then, now),
            Event::Exited | Event::Unhealthy => self.crash(then, now),
            Event::Stop => self.terminate(Then::Stop, now),
            _ => {
                let then = self.amended(then, event);
                self.state = State::Draining { then, until };
                Vec::new()
            }
        }
    }

    fn while_stopping(&mut self, then: Then, until: Instant, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Exited => self.kill(then),
            Event::Tick if now >= until => self.kill(then),
            _ => {
                let then = self.amended(then, event);
                self.state = State::Stopping { then, until };
                Vec::new()
            }
        }
    }

    fn while_killing(&mut self, then: Then, event: Event, now: Instant) -> Vec<Action> {
        if event != Event::GroupEmpty {
            let then = self.amended(then, event);
            self.state = State::Killing { then };
            return Vec::new();
        }
        match then {
            Then::Stop => {
                self.state = State::Stopped;
                Vec::new()
            }
            Then::Spawn => self.spawn(now),
            Then::BackOff => {
                self.state = State::BackingOff { until: now + backoff(self.crashes) };
                Vec::new()
            }
        }
    }

    fn while_backing_off(&mut self, until: Instant, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Tick if now >= until => self.spawn(now),
            Event::Restart => self.spawn(now),
            Event::Drain | Event::Stop => {
                self.state = State::Stopped;
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    /// The last wish counts, except that nothing revives an engine that was stopped for good.
    fn amended(&self, then: Then, event: Event) -> Then {
        match event {
            Event::Drain | Event::Stop => Then::Stop,
            Event::Restart if !self.closing => Then::Spawn,
            _ => then,
        }
    }

    /// Only a ready engine can have requests to finish.
    fn leave(&mut self, stage: Stage, then: Then, now: Instant) -> Vec<Action> {
        if stage != Stage::Ready {
            return self.terminate(then, now);
        }
        self.state = State::Draining { then, until: now + self.limits.drain };
        Vec::new()
    }

    fn terminate(&mut self, then: Then, now: Instant) -> Vec<Action> {
        let grace = match self.ready {
            Some(_) => self.limits.grace,
            None => self.limits.grace.min(STARTING_GRACE),
        };
        self.state = State::Stopping { then, until: now + grace };
        vec![Action::Terminate]
    }

    fn crash(&mut self, then: Then, now: Instant) -> Vec<Action> {
        self.forgive(now);
        self.crashes = self.crashes.saturating_add(1);
        let mut actions = vec![Action::ReportCrash];
        actions.append(&mut self.kill(then));
        actions
    }

    fn kill(&mut self, then: Then) -> Vec<Action> {
        self.state = State::Killing { then };
        vec![Action::KillGroup]
    }

    /// A long healthy life wipes out the crashes before it, however it ends.
    fn forgive(&mut self, now: Instant) {
        if self.ready.take().is_some_and(|since| now.saturating_duration_since(since) >= RECOVERED_AFTER) {
            self.crashes = 0;
        }
    }

    fn spawn(&mut self, now: Instant) -> Vec<Action> {
        self.forgive(now);
        self.spawned = Some(now);
        self.state = State::Alive(Stage::Starting);
        vec![Action::Spawn]
    }
}

/// The pause after the given number of crashes in a row.
fn backoff(crashes: u32) -> Duration {
    let doublings = crashes.saturating_sub(1).min(16);
    (FIRST_BACKOFF * 2_u32.pow(doublings)).min(LONGEST_BACKOFF)
}

#[cfg(test)]
mod tests;
