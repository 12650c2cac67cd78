//! The router: takes requests of OpenAI clients, places each on a replica, and relays the answer.
//!
//! A request comes by `edge` (HTTP) or `grpc`. Both send it through `inbound` → `admission` →
//! `dispatch`, which has `prompt` read it and `placement` choose a replica → `lanes`. State comes
//! in through `agent_endpoint` → `fleet`.

mod access_log;
mod admission;
mod agent_endpoint;
mod background;
mod batch_runs;
mod batches;
mod bookings;
mod cache_level;
mod client_text;
mod config;
mod crash_suspects;
mod direct_writing;
mod dispatch;
mod edge;
mod ending;
mod engine_life;
mod event_log;
mod exposures;
mod fan_out;
mod findings;
mod fleet;
mod fleet_figures;
mod folder_names;
#[cfg(test)]
mod growth;
mod grpc;
mod history;
mod inbound;
mod join;
pub mod keys;
pub mod lanes;
mod member;
mod metrics;
mod operators;
mod outcome;
mod page;
mod pages;
mod placement;
mod prompt;
mod random;
mod response_affinity;
mod resume_tier;
mod resumption;
mod shared_state;
#[cfg(test)]
mod simulation;
pub mod sse;
mod succession;
mod takeover;
mod tenant_pool;
mod thread_pool;
mod tls;
mod token_ledger;
mod traces;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use hostler_boot::metrics::MetricRegistry;
use hostler_boot::shutdown::join_within;
use hostler_boot::{ListenError, PrivateSocket, Shutdown, SocketError, bind};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use access_log::{AccessLog, AccessLogError, AccessLogWriter};
use batches::Batches;
use bookings::Bookings;
pub use config::{AccessFormat, NeedKey, RouterConfig};
use edge::EdgeListeners;
use ending::EndTerms;
pub use exposures::Exposure;
use fleet::SessionDeps;
use fleet_figures::RouterCollector;
use grpc::MAX_WATCHES;
use inbound::{AllowedOrigins, BodyMemory, Edge, InvalidMediaHost, InvalidOrigin, Isolation, MediaHosts};
use keys::{AdminGuard, KeyFileError, Keys, PageSessions, Secret};
pub use metrics::RouterMetrics;
use operators::OperatorsSocket;
pub use operators::find_operators_sockets;
use page::{EdgePlace, Page, PageChat};
use pages::RouterAdmin;
use placement::{MAX_QUEUED_BYTES, Placer, PrefillWindows, QueueLimits, RequestQueue, maintain_tokenizers};
use shared_state::SharedState;
use succession::Succession;
use takeover::{ListeningSockets, Successor, SuccessorParts};
pub use takeover::{TakeoverError, is_replaceable};
use tenant_pool::TenantPool;
use thread_pool::ThreadPool;
pub use tls::TlsSetupError;
use tls::{FleetAuthority, RouterTls};
use token_ledger::TokenLedger;
pub use token_ledger::{TokenCounts, UsageHolder, UsageRow, day_name, day_of, read_usage};
use traces::{TraceExport, Traces};

/// How long connections to agents and operators may take to close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// A router that is bound to its addresses but does not serve yet.
#[derive(Debug)]
pub struct Router {
    config: RouterConfig,
    edge: (TcpListener, SocketAddr),
    /// The edge for clients of this user.
    edge_socket: Option<PrivateSocket>,
    agents: (TcpListener, SocketAddr),
    admin: (TcpListener, SocketAddr),
    operators: (OperatorsSocket, Option<PrivateSocket>),
    keys: Keys,
    operator_key: Secret,
    metrics: Arc<RouterMetrics>,
    metric_registry: MetricRegistry,
    access_log: (AccessLog, AccessLogWriter),
    usage: Option<TokenLedger>,
    traces: (Traces, TraceExport),
    tls: RouterTls,
    origins: AllowedOrigins,
    media: MediaHosts,
    isolation: Option<Isolation>,
    /// The socket on which another router asks for this one's place; none if the place is not
    /// offered.
    takeover: Option<PrivateSocket>,
    /// The connection to the router whose place this one takes.
    successor: Option<Successor>,
    succession: Succession,
    /// Time from a scheduler's SIGTERM until it kills this process; `None` if nothing does.
    kill_grace: Option<Duration>,
}

/// The place of a router, which it may keep for a successor while it drains.
#[derive(Debug, Clone)]
pub struct RouterPlace(Succession);

impl RouterPlace {
    /// Resolves when the router whose place this one takes has finished its requests and left; at
    /// once if there is none.
    pub async fn wait_predecessor_left(&self) {
        self.0.wait_predecessor_left().await;
    }

    /// Stops waiting for a successor: once the router drains, clients are refused at once.
    pub fn give_up(&self) {
        self.0.keep_place(false);
    }

    /// Whether another router has taken it.
    #[must_use]
    pub fn is_replaced(&self) -> bool {
        self.0.is_replaced()
    }

    /// Sets how long this router's requests may take when it drains, because another router serves
    /// elsewhere.
    pub fn finish_within(&self, time: Duration) {
        self.0.set_time_to_finish(time);
    }
}

/// The contents of a router's metrics page, for the manual.
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
    #[error("{0}; a router of yours runs here, whose place `hostler router --takeover` takes without refusing a request")]
    Replaceable(ListenError),
    #[error(transparent)]
    Takeover(#[from] TakeoverError),
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
    /// Reads the keys and takes the addresses and the operators' socket, so that conflicts show at
    /// once.
    ///
    /// # Errors
    /// If one of them is unavailable.
    pub async fn bind(config: RouterConfig) -> Result<Self, StartError> {
        Self::open(config, false, |_| Ok(())).await
    }

    /// Binds a router whose clients share its host with other users, who could listen where it has
    /// listened before.
    ///
    /// The edge speaks TLS. If the settings name no certificate, the fleet's authority certifies it
    /// by these names, in memory. While the router drains, it keeps its place for another one, and
    /// new clients wait for that one.
    ///
    /// # Errors
    /// As for `bind`, and without an authority.
    pub async fn bind_on_shared_host(config: RouterConfig, names: &[String]) -> Result<Self, StartError> {
        Self::open_on_shared_host(config, false, names).await
    }

    /// Binds as `bind_on_shared_host` does, in the place of another router of this user, even a
    /// draining one.
    ///
    /// # Errors
    /// As for `bind_on_shared_host`, and if the running router does not give its place up.
    pub async fn follow_on_shared_host(config: RouterConfig, names: &[String]) -> Result<Self, StartError> {
        Self::open_on_shared_host(config, true, names).await
    }

    async fn open_on_shared_host(config: RouterConfig, takes_over: bool, names: &[String]) -> Result<Self, StartError> {
        let router = Self::open(config, takes_over, |tls| tls.certify_edge(names)).await?.open_edge_socket().await.offer_place().await;
        router.succession.keep_place(router.takeover.is_some());
        Ok(router)
    }

    /// Binds a router that clients and operators of other hosts reach: the admin listener speaks
    /// TLS too.
    ///
    /// # Errors
    /// As for `bind`, and without an authority.
    pub async fn bind_for_other_hosts(config: RouterConfig, names: &[String]) -> Result<Self, StartError> {
        Self::open(config, false, |tls| tls.certify_host(names)).await
    }

    /// Binds as `bind` does, and lets another router of this user take this one's place.
    ///
    /// # Errors
    /// As for `bind`.
    pub async fn bind_replaceable(config: RouterConfig) -> Result<Self, StartError> {
        Ok(Self::open(config, false, |_| Ok(())).await?.offer_place().await)
    }

    /// Binds as `bind` does, but another router of this user that has the place gives it up once
    /// this one runs and the agents are here. A further router may then take this one's place.
    ///
    /// # Errors
    /// As for `bind`, and if the running router does not give its place up.
    pub async fn take_over(config: RouterConfig) -> Result<Self, StartError> {
        Ok(Self::open(config, true, |_| Ok(())).await?.offer_place().await)
    }

    async fn open(
        config: RouterConfig,
        takes_over: bool,
        certify: impl FnOnce(&mut RouterTls) -> Result<(), TlsSetupError>,
    ) -> Result<Self, StartError> {
        let keys = Keys::open(&config.keys_file)?;
        check_settings(&config, &keys)?;
        let mut metric_registry = MetricRegistry::default();
        let metrics = Arc::new(RouterMetrics::register(&mut metric_registry));
        let mut tls = RouterTls::load(&config)?;
        certify(&mut tls)?;
        let place = operators_place(&config);
        let mut successor = if takes_over { Successor::find(&place).await? } else { None };
        if takes_over && successor.is_none() {
            tracing::info!("no router of this user has this place: nothing to take over");
        }
        let edge = listen(&config.listen, "router.listen", &mut successor, &place).await?;
        let agents = listen(config.agents_address(), "router.agents_listen", &mut successor, &place).await?;
        tls.check_plain_text(&config, edge.1, agents.1)?;
        let admin = listen(&config.admin_listen, "router.admin_listen", &mut successor, &place).await?;
        let place = OperatorsSocket { port: admin.1.port(), ..place };
        let (access_log, writing) = AccessLog::start(config.access_log, &config.access_log_file, metrics.access_log_dropped.clone())?;
        let usage = TokenLedger::open(&config.usage_dir);
        Ok(Self {
            operators: (place.clone(), place.open(successor.is_some()).await?),
            tls,
            origins: AllowedOrigins::new(&config.allowed_origins)?,
            media: MediaHosts::new(&config.media_hosts)?,
            isolation: config.secret_path().map(|path| Isolation::open(&path).map_err(StartError::Isolation)).transpose()?,
            access_log: (access_log.with_usage(usage.clone()), writing),
            usage,
            traces: Traces::start(config.traces.as_ref(), metrics.trace_spans_dropped.clone()),
            metrics,
            metric_registry,
            keys,
            operator_key: Secret::random().map_err(StartError::Random)?,
            edge,
            edge_socket: None,
            agents,
            admin,
            config,
            takeover: None,
            successor,
            succession: Succession::default(),
            kill_grace: None,
        })
    }

    /// Lets another router of this user take this one's place.
    async fn offer_place(mut self) -> Self {
        let Some(path) = self.operators_socket().map(takeover::socket_path) else { return self };
        let socket = if self.successor.is_some() { PrivateSocket::bind_beside(&path).await } else { PrivateSocket::bind(&path).await };
        let warn = |error: &SocketError| tracing::warn!(%error, "no other router can take this one's place");
        self.takeover = socket.inspect_err(warn).ok();
        self
    }

    /// Makes a hurried end fit into this time, after which somebody kills the process.
    #[must_use]
    pub fn with_kill_grace(self, kill_grace: Option<Duration>) -> Self {
        Self { kill_grace, ..self }
    }

    /// Serves clients also on a Unix socket beside the operators' one.
    ///
    /// Only this router's user and root can connect, and they show their keys as at the port. If
    /// the socket cannot be made, there is only the port.
    #[must_use]
    pub async fn open_edge_socket(mut self) -> Self {
        let name = format!("edge-{}.sock", self.admin_address().port());
        let Some(path) = self.operators_socket().map(|operators| operators.with_file_name(name)) else { return self };
        let socket = if self.successor.is_some() { PrivateSocket::bind_beside(&path).await } else { PrivateSocket::bind(&path).await };
        let warn = |error: &SocketError| tracing::warn!(%error, "the edge has no socket for programs without TLS");
        self.edge_socket = socket.inspect_err(warn).ok();
        self
    }

    /// Where clients of this user reach the edge, if such a socket exists.
    #[must_use]
    pub fn edge_socket(&self) -> Option<&Path> {
        self.edge_socket.as_ref().map(|socket| socket.file().path())
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
    pub fn admin_scheme(&self) -> &'static str {
        if self.tls.admin.is_some() { "https" } else { "http" }
    }

    #[must_use]
    pub fn agents_address(&self) -> SocketAddr {
        self.agents.1
    }

    /// The address of health and metrics, and of operators' calls with a key.
    #[must_use]
    pub fn admin_address(&self) -> SocketAddr {
        self.admin.1
    }

    /// Where operators need no key, if such a socket exists.
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
            has_edge_tls: self.tls.edge.is_some(),
            has_admin_tls: self.tls.admin.is_some(),
            checks_agents: self.tls.agents.is_some() || !self.config.allow_plain_text,
        })
    }

    fn guard(&self, page_sessions: PageSessions) -> AdminGuard {
        AdminGuard::new(&self.config, page_sessions, &self.operator_key, self.admin.1.ip(), self.operators_socket())
    }

    /// The place that this router has, for callers that know that no successor comes.
    #[must_use]
    pub fn place(&self) -> RouterPlace {
        RouterPlace(self.succession.clone())
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

    /// Takes the other router's place, if asked to, then serves.
    ///
    /// The router serves until the shutdown drains or another router takes its place, and until the
    /// running requests have ended, their time has passed or the shutdown stops.
    ///
    /// # Errors
    /// If it does not get the other router's place.
    pub async fn run(mut self, shutdown: Shutdown) -> Result<(), TakeoverError> {
        let page_sessions = PageSessions::new(self.keys.clone());
        let edge_place = EdgePlace { scheme: self.edge_scheme(), address: self.edge.1 };
        let guard = self.guard(page_sessions.clone());
        let state = SharedState::start(&self.config, self.succession, &shutdown);
        let (serving, tasks, end) = (&state.serving, &state.tasks, state.tasks.end());
        let SharedState { fleet, crash_suspects, admission, prompts, .. } = &state;
        let (metrics, (access, writing), usage) = (self.metrics, self.access_log, self.usage);
        let terms = EndTerms { drain: self.config.drain_timeout, kill_grace: self.kill_grace };
        let (traces, trace_export) = self.traces;
        let predecessor =
            self.takeover.as_ref().map(|_| state.predecessor(ListeningSockets::of([&self.edge.0, &self.agents.0, &self.admin.0])));
        if self.successor.is_some() {
            // New connections belong to the other router.
            state.succession.lend_agents_port();
        }
        let mut parts = vec![
            serve_agents(self.agents.0, self.tls.agents.clone(), state.session_deps(&self.config), metrics.clone(), end.clone()),
            tokio::spawn(maintain_tokenizers(prompts.clone(), fleet.clone(), end.clone())),
            tokio::spawn(keys::watch_file(self.keys.clone(), metrics.clone(), end.clone())),
        ];
        parts.extend(usage.clone().map(|usage| tokio::spawn(usage.keep_written(end.clone()))));
        let prefill_windows = PrefillWindows::from_now(self.config.prefill_interval);
        let placer = Arc::new(Placer::new(fleet.clone(), state.index.clone(), prompts.clone(), metrics.clone(), prefill_windows));
        // A replaced router serves its remaining requests as before, so it waits for replicas too.
        let waiting = if state.succession.keeps_place() { Shutdown::new() } else { shutdown.clone() };
        let queue = RequestQueue::start(placer.clone(), queue_limits(&self.config), tasks, waiting);
        let calls = state.operators(&placer, &queue, (page_sessions.clone(), access.refusals(), self.admin.1));
        let mut metric_registry = self.metric_registry;
        metric_registry.register_collector(RouterCollector {
            calls: calls.clone(),
            crash_suspects: crash_suspects.clone(),
            keys: self.keys.clone(),
            tls: self.tls.clone(),
        });
        calls.watch_fleet(tasks);
        let page = Page::start(calls.clone(), self.config.usage_dir.clone(), tasks, state.admin_end.clone());
        let dispatch = state.dispatch(&self.config, placer, queue, metrics);
        let edge = Arc::new(Edge {
            bookings: Bookings::start(dispatch.queue.clone(), tasks),
            batches: Batches::open_if_set(&self.config),
            shutdown: serving.clone(),
            succession: state.succession.clone(),
            access_log: access,
            traces,
            allowed_origins: self.origins,
            media_hosts: self.media,
            isolation: self.isolation,
            body_memory: BodyMemory::new(self.config.max_buffered_body_bytes),
            readers: ThreadPool::new(self.config.tokenizer_threads()),
            health_watches: TenantPool::new(MAX_WATCHES),
            response_affinity: state.response_affinity.clone(),
            config: self.config,
            keys: self.keys,
            admission: admission.clone(),
            dispatch,
        });
        let chat = PageChat::new(&edge, page_sessions, edge_place);
        let overview = RouterAdmin { calls, page, chat, metric_registry, shutdown: serving.clone() };
        let edge_tls = self.tls.edge.clone();
        let admin = (self.admin.0, self.tls.admin.clone());
        parts.push(tokio::spawn(self.tls.renew_certificates(end.clone())));
        let sockets = [self.operators.1.as_mut(), self.takeover.as_mut(), self.edge_socket.as_mut()];
        let taken = take_place(self.successor, state.successor_parts(sockets), &shutdown).await;
        if taken.is_ok() {
            parts.push(tokio::spawn(overview.serve(guard, admin, self.operators, state.admin_end.clone())));
            parts.extend(predecessor.zip(self.takeover).map(|(predecessor, socket)| tokio::spawn(predecessor.serve(socket))));
            if let Some(batches) = edge.batches.clone() {
                serving.tasks().spawn(batch_runs::run_batches(edge.clone(), batches, serving.clone()));
            }
            let listeners = EdgeListeners { port: self.edge.0, tls: edge_tls, socket: self.edge_socket };
            edge::serve(listeners, edge, serving.clone()).await;
            ending::end_requests(&state, &shutdown, terms).await;
        }
        serving.stop();
        state.requests_ended.cancel();
        let parts = parts.into_iter().map(|task| join_within(CLOSE_TIMEOUT, task));
        tokio::join!(tasks.finish(CLOSE_TIMEOUT), join_all(parts), prompts.finish(CLOSE_TIMEOUT));
        tokio::join!(writing.flush(), trace_export.flush(), TokenLedger::finish(usage));
        taken
    }
}

/// The operators' socket of a router with these settings.
fn operators_place(config: &RouterConfig) -> OperatorsSocket {
    let port = config.admin_listen.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or_default();
    OperatorsSocket { configured: config.operators_socket.clone(), port }
}

fn check_settings(config: &RouterConfig, keys: &Keys) -> Result<(), StartError> {
    if !keys.are_required() && config.metrics_need_key == NeedKey::Always {
        return Err(StartError::Setting("router.metrics_need_key can be `always` only where there are keys: set router.keys_file"));
    }
    if !BodyMemory::new(config.max_buffered_body_bytes).can_fit(config.max_body_bytes) {
        return Err(StartError::Setting(
            "a body of router.max_body_bytes would never find room: let seven eighths of router.max_buffered_body_bytes be more than that, or lower \
             router.max_body_bytes",
        ));
    }
    Ok(())
}

/// Listens on an address, or continues the other router's listener.
async fn listen(
    address: &str,
    setting: &'static str,
    successor: &mut Option<Successor>,
    place: &OperatorsSocket,
) -> Result<(TcpListener, SocketAddr), StartError> {
    if let Some(taken) = successor.as_mut().map(|successor| successor.take_listener(address))
        && let Some(taken) = taken.await
    {
        return Ok(taken);
    }
    match bind(address, setting).await {
        Err(error @ ListenError::InUse { .. }) if takeover::is_offered(place).await => Err(StartError::Replaceable(error)),
        bound => Ok(bound?),
    }
}

fn serve_agents(
    listener: TcpListener,
    admitting: Option<FleetAuthority>,
    sessions: SessionDeps,
    metrics: Arc<RouterMetrics>,
    end: CancellationToken,
) -> JoinHandle<()> {
    tokio::spawn(async move {
        if let Err(error) = agent_endpoint::serve(listener, admitting, Arc::new(sessions), metrics, end).await {
            tracing::error!(%error, "the agents' listener ended");
        }
    })
}

/// Takes another router's place, if there is one to take.
async fn take_place(successor: Option<Successor>, parts: SuccessorParts<'_>, shutdown: &Shutdown) -> Result<(), TakeoverError> {
    let Some(successor) = successor else {
        parts.succession.record_predecessors_end();
        return Ok(());
    };
    tokio::select! {
        taken = successor.take_place(parts) => taken,
        () = shutdown.wait_drain() => Err(TakeoverError::Stopped),
    }
}

fn queue_limits(config: &RouterConfig) -> QueueLimits {
    QueueLimits { max_requests: config.max_queued, max_bytes: MAX_QUEUED_BYTES, max_wait: config.max_queue_wait }
}
