//! One engine under supervision: started, watched, drained, restarted after a crash and stopped for good, with never a process left behind. `Engine` is the handle that the rest of the agent holds; a task of its own does the work.

pub mod command;
mod driver;
mod exception;
mod health;
pub(crate) mod http;
mod log;
mod proc;
mod process;
mod state;
pub mod version;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio_util::task::TaskTracker;

use self::command::{CommandLine, Launch, cache_source, command_line, socket_in};
use self::driver::Driver;
pub use self::health::ModelCard;
use self::log::Log;
pub(crate) use self::process::end_orphans;
use self::process::{Group, Spawned};
use self::state::{Event, Stage, State, Then};
use self::version::Version;
use crate::cache::{self, CacheLog};
use crate::host::HostError;
use crate::probe::Sample;
use crate::traffic::Traffic;

/// Commands waiting for the driver, which never waits long for anything else.
const WAITING_COMMANDS: usize = 16;

/// Everything needed to run one engine.
#[derive(Debug, Clone)]
pub struct EngineSpec {
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
    pub cache: cache::Source,
}

impl EngineSpec {
    /// The engine that the configuration describes. Fails as `command_line` does.
    pub fn new(launch: &Launch<'_>, log: PathBuf) -> Result<Self, HostError> {
        Ok(Self {
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
}

impl From<State> for Phase {
    fn from(state: State) -> Self {
        match state {
            State::Alive(Stage::Starting) => Self::Starting,
            State::Alive(Stage::Loading) => Self::Loading,
            State::Alive(Stage::Ready) => Self::Ready,
            State::Killing { then: Then::BackOff } | State::BackingOff { .. } => Self::Failed,
            State::Draining { .. } | State::Stopping { .. } | State::Killing { .. } => Self::Draining,
            State::Stopped => Self::Stopped,
        }
    }
}

/// What is known about an engine at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
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
}

/// The processes of an engine, for whoever must end them at once.
#[derive(Debug, Default)]
struct Grip {
    group: Option<Group>,
    /// No further process may be created.
    closed: bool,
}

#[derive(Debug)]
struct Shared {
    socket: PathBuf,
    commands: mpsc::Sender<Event>,
    status: watch::Receiver<Status>,
    samples: watch::Receiver<Option<Sample>>,
    traffic: Arc<Traffic>,
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
        let (commands, waiting) = mpsc::channel(WAITING_COMMANDS);
        let traffic = Traffic::new();
        let grip = Arc::new(Mutex::new(Grip::default()));
        let (log, log_written) = Log::open(spec.log.clone());
        let socket = socket_in(&spec.directory);
        let (samples_out, samples) = watch::channel(None);
        let cache = Arc::new(CacheLog::default());
        let (driver, status) = Driver::new(driver::Parts {
            spec,
            commands: waiting,
            samples: samples_out,
            traffic: Arc::clone(&traffic),
            cache: Arc::clone(&cache),
            log: log.clone(),
            log_written,
            grip: Arc::clone(&grip),
            tasks: tracker.clone(),
        });
        tracker.spawn(driver.run());
        Self { shared: Arc::new(Shared { socket, commands, status, samples, traffic, cache, log, grip }) }
    }

    /// The engine's status, as it changes.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.shared.status.clone()
    }

    /// The engine's load, as it changes; `None` until this life was read for the first time.
    pub fn samples(&self) -> watch::Receiver<Option<Sample>> {
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

    /// The last lines that the engine printed, oldest first, over all its lives; 200 at most.
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

    /// Drains the engine and starts it again; brings back a stopped or failed one at once.
    pub fn restart(&self) {
        self.send(Event::Restart);
    }

    /// Stops the engine for good, without waiting for its requests. Resolves when no process of it is left: after the stop grace and, as a rule, milliseconds more, but never while a killed process does not die. The deadline is the caller's.
    pub async fn stop(&self) {
        // A driver that is gone has stopped.
        let _ = self.shared.commands.send(Event::Stop).await;
        self.shared.commands.closed().await;
    }

    /// Kills every process of the engine and prevents further ones. Does not wait: for the way out after a second signal.
    pub fn kill_now(&self) {
        let mut grip = self.shared.grip.lock();
        grip.closed = true;
        if let Some(group) = grip.group {
            group.kill();
        }
    }

    fn send(&self, event: Event) {
        if let Err(error) = self.shared.commands.try_send(event) {
            tracing::warn!(?event, %error, "engine does not take the command");
        }
    }
}

impl Grip {
    /// Creates a process unless that is over.
    fn spawn(&mut self, spec: &EngineSpec) -> std::io::Result<Spawned> {
        if self.closed {
            return Err(std::io::Error::other("the agent is stopping"));
        }
        let spawned = process::spawn(&spec.command, &spec.directory)?;
        self.group = Some(spawned.group);
        Ok(spawned)
    }
}

#[cfg(test)]
mod tests;
