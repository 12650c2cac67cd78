//! The node agent: supervises the engines of one host and connects them to routers.
//!
//! `host` finds what there is to run on, `engine` keeps each engine alive, `probe` watches its load, `cache` knows what it has cached,
//! `files` reads its tokenizer, `uplink` serves the routers.

mod arguments;
pub mod cache;
mod config;
pub mod engine;
pub mod files;
pub mod host;
mod metrics;
pub mod probe;
mod run_dir;
pub mod traffic;
pub mod uplink;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hostler_boot::admin::{self, Pages};
use hostler_boot::shutdown::end_within;
use hostler_boot::{ListenError, Shutdown, bind};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use config::{AgentConfig, EngineKind};
use engine::command::Launch;
use engine::version::{self, Version};
use engine::{Engine, EngineSpec, Phase};
use host::{Host, HostError, ReplicaPlan, Resolved};
pub use metrics::AgentMetrics;
use run_dir::{RunDir, RunDirError};
use uplink::{Board, Uplink};

/// Why the agent cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Nothing can be run here.
    #[error(transparent)]
    Host(#[from] HostError),
    /// No place for sockets or logs.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// vLLM does not tell its version.
    #[error(transparent)]
    Version(#[from] version::VersionError),
    /// The admin address cannot be had.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// No router was named.
    #[error("no router was named: give at least one with --router HOST:PORT")]
    NoRouter,
    /// The node's name cannot be one.
    #[error("{0:?} is not a node name: letters, digits, `.`, `-` and `_` make one; choose another with --node")]
    NodeName(String),
    /// This program's own path is unknown, so it cannot start the simulated engine.
    #[error("cannot find this program's own path to start the simulated engine: {0}")]
    OwnPath(#[source] std::io::Error),
}

/// An agent that knows what it will run.
#[derive(Debug)]
pub struct Agent {
    config: AgentConfig,
    node: String,
    engine: Resolved,
    version: Option<Version>,
    plans: Vec<ReplicaPlan>,
    run_dir: RunDir,
    logs: PathBuf,
}

impl Agent {
    /// Looks at the host and decides what to run. vLLM is asked for its version, which takes seconds.
    ///
    /// # Errors
    /// When there is nothing to run, no place to run it, or no router to serve.
    pub async fn prepare(config: AgentConfig) -> Result<Self, AgentError> {
        let this_program = std::env::current_exe().map_err(AgentError::OwnPath)?;
        Self::prepare_with(config, &this_program).await
    }

    /// As `prepare`, with another program that has the simulated engine in it.
    ///
    /// # Errors
    /// As `prepare`.
    pub async fn prepare_with(config: AgentConfig, simulated: &Path) -> Result<Self, AgentError> {
        if config.router.is_empty() {
            return Err(AgentError::NoRouter);
        }
        let vllm = host::look_up(&config.vllm_bin, std::env::var_os("PATH").as_deref());
        let engine = host::resolve(config.engine, !config.model.is_empty(), &vllm, simulated)?;
        let host = Host::discover(&engine).await?;
        if let Some(reason) = &host.no_gpu_because {
            tracing::info!(reason, "no GPU");
        }
        let plans = host::plan(&host, &engine, &config)?;
        let version = match &engine {
            Resolved::Vllm { program } => match version::probe(program).await {
                Ok(version) => Some(version),
                Err(error @ version::VersionError::Start { .. }) => return Err(error.into()),
                Err(error) => {
                    tracing::warn!(%error, "the version of vLLM is unknown; only flags that every release has are used");
                    None
                }
            },
            Resolved::Simulated { .. } => None,
        };
        let run_dir = open_run_dir(config.run_dir.clone()).await?;
        let node = if config.node.is_empty() { host.name } else { config.node.clone() };
        if !node.chars().all(|letter| letter.is_alphanumeric() || matches!(letter, '.' | '-' | '_')) {
            return Err(AgentError::NodeName(node));
        }
        Ok(Self { logs: run_dir::log_dir(&config.log_dir)?, config, node, engine, version, plans, run_dir })
    }

    /// Where the agent's metrics and health are served when no address was given.
    #[must_use]
    pub fn admin_socket(&self) -> PathBuf {
        self.run_dir.admin_socket()
    }

    /// Runs the engines and serves the routers until the shutdown drains, then until the engines have finished and stopped.
    /// When it stops instead, the engines are killed.
    ///
    /// # Errors
    /// When an engine cannot be described, or the admin address cannot be had; nothing is left running then.
    pub async fn run(self, shutdown: Shutdown) -> Result<(), AgentError> {
        // What may fail comes before the first engine starts.
        let admin_listener = self.bind_admin().await?;
        let end = CancellationToken::new();
        let supervisors = TaskTracker::new();
        let replicas = self.replicas(&supervisors)?;
        let engines: Vec<Engine> = replicas.iter().map(|replica| replica.engine.clone()).collect();
        let board = Arc::new(Board::new(replicas));
        let metrics = Arc::new(AgentMetrics::default());
        let overview = Arc::new(Overview { board: board.clone(), metrics: metrics.clone() });
        let admin = tokio::spawn(serve_admin(admin_listener, self.run_dir.admin_socket(), overview, end.clone()));

        let uplink = Uplink {
            board: board.clone(),
            node: self.node.clone(),
            life: fastrand::u64(1..),
            lanes: self.config.lanes.clamp(1, MOST_LANES),
            metrics,
            requests: TaskTracker::new(),
            served: parking_lot::Mutex::default(),
        };
        let watcher = tokio::spawn({
            let (board, end) = (board.clone(), end.clone());
            async move { board.watch(end).await }
        });
        let sessions = tokio::spawn(Arc::new(uplink).run(self.config.router.clone(), end.clone()));

        tokio::select! {
            () = drain(&engines, &shutdown, self.config.drain_timeout + self.config.stop_grace + LAST_KILL) => {}
            () = shutdown.stopped() => {
                tracing::warn!("killing the engines");
                engines.iter().for_each(Engine::kill_now);
            }
        }
        // A process in the kernel's hands may not die even when killed; then the next agent to start here ends it.
        let stopped =
            tokio::time::timeout(self.config.stop_grace + LAST_KILL, futures_util::future::join_all(engines.iter().map(Engine::stop)))
                .await;
        end.cancel();
        for task in [watcher, sessions, admin] {
            end_within(GOODBYE, task).await;
        }
        drop((engines, board));
        if stopped.is_err() {
            tracing::error!("an engine's processes do not die; the next agent in this run directory tries again");
            self.run_dir.keep();
            return Ok(());
        }
        supervisors.close();
        supervisors.wait().await;
        self.run_dir.remove();
        Ok(())
    }

    fn replicas(&self, supervisors: &TaskTracker) -> Result<Vec<uplink::Replica>, AgentError> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let cores = u32::try_from(cores / self.plans.len().max(1)).unwrap_or(1).max(1);
        let kv_cache_gib = host::kv_cache_gib(self.plans.len());
        let specs = self.plans.iter().map(|plan| {
            let directory = self.run_dir.engine(plan.index);
            let launch = Launch {
                engine: &self.engine,
                version: self.version,
                replica: plan,
                // A single engine has the host to itself and binds to its cores as it likes.
                cores: (plan.gpu.is_none() && self.plans.len() > 1).then_some(cores),
                kv_cache_gib: kv_cache_gib.filter(|_| plan.gpu.is_none()),
                directory: &directory,
                config: &self.config,
            };
            let log = self.logs.join(format!("{}-e{}.log", self.node, plan.index));
            Ok((plan, EngineSpec::new(&launch, log)?))
        });
        // All commands are known to be sound before the first engine starts.
        let specs: Vec<_> = specs.collect::<Result<_, HostError>>()?;
        let replica = |(plan, spec): (&ReplicaPlan, EngineSpec)| {
            let gpu = plan.gpu.as_ref();
            let traits = uplink::Traits {
                gpu: gpu.map(|gpu| gpu.name.clone()).unwrap_or_default(),
                token_budget: host::token_budget(&self.engine, self.version, gpu, &self.config.engine_args),
                prompt_files: files::Source::new(&self.engine, &self.config),
            };
            uplink::Replica::new(plan.index, Engine::start(spec, supervisors), traits)
        };
        Ok(specs.into_iter().map(replica).collect())
    }

    /// The listener of the admin pages, when an address was given.
    async fn bind_admin(&self) -> Result<Option<TcpListener>, ListenError> {
        if self.config.agent_admin.is_empty() {
            return Ok(None);
        }
        let (listener, address) = bind(&self.config.agent_admin, "agent.agent_admin").await?;
        tracing::info!(%address, "admin pages");
        Ok(Some(listener))
    }
}

async fn serve_admin(listener: Option<TcpListener>, socket: PathBuf, overview: Arc<Overview>, end: CancellationToken) {
    let routes = admin::routes(overview);
    match listener {
        Some(listener) => admin::serve(listener, routes, end).await,
        None => {
            if let Err(error) = admin::serve_unix(&socket, routes, end).await {
                tracing::error!(socket = %socket.display(), %error, "the admin socket ended");
            }
        }
    }
}

/// Clearing up after an agent that had died may take seconds, so it has a thread of its own.
async fn open_run_dir(configured: PathBuf) -> Result<RunDir, AgentError> {
    let opened = tokio::task::spawn_blocking(move || RunDir::open(&configured)).await;
    let run_dir = opened.expect("opening the run directory does not panic")?;
    for cleared in run_dir.cleared() {
        tracing::warn!(directory = %cleared.path.display(), killed = cleared.killed, left = ?cleared.left, "cleared up after an agent that had died");
    }
    Ok(run_dir)
}

/// When the shutdown drains: tells the routers, lets the engines finish, and waits until all have stopped.
async fn drain(engines: &[Engine], shutdown: &Shutdown, limit: Duration) {
    shutdown.draining().await;
    engines.iter().for_each(Engine::retire);
    let all_stopped = async {
        for engine in engines {
            let mut status = engine.status();
            let _ = status.wait_for(|status| status.phase == Phase::Stopped).await;
        }
    };
    // The engines keep to the same times by themselves; this is for processes that cannot be killed.
    let _ = tokio::time::timeout(limit, all_stopped).await;
    // The last reports leave before the connections do.
    tokio::time::sleep(LAST_REPORTS).await;
}

/// How long a killed process may take to be gone.
const LAST_KILL: Duration = Duration::from_secs(10);

/// How long connections may take to close.
const GOODBYE: Duration = Duration::from_secs(1);

/// HTTP/2 servers allow some 200 streams a connection; a lane is one.
const MOST_LANES: u32 = 64;

/// See `drain`; reports go out every 10 ms.
const LAST_REPORTS: Duration = Duration::from_millis(30);

/// What the admin pages show.
#[derive(Debug)]
struct Overview {
    board: Arc<Board>,
    metrics: Arc<AgentMetrics>,
}

impl Pages for Overview {
    fn ready(&self) -> Result<(), String> {
        let ready = self.board.replicas().iter().any(|replica| replica.engine.status().borrow().phase == Phase::Ready);
        if ready { Ok(()) } else { Err("no engine is ready".into()) }
    }

    fn metrics(&self) -> String {
        self.metrics.page(&self.board)
    }
}
