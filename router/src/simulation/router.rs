//! A router without sockets: everything that `Router::run` makes of a configuration, with
//! connections in memory in place of its listeners.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use hostler_boot::Shutdown;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::sync::CancellationToken;

use super::link::{Link, LinkEnd};
use crate::access_log::AccessLog;
use crate::agent_endpoint;
use crate::bookings::Bookings;
use crate::config::{AccessFormat, RouterConfig};
use crate::dispatch::{Dispatch, RetryBudgets};
use crate::edge;
use crate::grpc::MAX_WATCHES;
use crate::inbound::{AllowedOrigins, BodyMemory, Edge, MediaHosts};
use crate::keys::Keys;
use crate::metrics::RouterMetrics;
use crate::outcome::LossCause;
use crate::placement::{MAX_QUEUED_BYTES, Placer, PrefillWindows, QueueLimits, RequestQueue};
use crate::resumption::RecordMemory;
use crate::shared_state::SharedState;
use crate::succession::Succession;
use crate::tenant_pool::TenantPool;
use crate::thread_pool::ThreadPool;
use crate::traces::Traces;

/// Most bytes on a client's connection: few, so that a slow client is noticed.
const CLIENT_BYTES: usize = 4 * 1024;

const AGENT_BYTES: usize = 1024 * 1024;

const CLIENT_DELAY: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(super) struct RunningRouter {
    pub(super) number: usize,
    pub(super) edge: Arc<Edge>,
    pub(super) state: SharedState,
    shutdown: Shutdown,
    agents: mpsc::UnboundedSender<io::Result<LinkEnd>>,
    /// Links of the router's connections.
    links: Mutex<Vec<Link>>,
    serving: JoinHandle<()>,
    has_ended: CancellationToken,
}

pub(super) fn settings() -> RouterConfig {
    RouterConfig {
        access_log: AccessFormat::Off,
        answer_timeout: Duration::from_secs(60),
        idle_timeout: Duration::from_secs(10),
        stream_keepalive: Duration::from_secs(5),
        client_stall_timeout: Duration::from_secs(20),
        max_queue_wait: Duration::from_secs(40),
        allow_plain_text: true,
        tokenizer_threads: 1,
        cache_dir: "/nonexistent".into(),
        ..RouterConfig::default()
    }
}

impl RunningRouter {
    pub(super) fn start(number: usize) -> Arc<Self> {
        let (config, shutdown, metrics) = (settings(), Shutdown::new(), Arc::<RouterMetrics>::default());
        let state = SharedState::start(&config, Succession::default(), &shutdown);
        let (agents, accepted) = mpsc::unbounded_channel();
        let (sessions, end) = (Arc::new(state.session_deps(&config)), state.tasks.end().clone());
        let serving = agent_endpoint::serve_connections(UnboundedReceiverStream::new(accepted), None, sessions, metrics.clone(), end);
        let serving = tokio::spawn(async { serving.await.expect("the connections are in memory") });
        let windows = PrefillWindows::from_now(config.prefill_interval);
        let placer = Arc::new(Placer::new(state.fleet.clone(), state.index.clone(), state.prompts.clone(), metrics.clone(), windows));
        let limits = QueueLimits { max_requests: config.max_queued, max_bytes: MAX_QUEUED_BYTES, max_wait: config.max_queue_wait };
        let dispatch = Arc::new(Dispatch {
            fleet: state.fleet.clone(),
            queue: RequestQueue::start(placer.clone(), limits, &state.tasks, shutdown.clone()),
            placer,
            retries: RetryBudgets::default(),
            crash_suspects: state.crash_suspects.clone(),
            metrics,
            answer_timeout: config.answer_timeout,
            idle_timeout: config.idle_timeout,
            record_memory: RecordMemory::default(),
        });
        let edge = Arc::new(Edge {
            bookings: Bookings::start(dispatch.queue.clone(), &state.tasks),
            batches: None,
            shutdown: state.serving.clone(),
            succession: state.succession.clone(),
            access_log: AccessLog::default(),
            traces: Traces::default(),
            allowed_origins: AllowedOrigins::new(&[]).expect("there are none"),
            media_hosts: MediaHosts::new(&[]).expect("there are none"),
            isolation: None,
            body_memory: BodyMemory::new(config.max_buffered_body_bytes),
            readers: ThreadPool::new(1),
            health_watches: TenantPool::new(MAX_WATCHES),
            response_affinity: state.response_affinity.clone(),
            config,
            keys: Keys::default(),
            admission: state.admission.clone(),
            dispatch,
        });
        let (links, has_ended) = (Mutex::default(), CancellationToken::new());
        Arc::new(Self { number, edge, state, shutdown, agents, links, serving, has_ended })
    }

    fn connect(&self, delay: Duration, capacity: usize) -> (Link, LinkEnd, LinkEnd) {
        let (link, here, there) = Link::new(delay, capacity);
        self.links.lock().push(link.clone());
        (link, here, there)
    }

    /// An agent's end of a connection; none once the router has ended.
    pub(super) fn accept_agent(&self, delay: Duration) -> Option<(Link, LinkEnd)> {
        let (link, here, there) = self.connect(delay, AGENT_BYTES);
        self.agents.send(Ok(here)).ok().map(|()| (link, there))
    }

    /// A client's end of a connection; none once the router has ended.
    pub(super) fn accept_client(&self) -> Option<LinkEnd> {
        if self.has_ended.is_cancelled() {
            return None;
        }
        let (_, here, there) = self.connect(CLIENT_DELAY, CLIENT_BYTES);
        let (edge, shutdown) = (self.edge.clone(), self.state.serving.clone());
        self.state.serving.tasks().spawn(async move { edge::serve_in_memory(here, edge, &shutdown).await });
        Some(there)
    }

    /// Tells agents that another router takes this one's place.
    pub(super) fn begin_succession(&self) {
        self.state.succession.lend_agents_port();
    }

    /// Sends clients to the other router from now on. Requests here finish.
    pub(super) fn give_place(&self) {
        self.state.succession.give_place();
        self.shutdown.drain();
    }

    /// Ends the router's process. All connections break.
    pub(super) async fn kill(&self) {
        self.has_ended.cancel();
        self.links.lock().iter().for_each(Link::cut);
        self.shutdown.stop();
        self.serving.abort();
        self.state.tasks.finish(Duration::from_secs(1)).await;
    }

    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.is_cancelled()
    }

    /// How many streams have left an engine for this cause.
    pub(super) fn departed_streams(&self, cause: LossCause) -> u64 {
        self.edge.dispatch.metrics.resumptions(cause)
    }

    /// Everything that is still counted, although nothing runs any more.
    pub(super) fn leftovers(&self) -> Vec<String> {
        let dispatch = &self.edge.dispatch;
        let view = self.state.fleet.view();
        let counts = [
            ("permits", self.state.admission.in_flight()),
            ("requests in the queue", dispatch.queue.waiting_count()),
            ("bytes of tokens", dispatch.record_memory.taken()),
        ];
        let at_replicas = view.replicas.iter().map(|replica| (&*replica.id, replica.local_load.in_flight() as usize));
        counts.into_iter().chain(at_replicas).filter(|(_, count)| *count > 0).map(|(what, count)| format!("{what}: {count}")).collect()
    }
}
