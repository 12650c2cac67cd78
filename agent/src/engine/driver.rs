//! The task behind one engine: waits for commands, exits, news and deadlines, feeds them to the state machine, carries out what it says and publishes the status. All decisions are the machine's; all waiting is here.

use std::future::pending;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use tokio::process::Child;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use super::command::socket_in;
use super::exception::root_cause;
use super::health::{self, ModelCard, News};
use super::log::{Log, is_sign_of_loading};
use super::process::{Group, Spawned};
use super::state::{Action, Event, Limits, Machine, Stage, State};
use super::{EngineSpec, Grip, Phase, Status};
use crate::cache::{self, CacheLog};
use crate::probe::{self, Sample};
use crate::traffic::Traffic;

/// Lines of the engine's log that are shown with a failure.
const SHOWN_LINES: usize = 10;

/// How long the rest of a dead engine's output and its first process's exit status may take to be read.
const REST_DEADLINE: Duration = Duration::from_millis(500);

/// How long the last lines may take to reach the disk when the engine is stopped for good.
const LOG_DEADLINE: Duration = Duration::from_secs(2);

/// News waiting for the driver.
const WAITING_NEWS: usize = 8;

/// What the driver is made of.
pub(super) struct Parts {
    pub(super) spec: EngineSpec,
    pub(super) commands: mpsc::Receiver<Event>,
    pub(super) samples: watch::Sender<Option<Sample>>,
    pub(super) traffic: Arc<Traffic>,
    pub(super) cache: Arc<CacheLog>,
    pub(super) log: Log,
    pub(super) log_written: oneshot::Receiver<()>,
    pub(super) grip: Arc<Mutex<Grip>>,
    pub(super) tasks: TaskTracker,
}

/// One engine's task.
pub(super) struct Driver {
    parts: Parts,
    machine: Machine,
    status: watch::Sender<Status>,
    life: Option<Life>,
    /// Lives so far.
    lives: u32,
    last_epoch: u64,
    /// Why the present life ended, as far as that is known.
    cause: String,
    /// A crash whose last lines have not been read yet.
    crashed: bool,
    /// Every handle is gone.
    abandoned: bool,
}

/// What belongs to one life of the engine and ends with it.
struct Life {
    spawned: Instant,
    /// `None` once its exit was seen.
    child: Option<Child>,
    models: Arc<[ModelCard]>,
    ready_in: Option<Duration>,
    news: mpsc::Receiver<News>,
    follower: AbortOnDropHandle<()>,
    _health: AbortOnDropHandle<()>,
    probe: Option<AbortOnDropHandle<()>>,
    /// For the task that follows the engine's cache, which begins with the engine's readiness.
    cache: Option<cache::Writer>,
    follows_cache: Option<AbortOnDropHandle<()>>,
    /// The engine answers, and its cache is about to be followed.
    joining: Option<oneshot::Receiver<()>>,
}

impl Driver {
    /// A driver that has not begun, and its status.
    pub(super) fn new(parts: Parts) -> (Self, watch::Receiver<Status>) {
        let machine =
            Machine::new(Limits { startup: parts.spec.startup_timeout, drain: parts.spec.drain_timeout, grace: parts.spec.stop_grace });
        let (status, receiver) = watch::channel(Status {
            phase: Phase::Starting,
            epoch: 0,
            reason: "about to start".to_owned(),
            pid: None,
            restarts: 0,
            version: parts.spec.version,
            models: Arc::default(),
            ready_in: None,
        });
        let driver =
            Self { parts, machine, status, life: None, lives: 0, last_epoch: 0, cause: String::new(), crashed: false, abandoned: false };
        (driver, receiver)
    }

    /// Runs the engine until it is stopped for good.
    pub(super) async fn run(mut self) {
        self.apply(Event::Start).await;
        while !self.machine.is_finished() {
            if let Some(event) = self.next_event().await {
                self.apply(event).await;
            }
        }
        self.parts.log.close();
        // A disk that is slower than this loses the last lines, not the shutdown.
        let _ = timeout(LOG_DEADLINE, &mut self.parts.log_written).await;
    }

    /// Waits for the next thing to happen; `None` if it concerned the status only.
    async fn next_event(&mut self) -> Option<Event> {
        let state = self.machine.state();
        let wake_at = self.machine.wake_at();
        let group = self.parts.grip.lock().group;
        let (child, news, joining) = match &mut self.life {
            Some(life) => (life.child.as_mut(), Some(&mut life.news), life.joining.as_mut()),
            None => (None, None, None),
        };
        // The exit comes before the news: a refused connection is its consequence.
        tokio::select! {
            biased;
            command = self.parts.commands.recv(), if !self.abandoned => {
                self.abandoned = command.is_none();
                Some(command.unwrap_or(Event::Stop))
            }
            exit = exit_of(child) => {
                self.note_exit(&exit);
                Some(Event::Exited)
            }
            news = next_of(news) => self.take_news(news),
            () = joined(joining) => self.become_ready(),
            () = self.parts.traffic.idle(), if matches!(state, State::Draining { .. }) => Some(Event::Idle),
            ended = end_of(group), if matches!(state, State::Killing { .. }) => self.note_end(ended),
            () = sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => Some(Event::Tick),
        }
    }

    /// Feeds one event to the machine, carries out the actions and publishes the outcome.
    async fn apply(&mut self, event: Event) {
        if event == Event::Tick && matches!(self.machine.state(), State::Alive(_)) {
            let limit = self.parts.spec.startup_timeout.as_secs_f32();
            self.cause = format!("the engine was not ready within {limit} s");
        }
        if event == Event::GroupEmpty {
            self.bury().await;
        }
        let before = self.machine.state();
        let mut event = Some(event);
        while let Some(now) = event.take() {
            for action in self.machine.on(now, Instant::now()) {
                match action {
                    Action::Spawn => event = self.spawn().err(),
                    Action::Terminate => self.terminate(),
                    Action::KillGroup => self.kill_group(),
                    Action::ReportCrash => self.crashed = true,
                }
            }
        }
        let reason = (before != self.machine.state()).then(|| self.reason());
        self.publish(reason);
    }

    fn spawn(&mut self) -> Result<(), Event> {
        self.cause.clear();
        self.crashed = false;
        self.parts.samples.send_replace(None);
        let epoch = self.next_epoch();
        self.parts.log.begin(&format!("hostler: life {epoch} of this engine begins"));
        let spawned = self.parts.grip.lock().spawn(&self.parts.spec);
        self.lives += 1;
        match spawned {
            Ok(spawned) => {
                tracing::info!(engine = self.parts.spec.index, pid = spawned.group.id(), epoch, "engine started");
                self.life = Some(self.begin_life(spawned, epoch));
                Ok(())
            }
            Err(error) => {
                let program = self.parts.spec.command.program.display();
                self.cause = format!("cannot start {program}: {error}");
                Err(Event::SpawnFailed)
            }
        }
    }

    fn begin_life(&self, spawned: Spawned, epoch: u64) -> Life {
        let (sender, news) = mpsc::channel(WAITING_NEWS);
        let log = self.parts.log.clone();
        let lines = sender.clone();
        let follower = self.parts.tasks.spawn(async move {
            let on_line = |line: &str| {
                if is_sign_of_loading(line) {
                    // Full or closed: it is past loading.
                    let _ = lines.try_send(News::Loading);
                }
            };
            log.follow(spawned.output, on_line).await;
        });
        let socket = socket_in(&self.parts.spec.directory);
        let health = self.parts.tasks.spawn(health::watch(socket, sender));
        Life {
            spawned: Instant::now(),
            child: Some(spawned.child),
            models: Arc::default(),
            ready_in: None,
            news,
            follower: AbortOnDropHandle::new(follower),
            _health: AbortOnDropHandle::new(health),
            probe: None,
            cache: Some(self.parts.cache.begin(epoch)),
            follows_cache: None,
            joining: None,
        }
    }

    /// Increases even if the clock was set back.
    fn next_epoch(&mut self) -> u64 {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(since_1970.as_micros()).unwrap_or(u64::MAX);
        self.last_epoch = now.max(self.last_epoch + 1);
        self.last_epoch
    }

    fn terminate(&mut self) {
        if let Some(life) = &mut self.life {
            // An engine that stops refuses to be read, which is nothing to warn of.
            life.probe = None;
            life.follows_cache = None;
        }
        let running = self.life.as_ref().is_some_and(|life| life.child.is_some());
        if let Some(group) = self.parts.grip.lock().group.filter(|_| running) {
            group.terminate();
        }
    }

    fn kill_group(&self) {
        if let Some(group) = self.parts.grip.lock().group {
            group.kill();
        }
    }

    /// Ends a life of which no process is left: reads the rest of its output, then forgets it and its files.
    async fn bury(&mut self) {
        self.parts.grip.lock().group = None;
        self.parts.cache.end();
        if let Some(mut life) = self.life.take() {
            // A process that left the group may hold the pipe open; what it prints is nobody's.
            let _ = timeout(REST_DEADLINE, &mut life.follower).await;
            if let Some(mut child) = life.child.take() {
                // Killed together with its group; this only reaps it.
                let _ = timeout(REST_DEADLINE, child.wait()).await;
            }
        }
        let directory = &self.parts.spec.directory;
        match std::fs::remove_dir_all(directory) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(%error, path = %directory.display(), "cannot remove the engine's directory");
            }
            _ => {}
        }
    }

    fn note_exit(&mut self, exit: &std::io::Result<ExitStatus>) {
        if let Some(life) = &mut self.life {
            life.child = None;
        }
        // After a crash this is only the end of our own kill.
        if !self.crashed {
            self.cause = match exit {
                Ok(status) => format!("the engine ended without having been asked to ({status})"),
                Err(error) => format!("the engine was lost: {error}"),
            };
        }
    }

    fn note_end(&self, ended: Result<(), Vec<i32>>) -> Option<Event> {
        let Err(left) = ended else {
            return Some(Event::GroupEmpty);
        };
        let reason = format!("processes {left:?} of the engine do not die; it is not started again before they have");
        tracing::error!(engine = self.parts.spec.index, "{reason}");
        self.publish(Some(reason));
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
            News::Models(models) => {
                if let Some(life) = &mut self.life {
                    life.models = models.into();
                }
                self.publish(None);
                None
            }
            News::Ready(models) => {
                self.join_cache(models);
                None
            }
        }
    }

    /// The engine answers. Before requests come, its cache is listened to: what it stores from now on is known.
    fn join_cache(&mut self, models: Vec<ModelCard>) {
        let Some(life) = &mut self.life else { return };
        life.models = models.into();
        let Some(writer) = life.cache.take() else { return };
        let (connected, joining) = oneshot::channel();
        let (source, index) = (self.parts.spec.cache.clone(), self.parts.spec.index);
        let follows = self.parts.tasks.spawn(async move { cache::follow(&source, writer, index, connected).await });
        life.follows_cache = Some(AbortOnDropHandle::new(follows));
        life.joining = Some(joining);
    }

    fn become_ready(&mut self) -> Option<Event> {
        let life = self.life.as_mut()?;
        life.joining = None;
        // An engine that stops meanwhile must not be told as ready.
        if !matches!(self.machine.state(), State::Alive(_)) {
            return None;
        }
        let took = life.spawned.elapsed();
        life.ready_in = Some(took);
        let (spec, samples) = (&self.parts.spec, self.parts.samples.clone());
        let (socket, interval) = (socket_in(&spec.directory), spec.probe_interval);
        let traffic = Arc::clone(&self.parts.traffic);
        let probe = self.parts.tasks.spawn(async move {
            probe::watch(&socket, &traffic, interval, &samples).await;
        });
        life.probe = Some(AbortOnDropHandle::new(probe));
        tracing::info!(engine = spec.index, seconds = format_args!("{:.1}", took.as_secs_f32()), "engine is ready");
        Some(Event::Ready)
    }

    /// The sentence for the state just entered.
    fn reason(&self) -> String {
        match self.machine.state() {
            State::Alive(Stage::Starting) => "the engine's process has started".to_owned(),
            State::Alive(Stage::Loading) => "the engine loads its model".to_owned(),
            State::Alive(Stage::Ready) => "the engine serves".to_owned(),
            State::Draining { then, .. } => {
                format!("requests may finish; then the engine {}", then.in_words())
            }
            State::Stopping { then, .. } => {
                format!("the engine was told to stop; then it {}", then.in_words())
            }
            State::Killing { .. } if self.crashed => self.cause.clone(),
            State::Killing { .. } => "the engine's processes are being ended".to_owned(),
            State::Stopped => "the engine was asked to stop".to_owned(),
            State::BackingOff { until } => self.failure(until),
        }
    }

    /// What happened, when it goes on, and what the engine said last.
    fn failure(&self, until: Instant) -> String {
        let pause = until.saturating_duration_since(Instant::now()).as_secs_f32().ceil();
        let lines = self.parts.log.last_of_life(usize::MAX);
        let exception = root_cause(&lines).map(|exception| format!(": {exception}")).unwrap_or_default();
        let mut text = format!("{}{exception}; next start in {pause} s", self.cause);
        let shown = &lines[lines.len().saturating_sub(SHOWN_LINES)..];
        if !shown.is_empty() {
            text.push_str("; its last lines:\n");
            text.push_str(&shown.join("\n"));
        }
        tracing::error!(engine = self.parts.spec.index, log = %self.parts.spec.log.display(), "{text}");
        text
    }

    fn publish(&self, reason: Option<String>) {
        let life = self.life.as_ref();
        let pid = self.parts.grip.lock().group.map(Group::id);
        self.status.send_if_modified(|status| {
            let next = Status {
                phase: self.machine.state().into(),
                epoch: self.last_epoch,
                reason: reason.unwrap_or_else(|| status.reason.clone()),
                pid,
                restarts: self.lives.saturating_sub(1),
                version: self.parts.spec.version,
                models: life.map(|life| Arc::clone(&life.models)).unwrap_or_default(),
                ready_in: life.and_then(|life| life.ready_in),
            };
            let changed = *status != next;
            *status = next;
            changed
        });
    }
}

impl Drop for Driver {
    /// However the task ends, its processes end with it.
    fn drop(&mut self) {
        let mut grip = self.parts.grip.lock();
        grip.closed = true;
        if let Some(group) = grip.group.take() {
            group.kill();
        }
    }
}

async fn exit_of(child: Option<&mut Child>) -> std::io::Result<ExitStatus> {
    match child {
        Some(child) => child.wait().await,
        None => pending().await,
    }
}

async fn next_of(news: Option<&mut mpsc::Receiver<News>>) -> News {
    if let Some(news) = news
        && let Some(news) = news.recv().await
    {
        return news;
    }
    // When all that could tell something has ended, only the exit is left to wait for.
    pending().await
}

/// Whether or not the cache could be joined, the engine serves then.
async fn joined(joining: Option<&mut oneshot::Receiver<()>>) {
    match joining {
        Some(joining) => drop(joining.await),
        None => pending().await,
    }
}

/// The end of a killed group; at once if there was none.
async fn end_of(group: Option<Group>) -> Result<(), Vec<i32>> {
    match group {
        Some(group) => group.end().await,
        None => Ok(()),
    }
}
