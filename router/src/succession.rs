//! How far another router has taken this one's place: the owner of the agents' port, and whether
//! clients go to the other router. `takeover` writes this, and the tasks that accept connections
//! read it. The router's owner may have it keep its place while it drains.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// The owner of the agents' port, which two routers share for a while. Both may accept agents, but
/// agents that are told to dial again must reach the other router.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum AgentsPort {
    #[default]
    Ours,
    /// The port is the other router's, which may still fail to start.
    Lent,
    /// The port is the other router's for good.
    GivenAway,
}

/// Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Succession(Arc<SuccessionState>);

#[derive(Debug, Default)]
struct SuccessionState {
    agents_port: Mutex<AgentsPort>,
    port_change: Notify,
    is_replaced: AtomicBool,
    /// Cancelled when the router whose place this one has taken is gone.
    predecessor_left: CancellationToken,
    keeps_place: AtomicBool,
    time_to_finish: Mutex<Option<Duration>>,
}

impl Succession {
    fn set_port(&self, port: AgentsPort) {
        *self.0.agents_port.lock() = port;
        self.0.port_change.notify_waiters();
    }

    /// Sends agents to the other router from now on.
    pub(crate) fn lend_agents_port(&self) {
        self.set_port(AgentsPort::Lent);
    }

    /// Accepts agents here: the other router has given its port away, or has failed to start.
    pub(crate) fn take_agents_port(&self) {
        self.set_port(AgentsPort::Ours);
    }

    /// Records that the other router serves. Requests here finish.
    pub(crate) fn give_place(&self) {
        self.0.is_replaced.store(true, Ordering::Relaxed);
        self.set_port(AgentsPort::GivenAway);
    }

    /// Records that the router whose place this one takes has left, or that there was none.
    pub(crate) fn record_predecessors_end(&self) {
        self.0.predecessor_left.cancel();
    }

    pub(crate) async fn wait_predecessor_left(&self) {
        self.0.predecessor_left.cancelled().await;
    }

    /// Whether another router serves in this one's place.
    #[must_use]
    pub(crate) fn is_replaced(&self) -> bool {
        self.0.is_replaced.load(Ordering::Relaxed)
    }

    /// Sets whether this router keeps its place for a successor while it drains. New clients then
    /// wait for the successor.
    pub(crate) fn keep_place(&self, keeps: bool) {
        self.0.keeps_place.store(keeps, Ordering::Relaxed);
    }

    #[must_use]
    pub(crate) fn keeps_place(&self) -> bool {
        self.0.keeps_place.load(Ordering::Relaxed)
    }

    /// Sets how long this router's requests may take from its drain on, instead of
    /// `router.drain_timeout`.
    pub(crate) fn set_time_to_finish(&self, time: Duration) {
        *self.0.time_to_finish.lock() = Some(time);
    }

    #[must_use]
    pub(crate) fn time_to_finish(&self) -> Option<Duration> {
        *self.0.time_to_finish.lock()
    }

    /// Whether an existing connection may ask once more while this router drains. The client's next
    /// connection reaches a successor.
    #[must_use]
    pub(crate) fn serves_connections(&self) -> bool {
        self.is_replaced() || self.keeps_place()
    }

    /// A watch for an agent's session, which begins now.
    #[must_use]
    pub(crate) fn watch_agents_port(&self) -> AgentsPortWatch {
        AgentsPortWatch { succession: self.clone(), is_ours: true }
    }

    /// The next connection of an agent, as long as the port is this router's.
    ///
    /// The listener is closed here once the port is given away: a listener that nobody accepts from
    /// would keep agents waiting if the other router dies.
    pub(crate) async fn accept_agent(&self, listener: &mut Option<TcpListener>) -> TcpStream {
        loop {
            let mut change = pin!(self.0.port_change.notified());
            change.as_mut().enable();
            let whose = *self.0.agents_port.lock();
            if whose == AgentsPort::GivenAway {
                *listener = None;
            }
            let accepted = async {
                match listener {
                    Some(listener) if whose == AgentsPort::Ours => hostler_boot::accept(listener).await,
                    _ => std::future::pending().await,
                }
            };
            tokio::select! {
                stream = accepted => return stream,
                () = change => {}
            }
        }
    }
}

/// An agent session's view of the port.
#[derive(Debug)]
pub(crate) struct AgentsPortWatch {
    succession: Succession,
    is_ours: bool,
}

impl AgentsPortWatch {
    /// Resolves when another router has got the port, once each time.
    pub(crate) async fn wait_lent(&mut self) {
        let Succession(state) = &self.succession;
        loop {
            let mut change = pin!(state.port_change.notified());
            change.as_mut().enable();
            let is_ours = *state.agents_port.lock() == AgentsPort::Ours;
            if std::mem::replace(&mut self.is_ours, is_ours) && !is_ours {
                return;
            }
            change.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn agents_are_refused_once_the_port_is_handed_over() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (succession, mut listener) = (Succession::default(), Some(listener));
        let _first = TcpStream::connect(address).await.unwrap();
        succession.accept_agent(&mut listener).await;
        succession.lend_agents_port();
        let _second = TcpStream::connect(address).await.unwrap();
        assert!(timeout(Duration::from_millis(50), succession.accept_agent(&mut listener)).await.is_err());
        succession.take_agents_port();
        succession.accept_agent(&mut listener).await;
        succession.give_place();
        assert!(timeout(Duration::from_millis(50), succession.accept_agent(&mut listener)).await.is_err());
        assert!(TcpStream::connect(address).await.is_err() && succession.is_replaced());
    }
}
