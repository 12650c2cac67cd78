//! One engine under supervision: started, watched, drained, restarted after a crash and stopped for good, with never a process left behind. `Engine` is the handle that the rest of the agent holds; a task of its own does the work.

mod canary;
pub mod control;
pub mod diagnosis;
mod driver;
mod exception;
mod health;
pub(crate) mod http;
mod life;
mod log;
pub mod progress;
mod state;
mod subject;
pub mod turns;
mod watchdog;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio_util::task::TaskTracker;

use self::control::{Adapter, Control, Wanted};
use self::diagnosis::Diagnosis;
use self::driver::Driver;
pub use self::health::ModelCard;
use self::log::Log;
use self::progress::{Facts, Progress};
use self::state::{Event, Stage, State, Then};
use self::turns::Turns;
use crate::cache::{self, CacheLog};
use crate::crashes::CrashLog;
use crate::gpu::{Binding, Free};
use crate::host::HostError;
use crate::keeper::wire::{Order, Request};
use crate::keeper::{self, Fate, Link, Notices, Survivor};
use crate::probe::LoadSample;
use crate::traffic::Traffic;
use crate::vllm::command_line::{cache_source, command_line};
use crate::vllm::directory::{prepare, socket_in};
use crate::vllm::{CommandLine, FrontEndInUse, Launch, Version};

/// Commands waiting for the driver, which never waits long for anything else.
const WAITING_COMMANDS: usize = 16;

/// Everything needed to run one engine.
#[derive(Debug, Clone)]
pub struct EngineSpec {
    /// The node's name in the fleet.
    pub node: String,
    /// Which replica of this node.
    pub index: u32,
    /// What is run.
    pub command: CommandLine,
    /// vLLM's version, if known.
    pub version: Option<Version>,
    /// The engine's own directory; emptied before each life.
    pub directory: PathBuf,
    /// Where its output goes, in a directory that exists.
    pub log: PathBuf,
    /// From a spawn until the engine is ready.
    pub startup_timeout: Duration,
    /// For running requests when the engine is drained.
    pub drain_timeout: Duration,
    /// From SIGTERM until the group is killed.
    pub stop_grace: Duration,
    /// Between two readings of a busy engine's metrics.
    pub probe_interval: Duration,
    /// Where the engine tells what it has cached.
    pub cache: cache::KvEventSource,
    /// This program: it has the subcommand `keeper`, whose processes stand between the agent and its engines.
    pub keeper: PathBuf,
    /// What becomes of the engine when the agent dies.
    pub if_agent_dies: Fate,
    /// Where the engine's processes may run; `None` leaves it to the kernel.
    pub binding: Option<Binding>,
    /// Tells before each start whether its GPUs are free.
    pub ready_to_start: Option<Free>,
    /// What is run instead of `command` once that has not become ready, or lacks a route.
    pub fallback: Option<CommandLine>,
    /// Who of this node's engines may start when.
    pub turns: Arc<Turns>,
    /// How long an engine with work may show no progress, at least, until it counts as hung.
    pub stall_timeout: Duration,
    /// After this time without requests the engine is asked for one token; zero turns it off.
    pub canary_interval: Duration,
}

impl EngineSpec {
    /// The engine that the configuration describes, with the defaults for what the agent as a whole decides: it ends with the agent, is bound
    /// nowhere, has one command line and starts at once. Fails as `command_line` does.
    pub fn new(launch: &Launch<'_>, log: PathBuf, keeper: PathBuf) -> Result<Self, HostError> {
        Ok(Self {
            node: launch.config.node.clone(),
            index: launch.replica.index,
            command: command_line(launch)?,
            version: launch.version,
            directory: launch.directory.to_owned(),
            log,
            startup_timeout: launch.config.startup_timeout,
            drain_timeout: launch.config.drain_timeout,
            stop_grace: launch.config.stop_grace,
            probe_interval: launch.config.probe_interval,
            cache: cache_source(launch),
            keeper,
            if_agent_dies: Fate::Kill,
            binding: None,
            ready_to_start: None,
            fallback: None,
            turns: Arc::new(Turns::at_once()),
            stall_timeout: launch.config.stall_timeout,
            canary_interval: launch.config.canary_interval,
        })
    }
}

/// Where an engine is, as others see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The process exists.
    Starting,
    /// It loads its model.
    Loading,
    /// It serves.
    Ready,
    /// It finishes what runs, or is being stopped.
    Draining,
    /// There is no process, and none is wanted.
    Stopped,
    /// It crashed; the next life begins after a pause.
    Failed,
    /// It stays out of service until it is released.
    Quarantined,
    /// It has given its memory back until it is woken.
    Sleeping,
}

impl From<State> for Phase {
    fn from(state: State) -> Self {
        match state {
            State::Waiting | State::Alive(Stage::Starting) => Self::Starting,
            State::Alive(Stage::Loading) => Self::Loading,
            State::Alive(Stage::Ready) => Self::Ready,
            State::Alive(Stage::Sleeping) => Self::Sleeping,
            State::Killing { then: Then::BackOff } | State::BackingOff { .. } => Self::Failed,
            State::Killing { then: Then::Quarantine } | State::Quarantined => Self::Quarantined,
            State::Draining { .. } | State::Stopping { .. } | State::Killing { .. } => Self::Draining,
            State::Stopped => Self::Stopped,
        }
    }
}

/// What is known about an engine at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Status {
    /// Where it is.
    pub phase: Phase,
    /// Which life this is: the time of its spawn in microseconds since 1970, made to increase. 0 before the first.
    pub epoch: u64,
    /// Why it is where it is, in a sentence; after a crash also its last lines.
    pub reason: String,
    /// Its first process, which leads its group.
    pub pid: Option<u32>,
    /// Lives after the first.
    pub restarts: u32,
    /// vLLM's version, if known.
    pub version: Option<Version>,
    /// What it serves; empty until it is ready.
    pub models: Arc<[ModelCard]>,
    /// How long this life took to become ready.
    pub ready_in: Option<Duration>,
    /// How far the start has come; `None` unless it starts or loads.
    pub progress: Option<Progress>,
    /// What the last life died of; `None` once the engine is ready again.
    pub failure: Option<Diagnosis>,
    /// What the log of this life told.
    pub facts: Facts,
    /// Which front-end this life has, or the next one will have.
    pub front_end: FrontEndInUse,
}

/// What the driver is asked to do.
#[derive(Debug)]
struct Command {
    event: Event,
    /// Why, for what the status says; may be empty.
    reason: String,
}

/// A life that an agent had begun which has died.
#[derive(Debug)]
pub(crate) struct Adopted {
    /// The engine and its keeper.
    pub(crate) survivor: Survivor,
    /// It runs with the second command line.
    pub(crate) fell_back: bool,
}

/// The processes of an engine, for whoever must end them at once.
#[derive(Debug, Default)]
struct Grip {
    link: Option<Link>,
    /// No further process may be created.
    closed: bool,
}

#[derive(Debug)]
struct Shared {
    socket: PathBuf,
    commands: mpsc::Sender<Command>,
    orders: mpsc::Sender<control::Ordered>,
    wanted: watch::Receiver<Wanted>,
    status: watch::Receiver<Status>,
    samples: watch::Receiver<Option<LoadSample>>,
    traffic: Arc<Traffic>,
    deaths: Arc<CrashLog>,
    cache: Arc<CacheLog>,
    log: Log,
    grip: Arc<Mutex<Grip>>,
}

/// A supervised engine. Cheap to clone; when the last clone is gone the engine is stopped.
#[derive(Debug, Clone)]
pub struct Engine {
    shared: Arc<Shared>,
}

impl Engine {
    /// Begins to supervise an engine; its task ends after `stop`.
    pub fn start(spec: EngineSpec, tracker: &TaskTracker) -> Self {
        Self::supervise(spec, None, tracker)
    }

    /// As `start`, with a life that another agent began, if there is one; the directory in `spec` is that life's then.
    pub(crate) fn supervise(spec: EngineSpec, adopted: Option<Adopted>, tracker: &TaskTracker) -> Self {
        let (commands, waiting) = mpsc::channel(WAITING_COMMANDS);
        let traffic = Traffic::new();
        let grip = Arc::new(Mutex::new(Grip::default()));
        let log = Log::default();
        let socket = socket_in(&spec.directory);
        let (samples_out, samples) = watch::channel(None);
        let cache = Arc::new(CacheLog::default());
        let deaths = Arc::new(CrashLog::default());
        let (control, orders, wanted) = Control::new(control::Terms {
            index: spec.index,
            may_sleep: spec.command.unlocks_sleep(),
            drain: spec.drain_timeout,
            startup: spec.startup_timeout,
        });
        let (driver, status) = Driver::new(driver::Parts {
            spec,
            commands: waiting,
            samples: samples_out,
            traffic: Arc::clone(&traffic),
            deaths: Arc::clone(&deaths),
            cache: Arc::clone(&cache),
            log: log.clone(),
            grip: Arc::clone(&grip),
            wanted: wanted.clone(),
            tasks: tracker.clone(),
            adopted,
        });
        tracker.spawn(driver.run());
        let shared =
            Arc::new(Shared { socket, commands, orders, wanted, status: status.clone(), samples, traffic, deaths, cache, log, grip });
        tracker.spawn(control.run(Arc::downgrade(&shared), status));
        Self { shared }
    }

    /// The engine's status, as it changes.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.shared.status.clone()
    }

    /// The engine's load, as it changes; `None` until this life was read for the first time.
    pub fn samples(&self) -> watch::Receiver<Option<LoadSample>> {
        self.shared.samples.clone()
    }

    /// What the engine has cached, over all its lives.
    pub fn cache(&self) -> &Arc<CacheLog> {
        &self.shared.cache
    }

    /// Where the engine listens.
    pub fn socket(&self) -> &Path {
        &self.shared.socket
    }

    /// The requests in flight on this engine.
    pub fn traffic(&self) -> &Arc<Traffic> {
        &self.shared.traffic
    }

    /// What was in flight when lives of this engine ended that nobody had ended.
    pub fn deaths(&self) -> &Arc<CrashLog> {
        &self.shared.deaths
    }

    /// The last lines that the engine printed, oldest first, over all its lives; 1,000 at most.
    pub fn log_tail(&self, count: usize) -> Vec<String> {
        self.shared.log.last(count)
    }

    /// Lets running requests finish within the drain timeout, then stops the engine until `restart`.
    pub fn drain(&self) {
        self.send(Event::Drain);
    }

    /// As `drain`, for an agent that is leaving: no `restart` revives the engine.
    pub fn retire(&self) {
        self.send(Event::Retire);
    }

    /// As `retire`, but the engine lives on, for the next agent; not where it ends with its agent.
    pub fn hand_over(&self) {
        self.send(Event::HandOver);
    }

    /// Drains the engine and starts it again; brings back a stopped or failed one at once.
    pub fn restart(&self) {
        self.send(Event::Restart);
    }

    /// Takes the engine out of service until `release`, and says why. With `at_once` its processes are killed now; else running requests may finish first, within the drain timeout.
    pub fn quarantine(&self, reason: String, at_once: bool) {
        self.tell(if at_once { Event::QuarantineNow } else { Event::Quarantine }, reason);
    }

    /// Ends this life as a crash with this cause: its processes are killed, and the next life follows after the usual pause.
    pub fn fail(&self, reason: String) {
        self.tell(Event::Fail, reason);
    }

    /// Starts a quarantined, failed or stopped engine again now, its crashes forgotten.
    pub fn release(&self) {
        self.send(Event::Release);
    }

    /// Notes that a ready engine is about to give its memory back, and why; the phase changes at once.
    pub fn fall_asleep(&self, reason: String) {
        self.tell(Event::FallAsleep, reason);
    }

    /// Notes that a sleeping engine has its memory again.
    pub fn wake_up(&self) {
        self.send(Event::WakeUp);
    }

    /// The adapters that operators had loaded and that it could not load again.
    pub(crate) fn lost_adapters(&self) -> Vec<Adapter> {
        let status = self.shared.status.borrow();
        if status.phase == Phase::Ready { self.shared.wanted.borrow().lacking(&status.models).cloned().collect() } else { Vec::new() }
    }

    /// Stops the engine for good, without waiting for its requests. Resolves when no process of it is left: after the stop grace and, as a rule, milliseconds more, but never while a killed process does not die. The deadline is the caller's.
    pub async fn stop(&self) {
        // A driver that is gone has stopped.
        let _ = self.shared.commands.send(Command { event: Event::Stop, reason: String::new() }).await;
        self.shared.commands.closed().await;
    }

    /// Kills every process of the engine and prevents further ones. Does not wait: for the way out after a second signal.
    pub fn kill_now(&self) {
        let mut grip = self.shared.grip.lock();
        grip.closed = true;
        grip.say(&Request::Kill);
    }

    fn send(&self, event: Event) {
        self.tell(event, String::new());
    }

    fn tell(&self, event: Event, reason: String) {
        if let Err(error) = self.shared.commands.try_send(Command { event, reason }) {
            tracing::warn!(?event, %error, "engine does not take the command");
        }
    }
}

impl Grip {
    /// Creates a keeper, and through it an engine, unless that is over.
    fn start(&mut self, order: Order) -> std::io::Result<Notices> {
        if self.closed {
            return Err(std::io::Error::other("the agent is stopping"));
        }
        prepare(Path::new(&order.directory))?;
        let (link, notices) = keeper::start(order)?;
        self.link = Some(link);
        Ok(notices)
    }

    /// Tells the keeper, if there is one.
    fn say(&self, request: &Request) {
        if let Some(link) = &self.link {
            link.say(request);
        }
    }
}

#[cfg(test)]
mod tests;
