//! The requests in flight on one replica, counted exactly, over all routers and for each. The relay enters a request and holds its guard; probes, drain and reports read the counts and are woken when they change.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use tokio::sync::watch;

/// Which router a request came from: a number the uplink gives to each router it knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RouterKey(pub u64);

/// The counts of one replica at one moment.
#[derive(Debug, Default)]
pub struct Counts {
    total: u32,
    served: u64,
    routers: FxHashMap<RouterKey, u32>,
}

impl Counts {
    /// Requests in flight, over all routers.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Requests in flight that came from one router.
    pub fn of(&self, router: RouterKey) -> u32 {
        self.routers.get(&router).copied().unwrap_or(0)
    }

    /// Requests that have ended, however they ended, since the agent started.
    pub fn served_total(&self) -> u64 {
        self.served
    }
}

/// The in-flight requests of one replica. They live in the very channel that announces them, so a reader can never see a count without its wake.
#[derive(Debug)]
pub struct Traffic {
    counts: watch::Sender<Counts>,
}

impl Default for Traffic {
    fn default() -> Self {
        Self { counts: watch::Sender::new(Counts::default()) }
    }
}

impl Traffic {
    /// A replica without requests.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Counts one request of `router` until the returned guard is dropped.
    #[must_use = "the request is counted only while the guard lives"]
    pub fn enter(self: &Arc<Self>, router: RouterKey) -> InFlight {
        self.counts.send_modify(|counts| {
            counts.total += 1;
            *counts.routers.entry(router).or_insert(0) += 1;
        });
        InFlight { traffic: Arc::clone(self), router }
    }

    /// Requests in flight, over all routers.
    pub fn total(&self) -> u32 {
        self.counts.borrow().total()
    }

    /// Requests in flight that came from one router.
    pub fn of(&self, router: RouterKey) -> u32 {
        self.counts.borrow().of(router)
    }

    /// Requests that have ended, however they ended, since the agent started.
    pub fn served_total(&self) -> u64 {
        self.counts.borrow().served_total()
    }

    /// Resolves when no request is in flight. Has no deadline of its own.
    pub async fn idle(&self) {
        self.wait_until(|counts| counts.total == 0).await;
    }

    /// Resolves when a request is in flight. Has no deadline of its own.
    pub async fn busy(&self) {
        self.wait_until(|counts| counts.total > 0).await;
    }

    /// A receiver that wakes whenever a request enters or leaves.
    pub fn changes(&self) -> watch::Receiver<Counts> {
        self.counts.subscribe()
    }

    async fn wait_until(&self, condition: impl FnMut(&Counts) -> bool) {
        self.counts.subscribe().wait_for(condition).await.expect("the sender is borrowed by this very call");
    }

    fn leave(&self, router: RouterKey) {
        self.counts.send_modify(|counts| {
            counts.total -= 1;
            counts.served += 1;
            if let Some(count) = counts.routers.get_mut(&router) {
                *count -= 1;
                // A router that came and went leaves nothing behind.
                if *count == 0 {
                    counts.routers.remove(&router);
                }
            }
        });
    }
}

/// One request in flight; dropping it, for whatever reason, ends the count.
#[derive(Debug)]
pub struct InFlight {
    traffic: Arc<Traffic>,
    router: RouterKey,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.traffic.leave(self.router);
    }
}

#[cfg(test)]
mod tests;
