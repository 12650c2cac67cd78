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

/// How long an engine that had been ready may take to answer the agent that adopts it. It has nothing left to load; an answer takes milliseconds.
const ADOPTION_LIMIT: Duration = Duration::from_secs(10);

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
    /// Go on with a life that another agent began.
    Adopt {
        /// That agent had seen it ready, so it must answer soon.
        was_ready: bool,
    },
    /// It is this engine's turn to start.
    Turn,
    /// Finish what runs, then stop.
    Drain,
    /// As `Drain`, and for good: no restart revives it.
    Retire,
    /// As `Retire`, but the engine is left to the next agent, alive.
    HandOver,
    /// Finish what runs, then start again; also brings back a stopped or failed engine at once.
    Restart,
    /// Stop now and for good.
    Stop,
    /// Finish what runs, then stay out of service until `Release`.
    Quarantine,
    /// As `Quarantine`, without waiting for requests or for the engine's own way to end.
    QuarantineNow,
    /// Start again now, whatever kept the engine down, and forget its crashes.
    Release,
    /// Something outside of the engine has failed it: as a crash.
    Fail,
    /// The engine has given its memory back.
    FallAsleep,
    /// The engine has its memory again.
    WakeUp,
    /// The process could not be created.
    SpawnFailed,
    /// The engine has begun to load its model.
    Loading,
    /// The engine answered its readiness probes.
    Ready,
    /// As `Ready`, and it sleeps: another agent has seen to that.
    FoundAsleep,
    /// The engine stopped answering its health probe.
    Unhealthy,
    /// The engine's front-end cannot do what is needed of it.
    Unfit,
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
    /// Report `Turn` once this engine may start. A turn that was had before is given up first.
    AwaitTurn,
    /// Start every further life with the other command line.
    FallBack,
    /// Start the engine; report `SpawnFailed` if that is impossible.
    Spawn,
    /// Send SIGTERM to the engine's first process.
    Terminate,
    /// Send SIGKILL to the whole group and report `GroupEmpty` once nothing is left of it.
    KillGroup,
    /// Leave the engine and its keeper to the next agent.
    LetGo,
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
    /// Stay out of service until released.
    Quarantine,
    /// Live on without this agent; stay stopped if it dies before.
    LetGo,
}

impl Then {
    /// What the engine does then.
    pub(crate) fn in_words(self) -> &'static str {
        match self {
            Self::Stop => "stays stopped",
            Self::Spawn | Self::BackOff => "starts again",
            Self::Quarantine => "stays out of service until it is released",
            Self::LetGo => "goes on under the next agent",
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
    /// It has given its memory back until it is woken.
    Sleeping,
}

/// Where the engine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// No process, and none wanted.
    Stopped,
    /// No process, and none allowed until it is released.
    Quarantined,
    /// No process; the next one starts when its turn has come.
    Waiting,
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
    /// When the present life must be ready.
    ready_by: Option<Instant>,
    /// Since when the present life is ready.
    ready: Option<Instant>,
    /// Crashes since the engine last recovered.
    crashes: u32,
    /// There is another command line, to be used once this one has failed to serve.
    may_fall_back: bool,
    /// Only `Release` brings it back.
    quarantined: bool,
    /// `Retire`, `HandOver` or `Stop` was seen: no further life.
    closing: bool,
}

impl Machine {
    /// A stopped engine; `Event::Start` begins its first life. `may_fall_back` says that it has a second command line.
    pub(crate) fn new(limits: Limits, may_fall_back: bool) -> Self {
        Self { limits, state: State::Stopped, ready_by: None, ready: None, crashes: 0, may_fall_back, quarantined: false, closing: false }
    }

    /// Where the engine is.
    pub(crate) fn state(&self) -> State {
        self.state
    }

    /// Whether only `Release` brings it back.
    pub(crate) fn is_quarantined(&self) -> bool {
        self.quarantined
    }

    /// Whether the engine was stopped for good and nothing of it is left.
    pub(crate) fn is_finished(&self) -> bool {
        self.closing && self.state == State::Stopped
    }

    /// When the driver must deliver the next `Tick`, if ever.
    pub(crate) fn wake_at(&self) -> Option<Instant> {
        match self.state {
            State::Alive(Stage::Starting | Stage::Loading) => self.ready_by,
            State::Draining { until, .. } | State::Stopping { until, .. } | State::BackingOff { until } => Some(until),
            State::Stopped | State::Quarantined | State::Waiting => None,
            State::Alive(Stage::Ready | Stage::Sleeping) | State::Killing { .. } => None,
        }
    }

    /// Takes one event into account and returns what must be done, in order. An event that means nothing in the present state is ignored.
    pub(crate) fn on(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let event = self.remember(event);
        match self.state {
            State::Stopped | State::Quarantined => self.while_down(event, now),
            State::Waiting => self.while_waiting(event, now),
            State::Alive(stage) => self.while_alive(stage, event, now),
            State::Draining { then, until } => self.while_draining(then, until, event, now),
            State::Stopping { then, until } => self.while_stopping(then, until, event, now),
            State::Killing { then } => self.while_killing(then, event, now),
            State::BackingOff { until } => self.while_backing_off(until, event, now),
        }
    }

    /// What holds for every later state: whether the engine may live again, and at whose wish.
    fn remember(&mut self, event: Event) -> Event {
        match event {
            Event::Retire | Event::HandOver | Event::Stop => self.closing = true,
            Event::Quarantine | Event::QuarantineNow => self.quarantined = true,
            Event::Release if !self.closing => {
                self.quarantined = false;
                self.crashes = 0;
            }
            _ => {}
        }
        if event == Event::Retire { Event::Drain } else { event }
    }

    fn may_start(&self) -> bool {
        !self.closing && !self.quarantined
    }

    fn while_down(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Start | Event::Restart | Event::Release if self.may_start() => self.queue(now),
            Event::Adopt { was_ready } if self.may_start() => {
                let limit = if was_ready { self.limits.startup.min(ADOPTION_LIMIT) } else { self.limits.startup };
                self.ready_by = Some(now + limit);
                self.ready = was_ready.then_some(now);
                self.state = State::Alive(Stage::Loading);
                Vec::new()
            }
            Event::Quarantine | Event::QuarantineNow if !self.closing => self.enter(State::Quarantined),
            Event::Drain | Event::HandOver | Event::Stop => self.enter(State::Stopped),
            _ => Vec::new(),
        }
    }

    fn while_waiting(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Turn => self.spawn(now),
            Event::Fail => {
                self.crashes = self.crashes.saturating_add(1);
                self.enter(State::BackingOff { until: now + backoff(self.crashes) })
            }
            Event::Quarantine | Event::QuarantineNow => self.enter(State::Quarantined),
            Event::Drain | Event::HandOver | Event::Stop => self.enter(State::Stopped),
            _ => Vec::new(),
        }
    }

    fn while_alive(&mut self, stage: Stage, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Loading if stage == Stage::Starting => self.enter(State::Alive(Stage::Loading)),
            Event::Ready if matches!(stage, Stage::Starting | Stage::Loading) => {
                self.ready = Some(now);
                self.enter(State::Alive(Stage::Ready))
            }
            Event::FoundAsleep if matches!(stage, Stage::Starting | Stage::Loading) => {
                self.ready = Some(now);
                self.enter(State::Alive(Stage::Sleeping))
            }
            Event::FallAsleep if stage == Stage::Ready => self.enter(State::Alive(Stage::Sleeping)),
            Event::WakeUp if stage == Stage::Sleeping => self.enter(State::Alive(Stage::Ready)),
            Event::Unfit if self.may_fall_back => self.fall_back(),
            Event::Exited | Event::SpawnFailed | Event::Unhealthy => self.fail_to_live(now),
            Event::Tick if self.wake_at().is_some_and(|at| now >= at) => self.fail_to_live(now),
            Event::Fail => self.crash(Then::BackOff, now),
            Event::Drain => self.leave(stage, Then::Stop, now),
            Event::HandOver => self.leave(stage, Then::LetGo, now),
            Event::Restart => self.leave(stage, Then::Spawn, now),
            Event::Quarantine => self.leave(stage, Then::Quarantine, now),
            Event::QuarantineNow => self.kill(Then::Quarantine),
            Event::Stop => self.terminate(Then::Stop, now),
            _ => Vec::new(),
        }
    }

    fn while_draining(&mut self, then: Then, until: Instant, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Idle => self.terminate(then, now),
            Event::Tick if now >= until => self.terminate(then, now),
            Event::Exited | Event::Unhealthy | Event::Fail => self.crash(then, now),
            Event::Stop => self.terminate(Then::Stop, now),
            Event::QuarantineNow => self.kill(self.amended(then, event)),
            _ => {
                let then = self.amended(then, event);
                self.enter(State::Draining { then, until })
            }
        }
    }

    fn while_stopping(&mut self, then: Then, until: Instant, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Exited | Event::Fail => self.kill(then),
            Event::Tick if now >= until => self.kill(then),
            Event::QuarantineNow => self.kill(self.amended(then, event)),
            _ => {
                let then = self.amended(then, event);
                self.enter(State::Stopping { then, until })
            }
        }
    }

    fn while_killing(&mut self, then: Then, event: Event, now: Instant) -> Vec<Action> {
        if event != Event::GroupEmpty {
            let then = self.amended(then, event);
            return self.enter(State::Killing { then });
        }
        match then {
            Then::Stop | Then::LetGo => self.enter(State::Stopped),
            Then::Quarantine => self.enter(State::Quarantined),
            Then::Spawn => self.queue(now),
            Then::BackOff => self.enter(State::BackingOff { until: now + backoff(self.crashes) }),
        }
    }

    fn while_backing_off(&mut self, until: Instant, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Tick if now >= until => self.queue(now),
            Event::Restart | Event::Release => self.queue(now),
            Event::Quarantine | Event::QuarantineNow => self.enter(State::Quarantined),
            Event::Drain | Event::HandOver | Event::Stop => self.enter(State::Stopped),
            _ => Vec::new(),
        }
    }

    /// The last wish counts, except that nothing revives an engine that was stopped for good, and only `Release` one that is quarantined.
    fn amended(&self, then: Then, event: Event) -> Then {
        match event {
            // One that was to end is not left to anybody.
            Event::Drain | Event::HandOver | Event::Stop => Then::Stop,
            Event::Quarantine | Event::QuarantineNow if !self.closing => Then::Quarantine,
            Event::Restart | Event::Release if self.may_start() => Then::Spawn,
            _ => then,
        }
    }

    /// Only an engine that serves can have requests to finish.
    fn leave(&mut self, stage: Stage, then: Then, now: Instant) -> Vec<Action> {
        if !matches!(stage, Stage::Ready | Stage::Sleeping) {
            return self.terminate(then, now);
        }
        self.enter(State::Draining { then, until: now + self.limits.drain })
    }

    fn terminate(&mut self, then: Then, now: Instant) -> Vec<Action> {
        if then == Then::LetGo {
            self.state = State::Stopped;
            return vec![Action::LetGo];
        }
        let grace = match self.ready {
            Some(_) => self.limits.grace,
            None => self.limits.grace.min(STARTING_GRACE),
        };
        self.state = State::Stopping { then, until: now + grace };
        vec![Action::Terminate]
    }

    /// A life that never served is the command line's fault where there is another one to be tried.
    fn fail_to_live(&mut self, now: Instant) -> Vec<Action> {
        if self.may_fall_back && self.ready.is_none() { self.fall_back() } else { self.crash(Then::BackOff, now) }
    }

    /// Tried once: when the other command line fails as well, the usual pauses follow.
    fn fall_back(&mut self) -> Vec<Action> {
        self.may_fall_back = false;
        let mut actions = vec![Action::FallBack];
        actions.append(&mut self.kill(Then::Spawn));
        actions
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

    fn queue(&mut self, now: Instant) -> Vec<Action> {
        self.forgive(now);
        self.state = State::Waiting;
        vec![Action::AwaitTurn]
    }

    fn spawn(&mut self, now: Instant) -> Vec<Action> {
        self.ready_by = Some(now + self.limits.startup);
        self.state = State::Alive(Stage::Starting);
        vec![Action::Spawn]
    }

    fn enter(&mut self, state: State) -> Vec<Action> {
        self.state = state;
        Vec::new()
    }
}

/// The pause after the given number of crashes in a row.
fn backoff(crashes: u32) -> Duration {
    let doublings = crashes.saturating_sub(1).min(16);
    (FIRST_BACKOFF * 2_u32.pow(doublings)).min(LONGEST_BACKOFF)
}

#[cfg(test)]
mod tests;
