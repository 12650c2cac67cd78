//! The agent's connections to its routers: one session per router, each with its own attachment and lanes, all over the same engines.

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

use parking_lot::Mutex;
use rustc_hash::{FxHashMap, FxHashSet};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub(crate) use attachments::AttachLimits;
pub use attachments::Attachments;
pub use backoff::Backoff;

use crate::join::RouterAccess;
use crate::metrics::AgentMetrics;
use crate::node::NodeState;

/// How often the routers' names are resolved again: a router that was added to a name is served
/// after this time.
const RESOLVE_INTERVAL: Duration = Duration::from_secs(15);

const RESOLVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Lanes per router: the work of very many streams is spread over as many tasks. HTTP/2 servers allow some 200 streams a connection.
pub const LANES: u32 = 4;

/// What all sessions share.
#[derive(Debug)]
pub struct Uplink {
    /// The node's engines and what is reported about them.
    pub state: Arc<NodeState>,
    pub node: String,
    pub life: u64,
    /// How routers are spoken with.
    pub access: RouterAccess,
    pub metrics: Arc<AgentMetrics>,
    /// The requests being relayed.
    pub requests: TaskTracker,
    /// Lives of the routers that are served now: two addresses of one router must not both attach.
    pub attached_routers: Mutex<FxHashSet<u64>>,
    /// Whether any router has ever wanted this agent.
    pub attachments: Arc<Attachments>,
}

impl Uplink {
    /// Serves every router that `targets` (`HOST:PORT`) name, until `end`. A name with several
    /// addresses means a router at each. Loopback names are the exception: their addresses are one
    /// host's.
    pub async fn run(self: Arc<Self>, targets: Vec<String>, end: CancellationToken) {
        let sessions = TaskTracker::new();
        let mut known: FxHashMap<SocketAddr, RouterSession> = FxHashMap::default();
        let mut unresolved = FxHashSet::default();
        loop {
            let found = futures_util::future::join_all(targets.iter().map(|target| resolve(target)));
            let found = tokio::select! {
                found = found => found,
                () = end.cancelled() => break,
            };
            for (target, found) in targets.iter().zip(found) {
                match found {
                    Ok(addresses) => {
                        unresolved.remove(target);
                        // A session ends when its name no longer has the address.
                        known.retain(|address, session| session.target != *target || addresses.contains(address) || session.cancel());
                        for address in addresses {
                            known.entry(address).or_insert_with(|| {
                                let session = end.child_token();
                                sessions.spawn(redial::maintain_session(self.clone(), address, target.clone(), session.clone()));
                                RouterSession { target: target.clone(), session }
                            });
                        }
                    }
                    Err(reason) => {
                        if unresolved.insert(target) {
                            tracing::warn!(router = target, reason, "cannot look up a router; trying on");
                        }
                    }
                }
            }
            tokio::select! {
                () = tokio::time::sleep(RESOLVE_INTERVAL) => {}
                () = end.cancelled() => break,
            }
        }
        sessions.close();
        sessions.wait().await;
        self.requests.close();
        self.requests.wait().await;
    }
}

/// An address that is served, and the name that it was found under.
struct RouterSession {
    target: String,
    session: CancellationToken,
}

impl RouterSession {
    /// Ends the session; `false`, for `retain`.
    fn cancel(&self) -> bool {
        self.session.cancel();
        false
    }
}

async fn resolve(target: &str) -> Result<Vec<SocketAddr>, String> {
    let found = timeout(RESOLVE_TIMEOUT, tokio::net::lookup_host(target)).await;
    let mut addresses: Vec<SocketAddr> = match found {
        Ok(Ok(addresses)) => addresses.collect(),
        Ok(Err(error)) => return Err(error.to_string()),
        Err(_) => return Err("the name service does not answer".into()),
    };
    if addresses.iter().all(|address| address.ip().is_loopback()) {
        addresses.sort_by_key(SocketAddr::is_ipv6);
        addresses.truncate(1);
    }
    Ok(addresses)
}
