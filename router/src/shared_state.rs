//! The state that the parts of a running router share, and the parts that need nothing else.
//! `Router::run` makes it once.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use hostler_boot::{PrivateSocket, Shutdown};
use hostler_placement::affinity::CacheIndex;
use tokio_util::sync::CancellationToken;

use crate::access_log::RefusalLog;
use crate::admission::Admission;
use crate::background::BackgroundTasks;
use crate::config::RouterConfig;
use crate::crash_suspects::CrashSuspects;
use crate::dispatch::{Dispatch, RetryBudgets};
use crate::event_log::EventLog;
use crate::fleet::{CacheReportQueue, Fleet, LoadTurns, SessionDeps};
use crate::history::History;
use crate::keys::PageSessions;
use crate::metrics::RouterMetrics;
use crate::operators::Operators;
use crate::placement::{Placer, RequestQueue};
use crate::prompt::Prompts;
use crate::response_affinity::ResponseAffinity;
use crate::resumption::RecordMemory;
use crate::succession::Succession;
use crate::takeover::{ListeningSockets, Predecessor, SuccessorParts};

/// Shortest lease. Reports come every third of a lease, and shorter leases would turn each hiccup
/// into a suspicion.
const MIN_LEASE: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(crate) struct SharedState {
    /// The clients' connections, which may be stopped when their time is over while the process
    /// goes on.
    pub(crate) serving: Shutdown,
    pub(crate) tasks: BackgroundTasks,
    pub(crate) succession: Succession,
    pub(crate) fleet: Fleet,
    pub(crate) index: Arc<CacheIndex>,
    pub(crate) prompts: Prompts,
    pub(crate) crash_suspects: Arc<CrashSuspects>,
    pub(crate) admission: Admission,
    pub(crate) response_affinity: ResponseAffinity,
    /// Cancelled when operators are served no more.
    pub(crate) admin_end: CancellationToken,
    /// Cancelled when the last request has ended.
    pub(crate) requests_ended: CancellationToken,
}

impl SharedState {
    pub(crate) fn start(config: &RouterConfig, succession: Succession, shutdown: &Shutdown) -> Self {
        let (tasks, events) = (BackgroundTasks::default(), EventLog::default());
        events.record("router_started", "", concat!("router ", env!("CARGO_PKG_VERSION"), " has begun"), false);
        Self {
            serving: shutdown.child(),
            succession,
            fleet: Fleet::start(config.lease.max(MIN_LEASE), events.clone(), &tasks),
            index: Arc::new(CacheIndex::new()),
            prompts: Prompts::new(config.cache_folder(), config.tokenizer_threads()),
            crash_suspects: CrashSuspects::new(config.crash_suspect_ttl, events),
            admission: Admission::new(config.max_in_flight),
            response_affinity: ResponseAffinity::default(),
            admin_end: tasks.end().child_token(),
            requests_ended: CancellationToken::new(),
            tasks,
        }
    }

    pub(crate) fn session_deps(&self, config: &RouterConfig) -> SessionDeps {
        SessionDeps {
            load_turns: LoadTurns::new(config.max_loads),
            tasks: self.tasks.clone(),
            fleet: self.fleet.clone(),
            crash_suspects: self.crash_suspects.clone(),
            cache_reports: CacheReportQueue::start(self.index.clone(), self.fleet.clone(), &self.tasks),
            prompts: self.prompts.clone(),
            tickets: Arc::default(),
            router_run: fastrand::u64(1..),
            next_attachment: AtomicU64::new(0),
            succession: self.succession.clone(),
            only_own_user: config.tls_dir.as_os_str().is_empty() && !config.allow_plain_text,
        }
    }

    pub(crate) fn predecessor(&self, listeners: ListeningSockets) -> Predecessor {
        Predecessor {
            listeners,
            fleet: self.fleet.clone(),
            admission: self.admission.clone(),
            response_affinity: self.response_affinity.clone(),
            succession: self.succession.clone(),
            serving: self.serving.clone(),
            admin_end: self.admin_end.clone(),
            requests_ended: self.requests_ended.clone(),
        }
    }

    /// The operators' service. The page has these sessions and refused requests, and is on the
    /// listener at this address.
    pub(crate) fn operators(
        &self,
        placer: &Arc<Placer>,
        queue: &RequestQueue,
        (page_sessions, refusals, admin_address): (PageSessions, RefusalLog, SocketAddr),
    ) -> Operators {
        Operators {
            fleet: self.fleet.clone(),
            placer: placer.clone(),
            queue: queue.clone(),
            admission: self.admission.clone(),
            history: History::default(),
            page_sessions,
            refusals,
            admin_address,
        }
    }

    /// The dispatch, which sends requests to replicas.
    pub(crate) fn dispatch(
        &self,
        config: &RouterConfig,
        placer: Arc<Placer>,
        queue: RequestQueue,
        metrics: Arc<RouterMetrics>,
    ) -> Arc<Dispatch> {
        Arc::new(Dispatch {
            fleet: self.fleet.clone(),
            placer,
            queue,
            retries: RetryBudgets::default(),
            crash_suspects: self.crash_suspects.clone(),
            metrics,
            answer_timeout: config.answer_timeout,
            idle_timeout: config.idle_timeout,
            record_memory: RecordMemory::default(),
        })
    }

    /// The parts for a takeover, with the sockets that take the other router's names.
    pub(crate) fn successor_parts<'a>(&'a self, sockets: [Option<&'a mut PrivateSocket>; 3]) -> SuccessorParts<'a> {
        SuccessorParts {
            tasks: &self.tasks,
            fleet: &self.fleet,
            succession: &self.succession,
            admission: &self.admission,
            response_affinity: &self.response_affinity,
            sockets,
        }
    }
}
