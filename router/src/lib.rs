//! The router: takes requests of OpenAI clients, places each on a replica, relays the answer.
//!
//! A request comes by `edge` (HTTP) or `grpc`, and both send it through `inbound` → `admission` → `dispatch`, which has its `prompt` read and
//! `placement` choose → `lanes`; state comes in through `agent_endpoint` → `fleet`.

mod access_log;
mod admission;
mod agent_endpoint;
mod background;
mod bookings;
mod cache_level;
mod config;
mod crash_suspects;
mod direct_writing;
mod dispatch;
mod edge;
mod engine_life;
mod exposures;
mod fleet;
mod fleet_figures;
mod grpc;
mod health_watches;
mod inbound;
mod join;
pub mod keys;
pub mod lanes;
mod member;
mod metrics;
mod operators;
mod outcome;
mod placement;
mod prompt;
mod random;
mod response_affinity;
pub mod sse;
mod tls;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use futures_util::future::join_all;
use hostler_boot::admin::AdminPages;
use hostler_boot::metrics::MetricRegistry;
use hostler_boot::shutdown::join_within;
use hostler_boot::{ListenError, PrivateSocket, Shutdown, SocketError, admin, bind};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use access_log::{AccessLog, AccessLogError, AccessLogWriter};
use admission::Admission;
use background::BackgroundTasks;
use bookings::Bookings;
pub use config::{AccessFormat, NeedKey, RouterConfig};
use crash_suspects::CrashSuspects;
use dispatch::{Dispatch, RetryBudgets};
pub use exposures::Exposure;
use fleet::{CacheReportQueue, Fleet, SessionDeps};
use fleet_figures::RouterCollector;
use health_watches::HealthWatchPermits;
use hostler_placement::affinity::CacheIndex;
use inbound::{AllowedOrigins, BodyMemory, Edge, InvalidMediaHost, InvalidOrigin, Isolation, MediaHosts};
use keys::{AdminGuard, KeyFileError, Keys, Secret, guard_pages};
pub use metrics::RouterMetrics;
pub use operators::find_operators_sockets;
use operators::{Operators, OperatorsSocket};
use placement::{MAX_QUEUED_BYTES, Placer, PrefillWindows, QueueLimits, RequestQueue, maintain_tokenizers};
use prompt::Prompts;
use response_affinity::ResponseAffinity;
use tls::RouterTls;
pub use tls::TlsSetupError;

/// How long connections to agents and operators may take to close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Reports come every third of a lease; shorter leases would make each hiccup a suspicion.
const MIN_LEASE: Duration = Duration::from_millis(500);

/// A router that is bound to its addresses but does not serve yet.
#[derive(Debug)]
pub struct Router {
    config: RouterConfig,
    edge: (TcpListener, SocketAddr),
    agents: (TcpListener, SocketAddr),
    admin: (TcpListener, SocketAddr),
    operators: (OperatorsSocket, Option<PrivateSocket>),
    keys: Keys,
    operator_key: Secret,
    metrics: Arc<RouterMetrics>,
    metric_registry: MetricRegistry,
    access_log: (AccessLog, AccessLogWriter),
    tls: RouterTls,
    origins: AllowedOrigins,
    media: MediaHosts,
    isolation: Option<Isolation>,
}

/// What is on a router's metrics page, for the manual.
#[must_use]
pub fn describe_metrics() -> MetricRegistry {
    let mut registry = MetricRegistry::default();
    RouterMetrics::register(&mut registry);
    fleet_figures::describe(&mut registry);
    registry
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("{0} (setting router.operators_socket)")]
    Socket(#[from] SocketError),
    #[error("{0} (setting router.keys_file)")]
    Keys(#[from] KeyFileError),
    #[error(transparent)]
    AccessLog(#[from] AccessLogError),
    #[error("{0} (setting router.secret_file)")]
    Isolation(KeyFileError),
    /// The origins of web pages cannot be understood.
    #[error(transparent)]
    Origin(#[from] InvalidOrigin),
    #[error(transparent)]
    Media(#[from] InvalidMediaHost),
    #[error(transparent)]
    Tls(#[from] TlsSetupError),
    #[error("{0}")]
    Setting(&'static str),
    #[error("the system gives no random numbers: {0}")]
    Random(std::io::Error),
}

impl Router {
    /// Reads the keys and takes the addresses and the operators' socket, so that one in use is
    /// known at once.
    ///
    /// # Errors
    /// When one of them cannot be had.
    pub async fn bind(config: RouterConfig) -> Result<Self, StartError> {
        let keys = Keys::open(&config.keys_file)?;
        if !keys.are_required() && config.metrics_need_key == NeedKey::Always {
            return Err(StartError::Setting("router.metrics_need_key can be `always` only where there are keys: set router.keys_file"));
        }
        if !BodyMemory::new(config.max_buffered_body_bytes).can_fit(config.max_body_bytes) {
            return Err(StartError::Setting(
                "a body of router.max_body_bytes would never find room: let seven eighths of router.max_buffered_body_bytes be more than that, or lower \
                 router.max_body_bytes",
            ));
        }
        let mut metric_registry = MetricRegistry::default();
        let metrics = Arc::new(RouterMetrics::register(&mut metric_registry));
        let tls = RouterTls::load(&config)?;
        let edge = bind(&config.listen, "router.listen").await?;
        let agents = bind(config.agents_address(), "router.agents_listen").await?;
        tls.check_plain_text(&config, edge.1, agents.1)?;
        let admin = bind(&config.admin_listen, "router.admin_listen").await?;
        let place = OperatorsSocket { configured: config.operators_socket.clone(), port: admin.1.port() };
        Ok(Self {
            operators: (place.clone(), place.open().await?),
            tls,
            origins: AllowedOrigins::new(&config.allowed_origins)?,
            media: MediaHosts::new(&config.media_hosts)?,
            isolation: config.secret_path().map(|path| Isolation::open(&path).map_err(StartError::Isolation)).transpose()?,
            access_log: AccessLog::start(config.access_log, &config.access_log_file, metrics.access_log_dropped.clone())?,
            metrics,
            metric_registry,
            keys,
            operator_key: Secret::random().map_err(StartError::Random)?,
            edge,
            agents,
            admin,
            config,
        })
    }

    #[must_use]
    pub fn edge_address(&self) -> SocketAddr {
        self.edge.1
    }

    #[must_use]
    pub fn edge_scheme(&self) -> &'static str {
        if self.tls.edge.is_some() { "https" } else { "http" }
    }

    #[must_use]
    pub fn agents_address(&self) -> SocketAddr {
        self.agents.1
    }

    /// Where health and metrics are, and operators' calls with a key.
    #[must_use]
    pub fn admin_address(&self) -> SocketAddr {
        self.admin.1
    }

    /// Where operators need no key, if there is such a place.
    #[must_use]
    pub fn operators_socket(&self) -> Option<&Path> {
        self.operators.1.as_ref().map(|socket| socket.file().path())
    }

    #[must_use]
    pub fn exposures(&self) -> Vec<Exposure> {
        exposures::find_exposures(&exposures::Listeners {
            edge: self.edge.1,
            agents: self.agents.1,
            admin: self.admin.1,
            has_keys: self.keys.are_required() || !self.config.tls_client_ca.as_os_str().is_empty(),
            has_key_file: self.keys.are_required(),
            has_edge_tls: self.tls.edge.is_some(),
            has_agents_tls: self.tls.agents.is_some(),
        })
    }

    fn guard(&self) -> AdminGuard {
        AdminGuard::new(&self.config, self.keys.clone(), &self.operator_key, self.admin.1.ip(), self.operators_socket())
    }

    #[must_use]
    pub fn requires_keys(&self) -> bool {
        self.keys.are_required()
    }

    /// An admin key that is valid for this life of the router, for the process in which it runs.
    #[must_use]
    pub fn operator_key(&self) -> &Secret {
        &self.operator_key
    }

    /// Serves until the shutdown drains, then until the running requests have ended, the drain
    /// timeout has passed or the shutdown stops.
    pub async fn run(self, shutdown: Shutdown) {
        let guard = self.guard();
        // The connections may be stopped when their time is over, while the process goes on.
        let serving = shutdown.child();
        let tasks = BackgroundTasks::default();
        let end = tasks.end();
        let (metrics, drain_timeout, (access, writing)) = (self.metrics, self.config.drain_timeout, self.access_log);
        let fleet = Fleet::start(self.config.lease.max(MIN_LEASE), &tasks);
        let index = Arc::new(CacheIndex::new());
        let prompts = Prompts::new(self.config.cache_folder(), self.config.tokenizer_threads());
        let readers = tokio::spawn(maintain_tokenizers(prompts.clone(), fleet.clone(), end.clone()));
        let crash_suspects = CrashSuspects::new(self.config.crash_suspect_ttl);
        let sessions = SessionDeps {
            tasks: tasks.clone(),
            fleet: fleet.clone(),
            crash_suspects: crash_suspects.clone(),
            cache_reports: CacheReportQueue::start(index.clone(), fleet.clone(), &tasks),
            prompts: prompts.clone(),
            tickets: Arc::default(),
            router_run: fastrand::u64(1..),
            next_attachment: AtomicU64::new(0),
        };
        let (agents, admitting, link_metrics, link_end) = (self.agents.0, self.tls.agents.clone(), metrics.clone(), end.clone());
        let link = tokio::spawn(async move {
            if let Err(error) = agent_endpoint::serve(agents, admitting, Arc::new(sessions), link_metrics, link_end).await {
                tracing::error!(%error, "the agents' listener ended");
            }
        });

        let admission = Admission::new(self.config.max_in_flight);
        let prefill_windows = PrefillWindows::from_now(self.config.prefill_interval);
        let placer = Arc::new(Placer::new(fleet.clone(), index, prompts.clone(), metrics.clone(), prefill_windows));
        let queue = RequestQueue::start(placer.clone(), queue_limits(&self.config), &tasks, serving.clone());
        let mut metric_registry = self.metric_registry;
        metric_registry.register_collector(RouterCollector {
            fleet: fleet.clone(),
            crash_suspects: crash_suspects.clone(),
            admission: admission.clone(),
            placer: placer.clone(),
            queue: queue.clone(),
        });
        let overview = RouterAdmin { fleet: fleet.clone(), placer: placer.clone(), metric_registry, shutdown: serving.clone() };
        let admin = tokio::spawn(overview.serve(guard, self.admin.0, self.operators, end.clone()));
        let keys = tokio::spawn(keys::watch_file(self.keys.clone(), metrics.clone(), end.clone()));

        let dispatch = Dispatch {
            fleet,
            placer,
            queue,
            retries: RetryBudgets::default(),
            crash_suspects,
            metrics,
            answer_timeout: self.config.answer_timeout,
            idle_timeout: self.config.idle_timeout,
        };
        let edge = Arc::new(Edge {
            bookings: Bookings::start(dispatch.queue.clone(), &tasks),
            shutdown: serving.clone(),
            access_log: access,
            allowed_origins: self.origins,
            media_hosts: self.media,
            isolation: self.isolation,
            body_memory: BodyMemory::new(self.config.max_buffered_body_bytes),
            health_watches: HealthWatchPermits::default(),
            response_affinity: ResponseAffinity::default(),
            config: self.config,
            keys: self.keys,
            admission: admission.clone(),
            dispatch,
        });
        let (tls, renewals) = (self.tls.edge.clone(), tokio::spawn(self.tls.renew_certificates(end.clone())));
        edge::serve(self.edge.0, tls, edge, serving.clone()).await;
        if !serving.wait_tasks(drain_timeout).await {
            tracing::warn!(in_flight = admission.in_flight(), "leaving with requests unfinished");
            serving.stop();
        }
        let rest = [link, admin, readers, renewals, keys].map(|task| join_within(CLOSE_TIMEOUT, task));
        tokio::join!(tasks.finish(CLOSE_TIMEOUT), join_all(rest), prompts.finish(CLOSE_TIMEOUT));
        writing.flush().await;
    }
}

fn queue_limits(config: &RouterConfig) -> QueueLimits {
    QueueLimits { max_requests: config.max_queued, max_bytes: MAX_QUEUED_BYTES, max_wait: config.max_queue_wait }
}

#[derive(Debug)]
struct RouterAdmin {
    fleet: Fleet,
    placer: Arc<Placer>,
    metric_registry: MetricRegistry,
    shutdown: Shutdown,
}

impl RouterAdmin {
    /// Serves the pages and operators' calls on the admin listener and on the operators' socket,
    /// until `end`.
    async fn serve(
        self,
        guard: AdminGuard,
        listener: TcpListener,
        operators: (OperatorsSocket, Option<PrivateSocket>),
        end: CancellationToken,
    ) {
        let calls = Operators { fleet: self.fleet.clone(), placer: self.placer.clone() };
        let pages = guard_pages(admin::routes(Arc::new(self)).merge(calls.routes()), guard);
        let (place, socket) = operators;
        tokio::join!(place.serve(socket, pages.clone(), end.clone()), admin::serve(listener, pages, end));
    }
}

impl AdminPages for RouterAdmin {
    fn ready(&self) -> Result<(), String> {
        if self.shutdown.is_draining() {
            return Err("draining".into());
        }
        if self.fleet.view().replicas.iter().any(|replica| replica.is_ready()) { Ok(()) } else { Err("no replica is ready".into()) }
    }

    fn metrics(&self) -> &MetricRegistry {
        &self.metric_registry
    }
}
