//! The task behind one engine: waits for commands, its keeper, news and deadlines, feeds them to the state machine, carries out what it says and publishes the status. All decisions are the machine's; all waiting is here.

mod lives;
mod status;

use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::poll_immediate;
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tokio_util::task::TaskTracker;

use super::control;
use super::diagnosis::{Diagnosis, Kind};
use super::health::News;
use super::life::{Life, Story, Told};
use super::log::Log;
use super::state::{Action, Event, Limits, Machine, Stage, State};
use super::turns::Turn;
use super::{Adopted, Command, EngineSpec, Grip, Phase, Status};
use crate::cache::CacheLog;
use crate::crashes::CrashLog;
use crate::gpu::Obstacle;
use crate::keeper::wire::Request;
use crate::probe::LoadSample;
use crate::traffic::Traffic;
use crate::vllm::FrontEndInUse;

/// How often the progress of a start, and what an engine waits for, is told anew.
const COMMENTARY: Duration = Duration::from_secs(1);

/// The turn to start, or what is in the way.
type MayStart = Result<Turn, Obstacle>;

/// What the driver is made of.
pub(super) struct Parts {
    pub(super) spec: EngineSpec,
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) samples: watch::Sender<Option<LoadSample>>,
    pub(super) traffic: Arc<Traffic>,
    pub(super) deaths: Arc<CrashLog>,
    pub(super) cache: Arc<CacheLog>,
    pub(super) log: Log,
    pub(super) grip: Arc<Mutex<Grip>>,
    /// The adapters that every life is to have.
    pub(super) wanted: watch::Receiver<control::Wanted>,
    pub(super) tasks: TaskTracker,
    /// A life that another agent began.
    pub(super) adopted: Option<Adopted>,
}

/// One engine's task.
pub(super) struct Driver {
    parts: Parts,
    machine: Machine,
    status: watch::Sender<Status>,
    life: Option<Life>,
    /// The turn to start, and the wait for it.
    turn: Option<Turn>,
    waiting: Option<Pin<Box<dyn Future<Output = MayStart> + Send>>>,
    /// The wait for the end of processes whose keeper is gone.
    ending: Option<JoinHandle<Result<usize, Vec<i32>>>>,
    /// When the keeper must have done what it was told last.
    keeper_by: Option<Instant>,
    /// Lives so far.
    lives: u32,
    last_epoch: u64,
    /// How long the last start took.
    usual_start: Option<Duration>,
    /// Why the present life ended, as far as that is known.
    cause: String,
    /// Why the engine is out of service, or asleep.
    order: String,
    /// What the last life died of.
    failure: Option<Diagnosis>,
    /// A crash whose last lines have not been read yet.
    crashed: bool,
    /// The other command line is used.
    fell_back: bool,
    /// Every handle is gone.
    abandoned: bool,
}

impl Driver {
    /// A driver that has not begun, and its status.
    pub(super) fn new(parts: Parts) -> (Self, watch::Receiver<Status>) {
        let spec = &parts.spec;
        let limits = Limits { startup: spec.startup_timeout, drain: spec.drain_timeout, grace: spec.stop_grace };
        let adopted = parts.adopted.as_ref();
        let fell_back = adopted.is_some_and(|adopted| adopted.fell_back);
        let life = adopted.map(|adopted| adopted.survivor.life.clone()).unwrap_or_default();
        let (status, receiver) = watch::channel(Status {
            phase: Phase::Starting,
            epoch: life.epoch,
            reason: "about to start".to_owned(),
            pid: None,
            restarts: life.lives.saturating_sub(1),
            version: spec.version,
            models: Arc::default(),
            ready_in: None,
            progress: None,
            failure: None,
            facts: super::Facts::default(),
            front_end: FrontEndInUse::default(),
        });
        let machine = Machine::new(limits, spec.fallback.is_some() && !fell_back);
        let driver = Self {
            parts,
            machine,
            status,
            life: None,
            turn: None,
            waiting: None,
            ending: None,
            keeper_by: None,
            lives: life.lives,
            last_epoch: life.epoch,
            usual_start: None,
            cause: String::new(),
            order: String::new(),
            failure: None,
            crashed: false,
            fell_back,
            abandoned: false,
        };
        (driver, receiver)
    }

    /// Runs the engine until it is stopped for good.
    pub(super) async fn run(mut self) {
        let first = self.adopt().await.unwrap_or(Event::Start);
        self.apply(first).await;
        while !self.machine.is_finished() {
            if let Some(event) = self.next_event().await {
                self.apply(event).await;
            }
        }
    }

    /// Waits for the next thing to happen; `None` if it concerned the status only.
    async fn next_event(&mut self) -> Option<Event> {
        let state = self.machine.state();
        if matches!(state, State::Killing { .. }) && self.life.is_none() {
            return Some(Event::GroupEmpty);
        }
        let (wake_at, keeper_by) = (self.machine.wake_at(), self.keeper_by);
        let comments = matches!(state, State::Waiting | State::Alive(Stage::Starting | Stage::Loading));
        let (told, news, story, joining) = match &mut self.life {
            Some(life) => (Some(&mut life.told), Some(&mut life.news), Some(&mut life.story), life.joining.as_mut()),
            None => (None, None, None, None),
        };
        // What the keeper tells comes before the news: a refused connection is the consequence of an exit.
        tokio::select! {
            biased;
            command = self.parts.commands.recv(), if !self.abandoned => self.take_command(command),
            told = next_of(told) => self.take_told(told),
            news = next_of(news) => self.take_news(news),
            // Whether or not the cache could be joined, the engine serves then.
            _ = or_never(joining) => self.become_ready(),
            () = self.parts.traffic.wait_idle(), if matches!(state, State::Draining { .. }) => Some(Event::Idle),
            turn = or_never(self.waiting.as_mut()) => Some(self.take_turn(turn)),
            // An end that broke off has ended nothing; it is begun again.
            ended = or_never(self.ending.as_mut()) => self.note_end(ended.unwrap_or_else(|_| Err(Vec::new()))),
            () = sleep_until(keeper_by.unwrap_or_else(Instant::now)), if keeper_by.is_some() => self.miss_keeper(),
            () = sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => Some(Event::Tick),
            () = changed(story) => self.comment(),
            () = tokio::time::sleep(COMMENTARY), if comments => self.comment(),
        }
    }

    /// Feeds one event to the machine, carries out the actions and publishes the outcome.
    async fn apply(&mut self, event: Event) {
        if event == Event::Tick && matches!(self.machine.state(), State::Alive(_)) {
            self.cause = match &self.life {
                Some(life) if life.adopted && self.usual_start.is_some() => "the engine that a dead agent left does not answer".to_owned(),
                _ => format!("the engine was not ready within {} s", self.parts.spec.startup_timeout.as_secs_f32()),
            };
        }
        if event == Event::GroupEmpty {
            self.bury();
        }
        let before = self.machine.state();
        let mut event = Some(event);
        while let Some(now) = event.take() {
            for action in self.machine.on(now, Instant::now()) {
                match action {
                    Action::AwaitTurn => event = self.await_turn().await,
                    Action::FallBack => self.fall_back(),
                    Action::Spawn => event = self.spawn().err(),
                    Action::Terminate => self.terminate(),
                    Action::KillGroup => self.kill(),
                    Action::LetGo => self.let_go(),
                    Action::ReportCrash => {
                        self.crashed = true;
                        // Only an end of its own accord, a hang included, can be a request's doing.
                        if matches!(now, Event::Exited | Event::Unhealthy) {
                            self.parts.deaths.record(self.last_epoch, self.parts.traffic.crash_suspects(self.last_epoch));
                        }
                    }
                }
            }
        }
        self.settle();
        let reason = (before != self.machine.state()).then(|| self.reason());
        self.publish(reason);
    }

    /// Gives up what the state just entered has no use for.
    fn settle(&mut self) {
        match self.machine.state() {
            State::Waiting => return,
            State::Alive(Stage::Starting | Stage::Loading) | State::Stopping { .. } | State::Killing { .. } => {}
            State::Alive(Stage::Ready) => {
                if let Some(turn) = self.turn.take() {
                    turn.ready();
                }
            }
            _ => self.turn = None,
        }
        self.waiting = None;
    }

    fn take_command(&mut self, command: Option<Command>) -> Option<Event> {
        let Some(Command { event, reason }) = command else {
            self.abandoned = true;
            return Some(Event::Stop);
        };
        match event {
            Event::Quarantine | Event::QuarantineNow => {
                tracing::warn!(engine = self.parts.spec.index, reason, "quarantined");
                self.order = reason;
                // Also where the state stays the same, the reason may be new.
                if self.machine.state() == State::Quarantined {
                    self.publish(Some(self.quarantined()));
                }
            }
            Event::FallAsleep => self.order = reason,
            Event::Fail if matches!(self.machine.state(), State::Alive(_) | State::Draining { .. } | State::Waiting) => {
                self.cause = reason;
                // What an earlier life died of is another story.
                self.failure = None;
            }
            Event::Restart if self.machine.is_quarantined() => {
                let refusal = format!("{}; a restart does not", self.quarantined());
                tracing::warn!(engine = self.parts.spec.index, "not restarted: {refusal}");
                self.publish(Some(refusal));
                return None;
            }
            _ => {}
        }
        Some(event)
    }

    async fn await_turn(&mut self) -> Option<Event> {
        self.turn = None;
        let (turns, index, free) = (Arc::clone(&self.parts.spec.turns), self.parts.spec.index, self.parts.spec.ready_to_start.clone());
        let mut waiting: Pin<Box<dyn Future<Output = MayStart> + Send>> = Box::pin(async move {
            let turn = turns.turn(index).await;
            match free {
                Some(free) => free.check().await.map(|()| turn),
                None => Ok(turn),
            }
        });
        match poll_immediate(&mut waiting).await {
            Some(turn) => Some(self.take_turn(turn)),
            None => {
                self.waiting = Some(waiting);
                None
            }
        }
    }

    /// An engine whose GPUs are not free waits as after a crash, and is then asked about again.
    fn take_turn(&mut self, turn: MayStart) -> Event {
        self.waiting = None;
        match turn {
            Ok(turn) => {
                self.turn = Some(turn);
                Event::Turn
            }
            Err(Obstacle { in_use, cause, remedy }) => {
                let kind = if in_use { Kind::GpuInUse } else { Kind::Hardware };
                // What the life before has printed is not shown with this.
                self.parts.log.begin(&format!("hostler: the engine is not started: {cause}"));
                self.cause.clone_from(&cause);
                self.failure = Some(Diagnosis { kind, cause, remedy });
                Event::Fail
            }
        }
    }

    fn take_told(&mut self, told: Told) -> Option<Event> {
        let killing = matches!(self.machine.state(), State::Killing { .. });
        match told {
            Told::Started(leader) => {
                self.keeper_by = self.keeper_by.filter(|_| killing);
                self.life.as_mut()?.leader = Some(leader.pid.cast_unsigned());
                tracing::info!(engine = self.parts.spec.index, pid = leader.pid, epoch = self.last_epoch, "engine started");
                self.publish(None);
                None
            }
            Told::StartFailed(why) => {
                self.life.as_mut()?.leader = None;
                if !self.crashed {
                    self.cause = why;
                }
                let alive = matches!(self.machine.state(), State::Alive(_));
                Some(if alive { Event::SpawnFailed } else { Event::Exited })
            }
            Told::Exited(status) => {
                // After a crash this is only the end of our own kill.
                if !self.crashed {
                    self.life.as_mut()?.exit = Some(status);
                    self.cause = format!("the engine ended without having been asked to ({status})");
                }
                Some(Event::Exited)
            }
            Told::Stuck(left) => {
                self.keeper_by = Some(Instant::now() + lives::KEEPER_DEADLINE);
                self.note_end(Err(left))
            }
            Told::Empty if killing => Some(Event::GroupEmpty),
            Told::Empty => None,
            Told::Gone => self.lose_keeper("the engine's keeper was lost, and the engine with it"),
        }
    }

    fn note_end(&mut self, ended: Result<usize, Vec<i32>>) -> Option<Event> {
        self.ending = None;
        let Err(left) = ended else {
            return Some(Event::GroupEmpty);
        };
        let reason = format!("processes {left:?} of the engine do not die; it is not started again before they have");
        tracing::error!(engine = self.parts.spec.index, "{reason}");
        self.publish(Some(reason));
        if self.life.as_ref().is_some_and(|life| life.unkept) {
            self.end_orphans();
        }
        None
    }

    fn take_news(&mut self, news: News) -> Option<Event> {
        // What a dying engine still says must not be told as its state.
        if !matches!(self.machine.state(), State::Alive(_) | State::Draining { .. }) {
            return None;
        }
        match news {
            News::Loading => Some(Event::Loading),
            News::Unhealthy(reason) => {
                self.cause = reason;
                Some(Event::Unhealthy)
            }
            News::LacksRoute(reason) => {
                self.cause = reason;
                Some(Event::Unfit)
            }
            News::Models(models) => {
                if let Some(life) = &mut self.life {
                    life.models = models.into();
                }
                self.publish(None);
                None
            }
            News::Asleep => {
                self.life.as_mut()?.asleep = true;
                None
            }
            News::Ready(models) => {
                self.join_cache(models);
                None
            }
        }
    }
}

impl Drop for Driver {
    /// However the task ends, its processes end with it.
    fn drop(&mut self) {
        let mut grip = self.parts.grip.lock();
        grip.closed = true;
        grip.say(&Request::Kill);
        grip.link = None;
    }
}

async fn next_of<T>(messages: Option<&mut mpsc::Receiver<T>>) -> T {
    if let Some(messages) = messages
        && let Some(message) = messages.recv().await
    {
        return message;
    }
    // When all that could tell something has ended, there is nothing to wait for.
    pending().await
}

async fn changed(story: Option<&mut watch::Receiver<Story>>) {
    if let Some(story) = story
        && story.changed().await.is_ok()
    {
        return;
    }
    pending::<()>().await;
}

/// What is waited for; never, where nothing is.
async fn or_never<T>(wait: Option<impl Future<Output = T>>) -> T {
    match wait {
        Some(wait) => wait.await,
        None => pending().await,
    }
}
