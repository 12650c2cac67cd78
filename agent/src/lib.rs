//! The node agent: supervises the engines of one host and connects them to routers.
//!
//! `host` finds the resources to run on, `engine` keeps each engine alive, `probe` watches its
//! load, `cache` knows its cached blocks, `prompt_files` reads its tokenizer, `uplink` serves the
//! routers.

mod address;
mod advise;
pub mod bridge;
mod cache;
mod checks;
mod config;
mod container;
mod crashes;
mod dial;
mod engine;
mod engine_client;
mod engine_failures;
mod engine_lookup;
mod epoch;
mod file_pool;
mod gang;
mod gang_launch;
mod gpu;
mod gpu_watch;
mod host;
mod job;
mod join;
pub mod keeper;
pub mod lane;
mod leave;
mod load_turns;
mod member;
mod metrics;
mod mounts;
pub mod node;
mod pages;
pub mod plan;
mod probe;
mod process;
mod prompt_files;
mod replica_launch;
mod router_target;
mod run_dir;
mod sizes;
mod stage;
mod traffic;
pub mod uplink;
pub mod vllm;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hostler_boot::home::cache_dir;
use hostler_boot::metrics::MetricRegistry;
use hostler_boot::shutdown::{SignalSource, join_within};
use hostler_boot::{ListenError, Shutdown};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use cache::FileLog;
pub use checks::{
    VllmInImage, check_model, check_run_dir, check_spread, container_runtimes, current_job_id, current_job_name, find_gpus, try_image,
};
pub use config::{AgentConfig, EngineKind, FileCacheSetting, FrontEnd, HostCacheSetting, IfAgentDies, IfEnginesFail, Profile};
use engine::Engine;
use file_pool::FilePool;
use gang::{GangPlace, GangSettingsError};
pub use gpu::Gpu;
pub use host::EngineProgram;
use host::{Host, HostError};
use job::{Job, JobClock};
use join::RouterAccess;
use keeper::{AgentDeathPolicy, KeeperSource};
use leave::{LeaveTerms, Leaving};
use load_turns::LoadTurns;
pub use metrics::AgentMetrics;
use node::NodeState;
use pages::{AgentPages, PagesListener};
use plan::{HostResources, Inventory, NcclTransport, Plan, PlanError};
pub use process::table::process_start;
use router_target::RouterTarget;
use run_dir::{RunDir, RunDirError};
pub use stage::describe_stage;
use uplink::{AttachLimits, Attachments, Uplink};
pub use vllm::arguments::model_names;
use vllm::version;

#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error(transparent)]
    Host(#[from] HostError),
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    #[error(transparent)]
    FilePool(#[from] file_pool::FilePoolError),
    #[error(transparent)]
    Version(#[from] version::VllmVersionError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Join(#[from] join::JoinError),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(transparent)]
    Gang(#[from] GangSettingsError),
    #[error("cannot write the head's address to {file} (agent.head_file): {reason}")]
    HeadFile { file: String, reason: String },
    #[error("no router was named: give at least one with --router HOST:PORT, or --router-file FILE")]
    NoRouter,
    #[error("{0:?} is not a node name: letters, digits, `.`, `-` and `_` make one; choose another with --node")]
    NodeName(String),
    /// This program's own path is unknown, so it cannot start the simulated engine.
    #[error("cannot find this program's own path to start the simulated engine: {0}")]
    OwnPath(#[source] std::io::Error),
    /// No router accepts this agent.
    #[error("{0}")]
    Unattached(String),
    /// No engine has ever been ready.
    #[error("no engine of this agent can be started: {cause}\nwhat to do: {remedy}")]
    EnginesFailed { cause: String, remedy: String },
    /// The time to finish was over.
    #[error(
        "requests cut off before their answers were complete: {requests}; agent.drain_timeout and agent.leave_grace are the time to finish"
    )]
    CutOff { requests: u32 },
    /// Processes are stuck in the kernel, or nothing could wait for them any longer.
    #[error("processes of an engine were still there when the time to leave was over; the next agent in this run directory ends them")]
    EnginesLeft,
}

impl AgentError {
    /// Exit code that tells scripts and schedulers how the agent ended.
    ///
    /// All codes are in docs/hpc.md and in `EXIT_CODES`.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Unattached(_) => 3,
            Self::EnginesFailed { .. } => 4,
            Self::CutOff { .. } => 5,
            Self::EnginesLeft => 6,
            _ => 1,
        }
    }

    /// Whether all that is missing is the name of a model.
    #[must_use]
    pub fn lacks_model(&self) -> bool {
        matches!(self, Self::Host(HostError::NoModel))
    }
}

/// Exit codes of the agent, for its help.
pub const EXIT_CODES: &str = "\
Exit codes:
  0  drained: every answer was complete
  1  nothing was started; the last line says why
  2  the command line is wrong
  3  no router took the agent in (agent.attach_timeout), or all have gone (agent.router_timeout); the last line says why
  4  no engine could be started (agent.if_engines_fail); the last lines say why and what to do
  5  answers were cut off, because the time to finish was over or a second signal came
  6  every answer was complete, but processes of an engine did not die in time";

/// Sender of signals to an agent with these settings.
#[must_use]
pub fn signal_source(config: &AgentConfig) -> SignalSource {
    match leave::grace(config, current_job().as_ref()) {
        Some(_) => SignalSource::Scheduler,
        None => SignalSource::Operators,
    }
}

/// Time from SIGTERM until this process is killed, from its scheduler or `agent.leave_grace`;
/// `None` if nobody kills it.
pub async fn read_kill_grace(config: &AgentConfig) -> Option<Duration> {
    match config.leave_grace {
        Some(grace) => Some(grace),
        None => Some(job::read_grace(current_job()?.scheduler).await),
    }
}

/// Describes how an agent with these settings would leave, a sentence each; empty if only an
/// operator ends it.
#[must_use]
pub fn describe_leaving(config: &AgentConfig) -> Vec<String> {
    LeaveTerms::new(config, current_job().as_ref()).sentences()
}

fn current_job() -> Option<Job> {
    Job::detect(|name| std::env::var(name).ok())
}

/// An agent that knows which engines it will run.
#[derive(Debug)]
pub struct Agent {
    config: AgentConfig,
    node: String,
    host: String,
    engine: EngineProgram,
    plan: Plan,
    /// Python of the installed vLLM.
    interpreter: Option<PathBuf>,
    /// Folder for the bytecode that the installed vLLM lacks.
    bytecode_cache: Option<PathBuf>,
    run_dir: RunDir,
    access: RouterAccess,
    logs: PathBuf,
    keepers: KeeperSource,
    fate: AgentDeathPolicy,
    driver: Option<gpu::GpuDriver>,
    load_turns: Arc<LoadTurns>,
    /// Log of the files with KV blocks that the engines share, if they do.
    file_log: Option<Arc<FileLog>>,
    /// Batch job that the agent runs in.
    job: Option<Arc<JobClock>>,
}

/// Checks that an engine exists, and a model if the settings name one. Returns the engine.
///
/// This check is immediate and starts nothing.
///
/// # Errors
/// The missing part, with a remedy.
pub fn check_engine(config: &AgentConfig) -> Result<EngineProgram, AgentError> {
    // A mistyped folder is none, whatever engine would serve it.
    if config.engine != EngineKind::Simulated {
        plan::check_model_path(&config.model)?;
    }
    Ok(choose_engine(config, Path::new(""))?)
}

fn choose_engine(config: &AgentConfig, simulated: &Path) -> Result<EngineProgram, HostError> {
    if let Some(attached) = host::attached_engines(config, simulated)? {
        return Ok(attached);
    }
    let engine = engine_lookup::find_engine(config, simulated)?;
    host::check_named_gpus(config, &engine)?;
    Ok(engine)
}

impl Agent {
    /// Examines the host and decides which engines to run.
    ///
    /// Asks vLLM for its version, which takes seconds.
    ///
    /// # Errors
    /// When there is nothing to run, no place to run it, or no router to serve.
    pub async fn prepare(config: AgentConfig) -> Result<Self, AgentError> {
        let this_program = std::env::current_exe().map_err(AgentError::OwnPath)?;
        Self::prepare_with(config, &this_program).await
    }

    /// Like `prepare`, with another program that contains the simulated engine.
    ///
    /// # Errors
    /// Same as `prepare`.
    pub async fn prepare_with(config: AgentConfig, simulated: &Path) -> Result<Self, AgentError> {
        let config = gang::settle(config, current_job().as_ref(), |name| std::env::var(name).ok());
        let is_spread = GangPlace::of(&config)?.is_some();
        if RouterTarget::of(&config).is_empty() {
            return Err(AgentError::NoRouter);
        }
        let engine = choose_engine(&config, simulated)?;
        let host = Host::discover(&engine, &config).await?;
        if let Some(reason) = &host.no_gpu_because {
            tracing::info!(reason, "no GPU");
        }
        let (installed, job) = tokio::join!(plan::probe_installed(&engine), JobClock::of_environment(time_to_leave(&config)));
        let installed = installed?;
        let interpreter = installed.as_ref().and_then(|installed| installed.interpreter.clone());
        let bytecode_cache = installed.as_ref().is_some_and(|installed| installed.lacks_bytecode).then(cache_dir).flatten();
        let bytecode_cache = bytecode_cache.map(|cache| cache.join("hostler/pycache"));
        if let Some(cache) = &bytecode_cache {
            tracing::info!(
                cache = %cache.display(),
                "the modules of vLLM are not compiled, and its folder may not be written: the first start compiles them into this cache"
            );
        }
        let links = host.driver.as_ref().map(|driver| driver.links().clone()).unwrap_or_default();
        let (resources, transport) = (HostResources::detect(&config.file_cache_dir), NcclTransport::detect());
        let found = Inventory { engine: engine.clone(), installed, gpus: host.gpus.clone(), links, resources, transport };
        let plan = plan::plan_inventory(found, config.clone()).await?;
        tracing::info!(plan = plan.summary(), "planned");
        for warning in plan.warnings.iter().cloned().chain(plan.missing_tiers()) {
            tracing::warn!(warning, "of the plan");
        }
        let driver = host.driver;
        let node = match &job {
            _ if !config.node.is_empty() => config.node.clone(),
            Some(clock) => clock.job().node_name(&host.name),
            None => host.name.clone(),
        };
        if !node.chars().all(|letter| letter.is_alphanumeric() || matches!(letter, '.' | '-' | '_')) {
            return Err(AgentError::NodeName(node));
        }
        let access = RouterAccess::open(&config, &node).await?;
        // A part whose agent is gone belongs to no epoch.
        let variable = |name: &str| std::env::var(name).ok().filter(|_| !is_spread);
        let fate = AgentDeathPolicy::of(config.if_agent_dies, config.takeover_timeout, variable);
        let run_dir = RunDir::open_on_thread(config.run_dir.clone(), node.clone()).await?;
        let mut engine = engine.with_bind(run_dir.held().base().to_owned())?;
        if let Some(pool) = plan.file_pool() {
            engine = engine.with_bind(pool.folder.clone())?;
        }
        let file_log = plan.file_pool().map(|_| Arc::default());
        let keepers = simulated.to_owned().into();
        let logs = run_dir::log_dir(&config.log_dir)?;
        Ok(Self {
            logs,
            config,
            node,
            host: host.name,
            job,
            engine,
            plan,
            interpreter,
            bytecode_cache,
            run_dir,
            access,
            keepers,
            fate,
            driver,
            load_turns: Arc::default(),
            file_log,
        })
    }

    /// Runs the engines as tasks of this process.
    #[cfg(feature = "engines-in-process")]
    #[must_use]
    pub fn with_engines_in_process(self, engines: Arc<keeper::InProcessEngines>) -> Self {
        Self { keepers: KeeperSource::InProcess(engines), ..self }
    }

    /// Socket of the agent's metrics and health pages if no address was given.
    #[must_use]
    pub fn admin_socket(&self) -> PathBuf {
        self.run_dir.admin_socket()
    }

    /// Runs the engines and serves the routers until the shutdown drains, then until the engines
    /// have finished and stopped.
    ///
    /// If SIGHUP began the drain and engines outlive their agent here, they are left to the next
    /// agent. If the shutdown stops instead, the engines are killed.
    ///
    /// # Errors
    /// When an engine cannot be described, or the admin address cannot be bound; when no router
    /// accepts the agent, its engines fail for good, or answers are cut off. Nothing is left
    /// running then.
    pub async fn run(mut self, shutdown: Shutdown) -> Result<(), AgentError> {
        if let Some(place) = GangPlace::of(&self.config)?.filter(|place| !place.is_head()) {
            return self.run_member(place, shutdown).await;
        }
        // Run everything that may fail before the first engine starts.
        let listener = PagesListener::bind(&self.config.agent_admin, &self.run_dir).await?;
        let seat = self.open_gang().await?;
        let end = CancellationToken::new();
        let supervisors = TaskTracker::new();
        let survivors = self.run_dir.take_survivors();
        let files = self.open_file_pool().await;
        let specs = self.engine_specs(survivors);
        let (files, (mut specs, rejected, warm_starts)) = match files.and_then(|files| Ok((files, specs?))) {
            Ok(prepared) => prepared,
            Err(error) => {
                // The engines in the run directory live on.
                self.run_dir.leave_to_successor();
                return Err(error);
            }
        };
        keeper::end_survivors(rejected).await;
        let (gang, members) = seat.map(|seat| seat.begin(&mut specs, end.clone())).unzip();
        let replicas = self.start_replicas(specs, &supervisors);
        let engines: Vec<Engine> = replicas.iter().map(|replica| replica.engine.clone()).collect();
        let readings = self.driver.as_ref().map(gpu::GpuDriver::readings);
        let state =
            Arc::new(NodeState::new(replicas).with_readings(readings).with_job(self.job.clone()).with_file_log(self.file_log.clone()));
        let mut metric_registry = MetricRegistry::default();
        let metrics = Arc::new(AgentMetrics::register(&mut metric_registry));
        metric_registry.register_collector(state.clone());
        let pages = Arc::new(AgentPages { state: state.clone(), metric_registry });
        let pages = tokio::spawn(listener.serve(pages, self.run_dir.held().clone(), end.clone()));

        let attachments = Arc::<Attachments>::default();
        let uplink = self.uplink(&state, metrics, &attachments);
        let spare_end = end.child_token();
        let spares = warm_starts.map(|warm_starts| AbortOnDropHandle::new(tokio::spawn(warm_starts.tend(spare_end.clone()))));
        let watcher = tokio::spawn({
            let (state, end) = (state.clone(), end.clone());
            async move { state.watch(end).await }
        });
        let gpus = tokio::spawn(self.watch_gpus(&state, end.clone()));
        let trimming = files.clone().map(|files| tokio::spawn(files.keep_bounded(end.clone())));
        let sessions = tokio::spawn(Arc::new(uplink).run(RouterTarget::of(&self.config), end.clone()));

        let clock = AbortOnDropHandle::new(tokio::spawn(job::drain_in_time(self.job.clone(), self.config.job_interval, shutdown.clone())));
        let outcome = tokio::select! {
            outcome = self.wait_for_reason(&shutdown, &state, &attachments) => outcome,
            () = gang_launch::wait_member_leaves(gang.as_deref()) => Ok(()),
        };
        // No engine starts any more.
        spare_end.cancel();
        gang.iter().for_each(|gang| gang.stop_waiting());
        let keeps = self.fate != AgentDeathPolicy::Kill;
        let terms = LeaveTerms::in_job(&self.config, self.job.as_deref());
        let hands_over = keeps && shutdown.is_by_hang_up();
        let leaving = Leaving { terms: &terms, node: &self.node, engines: &engines, state: &state, shutdown: &shutdown, hands_over };
        let left = leaving.run().await;
        // A process stuck in the kernel may not die even when killed; then the next agent to start
        // here ends it.
        let stopped = timeout_at(left.deadline, futures_util::future::join_all(engines.iter().map(Engine::stop))).await;
        end.cancel();
        drop((clock, spares));
        let closed_by = Instant::now() + left.farewell;
        for task in [sessions, watcher, gpus, pages].into_iter().chain(members).chain(trimming) {
            join_within(closed_by.saturating_duration_since(Instant::now()), task).await;
        }
        drop((engines, state, gang));
        let outcome = outcome.and(if left.cut_off > 0 { Err(AgentError::CutOff { requests: left.cut_off }) } else { Ok(()) });
        if stopped.is_err() {
            self.run_dir.leave_to_successor();
            return outcome.and(Err(AgentError::EnginesLeft));
        }
        supervisors.close();
        supervisors.wait().await;
        if hands_over {
            self.run_dir.leave_to_successor();
        } else {
            if let Some(files) = files.and_then(Arc::into_inner) {
                files.leave().await;
            }
            self.run_dir.remove();
        }
        outcome
    }

    /// Takes the folder of files with KV blocks, if the engines keep some.
    async fn open_file_pool(&self) -> Result<Option<Arc<FilePool>>, AgentError> {
        let Some((plan, log)) = self.plan.file_pool().zip(self.file_log.clone()) else { return Ok(None) };
        Ok(Some(Arc::new(FilePool::open(plan.folder.clone(), plan.root(), plan.bytes, log).await?)))
    }

    fn uplink(&self, state: &Arc<NodeState>, metrics: Arc<AgentMetrics>, attachments: &Arc<Attachments>) -> Uplink {
        Uplink {
            state: Arc::clone(state),
            node: self.node.clone(),
            life: fastrand::u64(1..),
            access: self.access.clone(),
            metrics,
            requests: TaskTracker::new(),
            attached_routers: tokio::sync::watch::Sender::default(),
            load_turns: Arc::clone(&self.load_turns),
            attachments: Arc::clone(attachments),
        }
    }

    /// Waits until the agent has to leave. Fails if no shutdown was requested.
    async fn wait_for_reason(&self, shutdown: &Shutdown, state: &NodeState, attachments: &Attachments) -> Result<(), AgentError> {
        let is_in_job = self.job.is_some();
        let error = tokio::select! {
            () = shutdown.wait_drain() => return Ok(()),
            reason = attachments.wait_given_up(AttachLimits::new(&self.config, is_in_job)) => AgentError::Unattached(reason),
            failed = engine_failures::wait_failed(state, &self.config, is_in_job) => {
                AgentError::EnginesFailed { cause: failed.cause, remedy: failed.remedy }
            }
        };
        tracing::error!(event = "agent_gave_up", %error, "leaving");
        Err(error)
    }

    fn watch_gpus(&self, state: &NodeState, end: CancellationToken) -> impl Future<Output = ()> + Send + use<> {
        let watched = |replica: &node::Replica| gpu_watch::WatchedReplica {
            name: format!("{}/{}", self.node, replica.index),
            gpus: replica.traits.setup.gpus.clone(),
            engine: replica.engine.clone(),
        };
        let watched = state.replicas().iter().map(watched).collect();
        let driver = self.driver.clone();
        async move {
            if let Some(driver) = driver {
                gpu_watch::watch(driver, watched, end).await;
            }
        }
    }
}

/// How long before its job's end the agent begins to leave: the time that drain and stop may need.
fn time_to_leave(config: &AgentConfig) -> Duration {
    config.drain_timeout.saturating_add(config.stop_grace)
}
