//! Connections of the agent to its routers: one session per router, each with its own attachment
//! and lanes, all over the same engines.

mod attachments;
mod backoff;
mod orders;
mod redial;
mod relay;
mod report;
mod session;
mod transfers;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{OptionFuture, join_all};
use rustc_hash::{FxHashMap, FxHashSet};
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use attachments::Attachments;
pub(crate) use attachments::{AttachLimits, AttachedGuard};
pub use backoff::Backoff;

use crate::join::RouterAccess;
use crate::load_turns::LoadTurns;
use crate::metrics::AgentMetrics;
use crate::node::NodeState;
use crate::router_target::RouterTarget;

/// How often names are resolved and files read again.
///
/// A router that was added to a name is served after this time. While no router has this agent,
/// files are read more often.
const RESOLVE_INTERVAL: Duration = Duration::from_secs(15);

/// Lanes per router.
///
/// They spread the work of very many streams over as many tasks. HTTP/2 servers allow some 200
/// streams a connection.
pub const LANES: u32 = 4;

/// State shared by all sessions.
#[derive(Debug)]
pub struct Uplink {
    /// Engines of the node and the reports about them.
    pub state: Arc<NodeState>,
    pub node: String,
    pub life: u64,
    /// How the agent communicates with routers.
    pub access: RouterAccess,
    pub metrics: Arc<AgentMetrics>,
    /// Requests being relayed.
    pub requests: TaskTracker,
    /// Lives of the routers served now. Two addresses of one router must not both attach.
    pub attached_routers: watch::Sender<FxHashSet<u64>>,
    /// Turns to read models from shared file systems.
    pub(crate) load_turns: Arc<LoadTurns>,
    /// Results of the attempts to attach to routers.
    pub attachments: Arc<Attachments>,
}

impl Uplink {
    /// Serves every router that `targets` name, until `end`.
    pub async fn run(self: Arc<Self>, targets: Vec<RouterTarget>, end: CancellationToken) {
        let sessions = TaskTracker::new();
        let mut known: FxHashMap<SocketAddr, RouterSession> = FxHashMap::default();
        let mut unresolved: FxHashMap<usize, String> = FxHashMap::default();
        let mut redial = Backoff::default();
        loop {
            let found = tokio::select! {
                found = join_all(targets.iter().map(RouterTarget::resolve)) => found,
                () = end.cancelled() => break,
            };
            for (index, found) in found.into_iter().enumerate() {
                let target = &targets[index];
                match found {
                    Ok(addresses) => {
                        unresolved.remove(&index);
                        known.retain(|address, session| {
                            session.target != index || addresses.contains(address) || session.leave(target.is_file())
                        });
                        for address in addresses {
                            known.entry(address).or_insert_with(|| {
                                let ends = SessionEnds { now: end.child_token(), with_router: CancellationToken::new() };
                                sessions.spawn(self.clone().serve_router(address, target.to_string(), ends.clone()));
                                RouterSession { target: index, ends }
                            });
                        }
                    }
                    Err(error) => {
                        let reason = error.to_string();
                        self.attachments.record_unresolved(target, &reason);
                        if unresolved.get(&index) != Some(&reason) {
                            tracing::warn!(router = %target, reason, "it is not known where a router is; trying on");
                            unresolved.insert(index, reason);
                        }
                    }
                }
            }
            tokio::select! {
                () = self.wait_resolve(&targets, &mut redial) => {}
                () = end.cancelled() => break,
            }
        }
        sessions.close();
        sessions.wait().await;
        self.requests.close();
        self.requests.wait().await;
    }

    async fn serve_router(self: Arc<Self>, address: SocketAddr, name: String, ends: SessionEnds) {
        redial::maintain_session(self.clone(), address, name, ends).await;
        self.attachments.forget(address);
    }

    /// Waits until the targets should be resolved again.
    ///
    /// A router named by a file is looked up as soon as none is attached, because its file will
    /// name the next one.
    async fn wait_resolve(&self, targets: &[RouterTarget], redial: &mut Backoff) {
        let mut attached = self.attached_routers.subscribe();
        if !attached.borrow().is_empty() {
            *redial = Backoff::default();
        }
        let unattached = targets.iter().any(RouterTarget::is_file).then_some(async {
            // The channel cannot close, because this uplink owns the sender.
            let _ = attached.wait_for(FxHashSet::is_empty).await.map(drop);
            sleep(redial.next_delay()).await;
        });
        tokio::select! {
            () = sleep(RESOLVE_INTERVAL) => {}
            Some(()) = OptionFuture::from(unattached) => {}
        }
    }
}

/// An address that is served, and the number of its target.
struct RouterSession {
    target: usize,
    ends: SessionEnds,
}

/// Ends of the session with a router.
#[derive(Debug, Clone)]
struct SessionEnds {
    now: CancellationToken,
    /// The router ends the session, and is not dialled again.
    with_router: CancellationToken,
}

impl SessionEnds {
    /// Resolves when a router that does not have this agent is no longer a target.
    async fn cancelled(&self) {
        tokio::select! {
            () = self.now.cancelled() => {}
            () = self.with_router.cancelled() => {}
        }
    }
}

impl RouterSession {
    /// Ends the session because its target no longer has the address; returns `false`, for
    /// `retain`.
    ///
    /// A session from a file ends only with its router: the file names the router of the newest
    /// controller, and the previous router may still have streams.
    fn leave(&self, is_file: bool) -> bool {
        let end = if is_file { &self.ends.with_router } else { &self.ends.now };
        end.cancel();
        false
    }
}
