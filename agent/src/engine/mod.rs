//! One engine under supervision: started, watched, drained, restarted after a crash and stopped for
//! good, without ever leaving a process behind.
//!
//! `Engine` is the handle that the rest of the agent holds; its own task does the work.

mod canary;
pub(crate) mod control;
mod crash_output;
pub(crate) mod diagnosis;
mod engine_life;
mod health;
pub(crate) mod log;
mod model_card;
mod monitored_engine;
mod outside_kill;
pub(crate) mod start_order;
pub(crate) mod startup_progress;
mod state_machine;
mod supervisor;
pub(crate) mod warm_starts;
mod watchdog;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio_util::task::TaskTracker;

use self::control::{ControlTask, DesiredAdapters, LoraAdapter};
use self::diagnosis::Diagnosis;
use self::log::EngineLog;
pub(crate) use self::model_card::ModelCard;
use self::start_order::StartOrder;
use self::startup_progress::{LogFacts, PastStage, StartupProgress};
pub(crate) use self::state_machine::LeaveDeadlines;
use self::state_machine::{AfterExit, EngineEvent, EngineState, LiveStage, MAX_BACKOFF};
use self::supervisor::Supervisor;
use self::warm_starts::{StartOrigin, WarmStarts};
use crate::bridge::AttachTarget;
use crate::cache::{self, CacheLog, FileLog};
use crate::crashes::CrashLog;
use crate::gang::{Gang, MemberOutput, MemberView};
use crate::gpu::{CpuBinding, GpuAvailability};
use crate::host::{EngineProgram, HostError};
use crate::keeper::wire::{KeeperRequest, LaunchSpec};
use crate::keeper::{self, AgentDeathPolicy, KeeperClient, KeeperNotices, KeeperSource, PreparedKeeper, SurvivingEngine};
use crate::probe::LoadSample;
use crate::run_dir::{HeldDirectories, RunDirError};
use crate::stage::ModelStage;
use crate::traffic::Traffic;
use crate::vllm::command_line::{cache_source, command_line};
use crate::vllm::directory::{prepare, socket_path};
use crate::vllm::warm_start::may_fork;
use crate::vllm::{CommandLine, FrontEndInUse, LaunchContext, VllmVersion};

/// Commands that may wait for the supervisor, which never waits long for anything else.
const MAX_QUEUED_COMMANDS: usize = 16;

/// A timer this late shows that neither this program nor the engine ran meanwhile: the job was
/// suspended.
///
/// Delays of a second were seen on busy machines.
const SUSPENDED_AFTER: Duration = Duration::from_secs(2);

/// Longer than any agent lives: nobody waits for an attached engine, and it is never ended.
const FOR_EVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

#[derive(Debug, Clone)]
pub struct EngineSpec {
    pub node: String,
    pub index: u32,
    pub command: CommandLine,
    pub version: Option<VllmVersion>,
    /// The engine's own directory; emptied before each life.
    pub directory: PathBuf,
    /// Parents of the engine's directory, which are created again before a life if somebody has
    /// removed them.
    pub(crate) run_dirs: Option<Arc<HeldDirectories>>,
    /// File for the engine's output, in a directory that exists.
    pub log: PathBuf,
    /// Time limit from a spawn until the engine is ready.
    pub startup_timeout: Duration,
    /// Time limit for running requests when the engine is drained.
    pub drain_timeout: Duration,
    /// Time from SIGTERM until the group is killed, while requests run.
    pub stop_grace: Duration,
    /// Longest pause between two starts after crashes.
    pub max_backoff: Duration,
    /// Interval between two readings of a busy engine's metrics.
    pub probe_interval: Duration,
    pub cache: cache::KvEventSource,
    /// How the keepers between the agent and its engines are started.
    pub keepers: KeeperSource,
    pub if_agent_dies: AgentDeathPolicy,
    /// Where the engine's processes may run; `None` leaves it to the kernel.
    pub cpu_binding: Option<CpuBinding>,
    /// Check before each start whether the engine's GPUs are free.
    pub gpu_availability: Option<GpuAvailability>,
    /// Command line used once `command` has failed to become ready, or lacks a route.
    pub fallback: Option<CommandLine>,
    pub start_order: Arc<StartOrder>,
    /// Folder of files with KV blocks that the engine shares with others of this host.
    pub(crate) file_pool: Option<PathBuf>,
    /// Log of those files.
    pub(crate) file_log: Option<Arc<FileLog>>,
    /// How the engine gets its model; `None` if it reads none.
    pub(crate) stage: Option<Arc<ModelStage>>,
    /// `None` if every start is plain.
    pub(crate) warm_starts: Option<Arc<WarmStarts>>,
    /// Processes of an engine that starts warm may be forks of its first one.
    pub(crate) may_fork: bool,
    /// Members of the replica on other nodes, if this is the head's part of an engine over several.
    pub(crate) gang: Option<Arc<Gang>>,
    /// Minimum time that an engine with work may show no progress before it counts as hung.
    pub stall_timeout: Duration,
    /// Time without requests after which the engine is tested with one token; zero turns the test
    /// off.
    pub canary_interval: Duration,
    /// The engine that somebody else runs, in whose place a bridge is started.
    pub(crate) attached_to: Option<AttachTarget>,
}

impl EngineSpec {
    /// The engine that the configuration describes.
    ///
    /// Decisions of the agent as a whole have defaults: the engine ends with the agent, is not
    /// bound to cores, has one command line and starts at once. Fails as `command_line` does.
    pub fn new(launch: &LaunchContext<'_>, log: PathBuf, keepers: KeeperSource) -> Result<Self, HostError> {
        let attached_to = match launch.engine {
            EngineProgram::Attached { targets, .. } => targets.get(launch.replica.index as usize).cloned(),
            EngineProgram::Vllm { .. } | EngineProgram::Simulated { .. } => None,
        };
        let is_attached = attached_to.is_some();
        Ok(Self {
            node: launch.config.node.clone(),
            index: launch.replica.index,
            command: command_line(launch)?,
            version: launch.version,
            directory: launch.directory.to_owned(),
            run_dirs: None,
            log,
            startup_timeout: if is_attached { FOR_EVER } else { launch.config.startup_timeout },
            drain_timeout: launch.config.drain_timeout,
            stop_grace: launch.config.stop_grace,
            // A bridge costs nothing, and waits for its engine itself.
            max_backoff: if is_attached { Duration::from_secs(1) } else { MAX_BACKOFF },
            probe_interval: launch.config.probe_interval,
            cache: cache_source(launch),
            keepers,
            if_agent_dies: AgentDeathPolicy::Kill,
            cpu_binding: None,
            gpu_availability: None,
            fallback: None,
            start_order: Arc::new(StartOrder::unordered()),
            file_pool: None,
            file_log: None,
            stage: None,
            warm_starts: None,
            gang: None,
            may_fork: may_fork(launch.replica.gpus.len(), &launch.config.engine_args),
            stall_timeout: if is_attached { FOR_EVER } else { launch.config.stall_timeout },
            canary_interval: if is_attached { Duration::ZERO } else { launch.config.canary_interval },
            attached_to,
        })
    }
}

/// Phase of an engine, as others see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The process exists.
    Starting,
    Loading,
    Ready,
    /// The engine finishes running requests, or is being stopped.
    Draining,
    /// There is no process, and none is desired.
    Stopped,
    /// The engine crashed; the next life begins after a pause.
    Failed,
    /// The engine stays out of service until it is released.
    Quarantined,
    /// The engine has given its memory back until it is woken.
    Sleeping,
}

impl From<EngineState> for Phase {
    fn from(state: EngineState) -> Self {
        match state {
            EngineState::Waiting | EngineState::Alive(LiveStage::Starting) => Self::Starting,
            EngineState::Alive(LiveStage::Loading) => Self::Loading,
            EngineState::Alive(LiveStage::Ready) => Self::Ready,
            EngineState::Alive(LiveStage::Sleeping) => Self::Sleeping,
            EngineState::Killing { then: AfterExit::BackOff } | EngineState::BackingOff { .. } => Self::Failed,
            EngineState::Killing { then: AfterExit::Quarantine } | EngineState::Quarantined => Self::Quarantined,
            EngineState::Draining(_) | EngineState::Stopping { .. } | EngineState::Killing { .. } => Self::Draining,
            EngineState::Stopped => Self::Stopped,
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct EngineStatus {
    pub phase: Phase,
    /// Identifies this life: the time of its spawn in microseconds since 1970, forced to increase.
    ///
    /// 0 before the first.
    pub epoch: u64,
    /// Reason for the phase, in a sentence; after a crash also the engine's last lines.
    pub reason: String,
    /// First process of the engine, which leads its group.
    pub pid: Option<u32>,
    /// Lives after the first.
    pub restarts: u32,
    /// Lives under this agent that ended in a hang.
    pub hangs: u32,
    /// Failed starts under this agent, counted until the engine is ready for the first time.
    pub failed_starts: u32,
    pub version: Option<VllmVersion>,
    /// Models that the engine serves; empty until it is ready.
    pub models: Arc<[ModelCard]>,
    pub ready_in: Option<Duration>,
    /// How this life became ready, if this agent has seen it.
    pub(crate) start: Option<Arc<PastStart>>,
    /// Seconds until the engine serves again, if it has served and restarts by itself.
    pub returns_in: Option<u32>,
    /// Progress of the start; `None` unless the engine starts or loads.
    pub progress: Option<StartupProgress>,
    /// Cause of the last life's death; `None` once the engine is ready again.
    pub failure: Option<Diagnosis>,
    pub facts: LogFacts,
    /// Front-end of this life, or of the next one.
    pub front_end: FrontEndInUse,
    /// Client routes that this front-end was found to lack, or has for routers alone.
    pub missing_routes: Arc<[&'static str]>,
}

impl EngineStatus {
    /// Longest context that the engine takes, as its log or else its models say it.
    pub(crate) fn max_model_len(&self) -> Option<u64> {
        self.facts.max_model_len.or_else(|| self.models.iter().find_map(ModelCard::max_model_len))
    }
}

/// A start that has succeeded.
#[derive(Debug, PartialEq)]
pub(crate) struct PastStart {
    pub(crate) origin: StartOrigin,
    pub(crate) stages: Vec<PastStage>,
}

/// A command to the supervisor.
#[derive(Debug)]
struct EngineCommand {
    event: EngineEvent,
    /// Reason for the status; may be empty.
    reason: String,
}

/// A life begun by an agent that has since died.
#[derive(Debug)]
pub(crate) struct AdoptedLife {
    pub(crate) survivor: SurvivingEngine,
    pub(crate) uses_fallback: bool,
}

/// The processes of an engine, for callers that must end them at once.
#[derive(Debug, Default)]
struct ProcessHandle {
    keeper: Option<KeeperClient>,
    /// No further process may be created.
    is_closed: bool,
}

#[derive(Debug)]
struct EngineShared {
    socket: PathBuf,
    commands: mpsc::Sender<EngineCommand>,
    control_requests: mpsc::Sender<control::PendingRequest>,
    desired_adapters: watch::Receiver<DesiredAdapters>,
    status: watch::Receiver<EngineStatus>,
    samples: watch::Receiver<Option<LoadSample>>,
    traffic: Arc<Traffic>,
    crashes: Arc<CrashLog>,
    cache: Arc<CacheLog>,
    log: EngineLog,
    process_handle: Arc<Mutex<ProcessHandle>>,
    gang: Option<Arc<Gang>>,
}

/// A supervised engine. Cheap to clone; dropping the last clone stops the engine.
#[derive(Debug, Clone)]
pub struct Engine {
    shared: Arc<EngineShared>,
}

impl Engine {
    /// Starts to supervise an engine; its task ends after `stop`.
    pub fn start(spec: EngineSpec, tracker: &TaskTracker) -> Self {
        Self::supervise(spec, None, tracker)
    }

    /// Like `start`, but with the life that another agent began, if any.
    ///
    /// The directory in `spec` is then that life's.
    pub(crate) fn supervise(spec: EngineSpec, adopted: Option<AdoptedLife>, tracker: &TaskTracker) -> Self {
        let (commands, queued_commands) = mpsc::channel(MAX_QUEUED_COMMANDS);
        let traffic = Traffic::new();
        let process_handle = Arc::new(Mutex::new(ProcessHandle::default()));
        let log = EngineLog::default();
        let socket = socket_path(&spec.directory);
        if let Some(output) = spec.gang.as_ref().and_then(|gang| gang.take_output()) {
            tracker.spawn(keep_members_output(output, log.clone()));
        }
        let (samples_out, samples) = watch::channel(None);
        let cache = Arc::new(CacheLog::new(spec.file_log.clone()));
        let crashes = Arc::new(CrashLog::default());
        let (control, control_requests, desired_adapters) = ControlTask::new(control::ControlConfig {
            index: spec.index,
            may_sleep: spec.command.unlocks_sleep(),
            drain_timeout: spec.drain_timeout,
            startup_timeout: spec.startup_timeout,
        });
        let gang = spec.gang.clone();
        let (supervisor, status) = Supervisor::new(supervisor::SupervisorDeps {
            spec,
            commands: queued_commands,
            samples: samples_out,
            traffic: Arc::clone(&traffic),
            crashes: Arc::clone(&crashes),
            cache: Arc::clone(&cache),
            log: log.clone(),
            process_handle: Arc::clone(&process_handle),
            desired_adapters: desired_adapters.clone(),
            tasks: tracker.clone(),
            adopted,
        });
        tracker.spawn(supervisor.run());
        let shared = Arc::new(EngineShared {
            socket,
            commands,
            control_requests,
            desired_adapters,
            status: status.clone(),
            samples,
            traffic,
            crashes,
            cache,
            log,
            process_handle,
            gang,
        });
        tracker.spawn(control.run(Arc::downgrade(&shared), status));
        Self { shared }
    }

    pub fn status(&self) -> watch::Receiver<EngineStatus> {
        self.shared.status.clone()
    }

    /// The engine's load as it changes; `None` until this life was read for the first time.
    pub fn samples(&self) -> watch::Receiver<Option<LoadSample>> {
        self.shared.samples.clone()
    }

    pub fn cache(&self) -> &Arc<CacheLog> {
        &self.shared.cache
    }

    pub fn socket(&self) -> &Path {
        &self.shared.socket
    }

    pub fn traffic(&self) -> &Arc<Traffic> {
        &self.shared.traffic
    }

    /// The other nodes of a replica over several.
    pub(crate) fn members(&self) -> Vec<MemberView> {
        self.shared.gang.as_ref().map(|gang| gang.view()).unwrap_or_default()
    }

    /// Requests in flight at each crash of this engine.
    pub fn crashes(&self) -> &Arc<CrashLog> {
        &self.shared.crashes
    }

    /// Last lines that the engine printed over all its lives, oldest first and at most 1,000; and
    /// how many it has printed since the agent follows it.
    pub fn log_tail(&self, count: usize) -> (Vec<String>, u64) {
        self.shared.log.last_lines(count, None)
    }

    /// The same of one node of a replica over several; 0 is the head.
    ///
    /// # Errors
    /// When there is no such node.
    pub(crate) fn member_log_tail(&self, member: u32, count: usize) -> Result<(Vec<String>, u64), String> {
        match self.members().len() {
            0 => Err("the replica is on one node alone: leave out --member".to_owned()),
            last if member as usize > last => Err(format!("there is no member {member}: the replica's nodes are 0, the head, to {last}")),
            _ => Ok(self.shared.log.last_lines(count, Some(member))),
        }
    }

    /// Lets running requests finish within the drain timeout, then stops the engine until
    /// `restart`.
    pub fn drain(&self) {
        self.send(EngineEvent::Drain);
    }

    /// Like `drain`, for an agent that is leaving: no `restart` revives the engine, and it is gone
    /// in time.
    ///
    /// May be called again with less time.
    pub(crate) fn retire(&self, deadlines: LeaveDeadlines) {
        self.send(EngineEvent::Retire(deadlines));
    }

    /// Like `retire`, but the engine lives on for the next agent, unless it is to end with its
    /// agent.
    pub fn hand_over(&self) {
        self.send(EngineEvent::HandOver);
    }

    /// Drains the engine and starts it again, or brings back a stopped or failed one at once.
    pub fn restart(&self) {
        self.send(EngineEvent::Restart);
    }

    /// Takes the engine out of service until `release`, for this reason.
    ///
    /// With `at_once` its processes are killed now; otherwise running requests may finish within
    /// the drain timeout.
    pub fn quarantine(&self, reason: String, at_once: bool) {
        self.send_with_reason(if at_once { EngineEvent::QuarantineNow } else { EngineEvent::Quarantine }, reason);
    }

    /// Ends this life as a crash with this cause.
    ///
    /// Its processes are killed, and the next life follows after the usual pause.
    pub fn fail(&self, reason: String) {
        self.send_with_reason(EngineEvent::Fail, reason);
    }

    /// Starts a quarantined, failed or stopped engine again now, and forgets its crashes.
    ///
    /// An engine that drains continues to serve.
    pub fn release(&self) {
        self.send(EngineEvent::Release);
    }

    /// Records that a ready engine is about to give its memory back, and why.
    ///
    /// The phase changes at once.
    pub fn fall_asleep(&self, reason: String) {
        self.send_with_reason(EngineEvent::FallAsleep, reason);
    }

    /// Records that a sleeping engine has its memory again.
    pub fn wake_up(&self) {
        self.send(EngineEvent::WakeUp);
    }

    /// Adapters that operators had loaded and that the engine could not load again.
    pub(crate) fn missing_adapters(&self) -> Vec<LoraAdapter> {
        let status = self.shared.status.borrow();
        if status.phase == Phase::Ready {
            self.shared.desired_adapters.borrow().missing_adapters(&status.models).cloned().collect()
        } else {
            Vec::new()
        }
    }

    /// Stops the engine for good, without waiting for its requests.
    ///
    /// Resolves when none of its processes is left: after the stop grace and usually milliseconds
    /// more, but not while a killed process does not die. The caller sets the deadline.
    pub async fn stop(&self) {
        // A closed channel means that the supervisor has stopped.
        let _ = self.shared.commands.send(EngineCommand { event: EngineEvent::Stop, reason: String::new() }).await;
        self.shared.commands.closed().await;
    }

    /// Kills every process of the engine and prevents further ones, without waiting.
    ///
    /// Used for the exit after a second signal.
    pub fn kill_now(&self) {
        self.shared.process_handle.lock().close();
    }

    fn send(&self, event: EngineEvent) {
        self.send_with_reason(event, String::new());
    }

    fn send_with_reason(&self, event: EngineEvent, reason: String) {
        if let Err(error) = self.shared.commands.try_send(EngineCommand { event, reason }) {
            tracing::warn!(command = ?event, %error, "engine does not take the command");
        }
    }
}

/// Keeps what members' parts print beside the output of the head's own, with their hosts' names.
async fn keep_members_output(mut output: mpsc::Receiver<MemberOutput>, log: EngineLog) {
    while let Some(MemberOutput { number, host, lines }) = output.recv().await {
        for line in lines.lines() {
            // vLLM's processes begin their lines with `(Worker pid=3) `.
            log.note_of(number, &line.strip_prefix('(').map_or_else(|| format!("({host}) {line}"), |rest| format!("({host} {rest}")));
        }
    }
}

/// Why there is no keeper.
#[derive(Debug, thiserror::Error)]
enum LaunchError {
    #[error("the agent is stopping")]
    Closed,
    #[error("the engine's directory {} cannot be made: {source}", path.display())]
    Directory { path: PathBuf, source: io::Error },
    #[error("{0}")]
    RunDir(#[from] RunDirError),
    #[error("cannot start {}: {source}", program.display())]
    Keeper { program: PathBuf, source: io::Error },
}

impl ProcessHandle {
    /// Starts an engine through this keeper, or through a new one, unless the engine was closed.
    fn start(&mut self, spec: &EngineSpec, launch: LaunchSpec, prepared: Option<PreparedKeeper>) -> Result<KeeperNotices, LaunchError> {
        if self.is_closed {
            return Err(LaunchError::Closed);
        }
        spec.run_dirs.as_deref().map_or(Ok(()), HeldDirectories::restore)?;
        prepare(&spec.directory).map_err(|source| LaunchError::Directory { path: spec.directory.clone(), source })?;
        let warm = prepared.and_then(|keeper| keeper.start(launch.clone()).ok());
        let started = warm.map_or_else(|| keeper::start(&spec.keepers, launch), Ok);
        let (keeper, notices) = started.map_err(|source| LaunchError::Keeper { program: spec.keepers.program().to_owned(), source })?;
        self.keeper = Some(keeper);
        Ok(notices)
    }

    fn send(&self, request: &KeeperRequest) {
        if let Some(keeper) = &self.keeper {
            keeper.send(request);
        }
    }

    /// Ends the engine and prevents further ones.
    fn close(&mut self) {
        self.is_closed = true;
        self.send(&KeeperRequest::Kill);
    }
}

#[cfg(test)]
mod tests;
