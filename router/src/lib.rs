//! The router: takes requests of OpenAI clients, places each on a replica, relays the answer.
//!
//! A request passes `edge` → `admission` → `dispatch`, which has its `prompt` read and `placement` choose → `carry`; state comes in
//! through `link` → `fleet`.

pub mod admission;
pub mod carry;
mod config;
pub mod dispatch;
pub mod edge;
pub mod fleet;
pub mod keys;
mod link;
mod metrics;
mod operators;
pub mod placement;
pub mod prompt;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use hostler_boot::admin::Pages;
use hostler_boot::shutdown::end_within;
use hostler_boot::{ListenError, Shutdown, admin, bind};
use hostler_proto::fleet::v1::fleet_server::FleetServer;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use admission::Admission;
pub use config::RouterConfig;
use dispatch::{Dispatch, Poison, Retries};
use edge::Edge;
use fleet::{Caches, Fleet, Sessions};
use hostler_placement::affinity::Index;
use keys::Keys;
use metrics::Now;
pub use metrics::RouterMetrics;
use operators::Operators;
use placement::{Hold, Placer, keep_readers};
use prompt::Prompts;

/// How long connections to agents and operators may take to close.
const GOODBYE: Duration = Duration::from_secs(1);

/// Decisions that can be explained afterwards.
const EXPLAINED: usize = 10_000;

/// Reports come every third of a lease; shorter leases would make each hiccup a suspicion.
const SHORTEST_LEASE: Duration = Duration::from_millis(500);

/// A router that has its addresses and waits to run.
#[derive(Debug)]
pub struct Router {
    config: RouterConfig,
    edge: (TcpListener, SocketAddr),
    agents: (TcpListener, SocketAddr),
    admin: (TcpListener, SocketAddr),
}

impl Router {
    /// Takes the three addresses, so that a port in use is known at once.
    ///
    /// # Errors
    /// When one of them cannot be had.
    pub async fn bind(config: RouterConfig) -> Result<Self, ListenError> {
        Ok(Self {
            edge: bind(&config.listen, "router.listen").await?,
            agents: bind(&config.agents_listen, "router.agents_listen").await?,
            admin: bind(&config.admin_listen, "router.admin_listen").await?,
            config,
        })
    }

    /// Where clients connect.
    #[must_use]
    pub fn edge_address(&self) -> SocketAddr {
        self.edge.1
    }

    /// Where agents dial.
    #[must_use]
    pub fn agents_address(&self) -> SocketAddr {
        self.agents.1
    }

    /// Where operators look.
    #[must_use]
    pub fn admin_address(&self) -> SocketAddr {
        self.admin.1
    }

    /// Serves until the shutdown drains, then until the running requests have ended, the drain timeout has passed, or it stops.
    pub async fn run(self, shutdown: Shutdown) {
        // The connections may be stopped when their time is over, while the process goes on.
        let serving = shutdown.part();
        let end = CancellationToken::new();
        let metrics = Arc::new(RouterMetrics::default());
        let fleet = Fleet::start(self.config.lease.max(SHORTEST_LEASE), end.clone());
        let index = Arc::new(Index::new());
        let prompts = Prompts::new(self.config.cache_folder(), self.config.tokenizer_threads());
        let readers = tokio::spawn(keep_readers(prompts.clone(), fleet.clone(), end.clone()));
        let poison = Poison::new(self.config.poison_for);
        let sessions = Sessions {
            fleet: fleet.clone(),
            poison: poison.clone(),
            caches: Caches::start(index.clone(), fleet.clone(), end.clone()),
            prompts: prompts.clone(),
            tickets: Arc::default(),
            router_life: fastrand::u64(1..),
            attachments: AtomicU64::new(0),
        };
        let (agents, link_metrics, link_end) = (self.agents.0, metrics.clone(), end.clone());
        let link = tokio::spawn(async move {
            if let Err(error) = link::serve(agents, Arc::new(sessions), link_metrics, link_end).await {
                tracing::error!(%error, "the agents' listener ended");
            }
        });

        let admission = Admission::new(self.config.max_in_flight);
        let placer = Arc::new(Placer::new(fleet.clone(), index, prompts, metrics.clone(), EXPLAINED));
        let hold = Hold::start(placer.clone(), self.config.max_held, self.config.longest_wait, end.clone());
        let overview = Overview {
            fleet: fleet.clone(),
            poison: poison.clone(),
            admission: admission.clone(),
            placer: placer.clone(),
            hold: hold.clone(),
            metrics: metrics.clone(),
            shutdown: serving.clone(),
        };
        let operators = Operators { fleet: fleet.clone(), placer: placer.clone() };
        let operators = tonic::service::Routes::new(FleetServer::new(operators)).prepare().into_axum_router();
        // A gRPC call to a path that nobody has is answered by tonic, any other by axum.
        let pages = admin::routes(Arc::new(overview)).merge(operators);
        let admin = tokio::spawn(admin::serve(self.admin.0, pages, end.clone()));

        let dispatch = Dispatch {
            fleet,
            placer,
            hold,
            retries: Retries::default(),
            poison,
            metrics,
            answer_timeout: self.config.answer_timeout,
            idle_timeout: self.config.idle_timeout,
        };
        let drain_timeout = self.config.drain_timeout;
        let edge = Arc::new(Edge { config: self.config, keys: Keys::default(), admission: admission.clone(), dispatch });
        edge::serve(self.edge.0, edge, serving.clone()).await;
        if !serving.finish(drain_timeout).await {
            tracing::warn!(in_flight = admission.in_flight(), "leaving with requests unfinished");
            serving.stop();
        }
        end.cancel();
        end_within(GOODBYE, link).await;
        end_within(GOODBYE, admin).await;
        end_within(GOODBYE, readers).await;
    }
}

/// What the admin pages show.
#[derive(Debug)]
struct Overview {
    fleet: Fleet,
    poison: Arc<Poison>,
    admission: Admission,
    placer: Arc<Placer>,
    hold: Hold,
    metrics: Arc<RouterMetrics>,
    shutdown: Shutdown,
}

impl Pages for Overview {
    fn ready(&self) -> Result<(), String> {
        if self.shutdown.is_draining() {
            return Err("draining".into());
        }
        if self.fleet.view().replicas.iter().any(fleet::Replica::is_ready) { Ok(()) } else { Err("no replica is ready".into()) }
    }

    fn metrics(&self) -> String {
        self.metrics.page(&Now {
            view: &self.fleet.view(),
            in_flight: self.admission.in_flight(),
            held: self.hold.waiting(),
            suspects: self.poison.suspects(),
            index: (self.placer.index.len(), self.placer.index.bytes()),
            prompts: self.placer.prompts.figures(),
        })
    }
}
