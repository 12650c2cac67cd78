//! Requests in flight on one replica, and the tokens of their prompts, counted exactly, over all
//! routers and for each.
//!
//! The relay enters a request and holds its guard; probes, drain and reports read the counts and
//! are woken when they change. `flow` tells the watchdog whether answers move, and `crash_suspects`
//! which requests were there when an engine died.

mod crash_suspects;
mod flow;
mod gaps;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use rustc_hash::FxHashMap;
use tokio::sync::watch;
use tokio::time::Instant;

use self::crash_suspects::{RequestEnd, SuspectTracker};
pub(crate) use self::flow::{EngineWait, ResponseFlow};
use crate::crashes::RequestFingerprint;

/// Router that a request came from: a number the uplink gives to each router it knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RouterKey(pub u64);

/// Estimate of a router about one request's prompt. The engine may find more or less of it cached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PromptEstimate {
    pub tokens: u32,
    /// Tokens of these that must be computed.
    pub uncached: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InFlightTotals {
    pub requests: u32,
    pub pending_tokens: u64,
    pub context_tokens: u64,
}

impl InFlightTotals {
    fn enter(&mut self, prompt: PromptEstimate) {
        self.requests += 1;
        self.pending_tokens += u64::from(prompt.uncached);
        self.context_tokens += u64::from(prompt.tokens);
    }

    fn finish_prefill(&mut self, prompt: PromptEstimate) {
        self.pending_tokens -= u64::from(prompt.uncached);
    }

    fn leave(&mut self, prompt: PromptEstimate) {
        self.requests -= 1;
        self.context_tokens -= u64::from(prompt.tokens);
    }
}

#[derive(Debug, Default)]
pub struct InFlightCounts {
    total: InFlightTotals,
    served: u64,
    routers: FxHashMap<RouterKey, InFlightTotals>,
}

impl InFlightCounts {
    pub fn totals(&self) -> InFlightTotals {
        self.total
    }

    pub fn totals_of(&self, router: RouterKey) -> InFlightTotals {
        self.routers.get(&router).copied().unwrap_or_default()
    }

    pub fn in_flight(&self) -> u32 {
        self.total.requests
    }

    pub fn in_flight_from(&self, router: RouterKey) -> u32 {
        self.totals_of(router).requests
    }

    /// Requests that have ended, in any way, since the agent started.
    pub fn served_total(&self) -> u64 {
        self.served
    }
}

/// In-flight requests of one replica.
///
/// They live in the very channel that announces them, so a reader can never see a count without its
/// wake.
#[derive(Debug)]
pub struct Traffic {
    counts: watch::Sender<InFlightCounts>,
    flow: ResponseFlow,
    suspects: SuspectTracker,
    guided: AtomicU32,
}

impl Default for Traffic {
    fn default() -> Self {
        Self {
            counts: watch::Sender::new(InFlightCounts::default()),
            flow: ResponseFlow::default(),
            suspects: SuspectTracker::default(),
            guided: AtomicU32::new(0),
        }
    }
}

impl Traffic {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Counts one request of `router` with an unknown prompt, until the returned guard is dropped.
    #[must_use = "the request is counted only while the guard lives"]
    pub fn enter(self: &Arc<Self>, router: RouterKey) -> InFlight {
        self.enter_with(router, PromptEstimate::default())
    }

    /// Counts one request of `router` and its prompt, until the returned guard is dropped.
    #[must_use = "the request is counted only while the guard lives"]
    pub fn enter_with(self: &Arc<Self>, router: RouterKey, prompt: PromptEstimate) -> InFlight {
        self.counts.send_modify(|counts| {
            counts.total.enter(prompt);
            counts.routers.entry(router).or_default().enter(prompt);
        });
        InFlight {
            traffic: Arc::clone(self),
            router,
            prompt,
            pending: AtomicBool::new(true),
            suspect_id: AtomicU64::new(0),
            has_failed: AtomicBool::new(false),
        }
    }

    /// Counts a request whose answer follows a schema or grammar, until the returned guard is
    /// dropped.
    #[must_use = "the request is counted only while the guard lives"]
    pub fn enter_guided(self: &Arc<Self>) -> GuidedInFlight {
        self.guided.fetch_add(1, Ordering::Relaxed);
        GuidedInFlight { traffic: Arc::clone(self) }
    }

    /// Requests in flight whose answer follows a schema or grammar.
    ///
    /// A change wakes nobody, because the advisor reads the count once a second.
    pub fn guided_in_flight(&self) -> u32 {
        self.guided.load(Ordering::Relaxed)
    }

    pub fn in_flight(&self) -> u32 {
        self.counts.borrow().in_flight()
    }

    pub fn in_flight_from(&self, router: RouterKey) -> u32 {
        self.counts.borrow().in_flight_from(router)
    }

    /// Requests that have ended, in any way, since the agent started.
    pub fn served_total(&self) -> u64 {
        self.counts.borrow().served_total()
    }

    /// Resolves when no request is in flight. Has no deadline of its own.
    pub async fn wait_idle(&self) {
        self.wait_until(|counts| counts.in_flight() == 0).await;
    }

    /// Resolves when a request is in flight. Has no deadline of its own.
    pub async fn wait_busy(&self) {
        self.wait_until(|counts| counts.in_flight() > 0).await;
    }

    pub fn subscribe(&self) -> watch::Receiver<InFlightCounts> {
        self.counts.subscribe()
    }

    pub fn flow(&self) -> &ResponseFlow {
        &self.flow
    }

    /// Requests that this life of the engine had when it ended.
    ///
    /// These are the requests in flight now, and those of the last ten seconds whose answer the
    /// engine broke off or that were given up unanswered because it hung.
    pub fn crash_suspects(&self, epoch: u64) -> Vec<RequestFingerprint> {
        self.suspects.crash_suspects(epoch)
    }

    /// When requests of this life of the engine began to fail, if any has failed recently.
    pub fn failing_since(&self, epoch: u64) -> Option<Instant> {
        self.suspects.failing_since(epoch)
    }

    async fn wait_until(&self, condition: impl FnMut(&InFlightCounts) -> bool) {
        self.counts.subscribe().wait_for(condition).await.expect("the sender is borrowed by this very call");
    }

    fn finish_prefill(&self, router: RouterKey, prompt: PromptEstimate) {
        self.counts.send_modify(|counts| {
            counts.total.finish_prefill(prompt);
            if let Some(sum) = counts.routers.get_mut(&router) {
                sum.finish_prefill(prompt);
            }
        });
    }

    fn leave(&self, router: RouterKey, prompt: PromptEstimate) {
        self.counts.send_modify(|counts| {
            counts.total.leave(prompt);
            counts.served += 1;
            if let Some(sum) = counts.routers.get_mut(&router) {
                sum.leave(prompt);
                // A router that came and went leaves nothing behind.
                if sum.requests == 0 {
                    counts.routers.remove(&router);
                }
            }
        });
    }
}

#[derive(Debug)]
pub struct GuidedInFlight {
    traffic: Arc<Traffic>,
}

impl Drop for GuidedInFlight {
    fn drop(&mut self) {
        self.traffic.guided.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One request in flight; dropping it, for whatever reason, ends the count.
#[derive(Debug)]
pub struct InFlight {
    traffic: Arc<Traffic>,
    router: RouterKey,
    prompt: PromptEstimate,
    /// The prompt is not computed yet.
    pending: AtomicBool,
    /// Number among the crash suspects; zero if the request is none.
    suspect_id: AtomicU64,
    /// The answer broke off.
    has_failed: AtomicBool,
}

impl InFlight {
    /// Marks the request as received whole by the engine of this life, under this fingerprint.
    ///
    /// Before that the request cannot cause a crash.
    pub fn mark_sent(&self, epoch: u64, fingerprint: RequestFingerprint) {
        self.suspect_id.store(self.traffic.suspects.track(epoch, fingerprint), Ordering::Relaxed);
    }

    /// Marks the request as failed: the engine broke its answer off, or answered with an error as a
    /// dying engine does.
    pub fn mark_failed(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
    }

    /// Tracks the wait for the engine, which has not begun yet.
    pub fn track_wait(&self) -> EngineWait<'_> {
        EngineWait::new(&self.traffic.flow)
    }

    /// Marks the prompt as computed, as far as anyone can tell. Only the first call counts.
    pub fn mark_prefilled(&self) {
        // This runs at each event of an answer, and a load is cheaper than a swap.
        if self.pending.load(Ordering::Relaxed) && self.pending.swap(false, Ordering::Relaxed) {
            self.traffic.finish_prefill(self.router, self.prompt);
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let number = self.suspect_id.load(Ordering::Relaxed);
        if number > 0 {
            let end = match (self.has_failed.load(Ordering::Relaxed), self.pending.load(Ordering::Relaxed)) {
                (true, _) => RequestEnd::Failed,
                (false, true) => RequestEnd::Abandoned,
                (false, false) => RequestEnd::Answered,
            };
            self.traffic.suspects.untrack(number, end);
        }
        self.mark_prefilled();
        self.traffic.leave(self.router, self.prompt);
    }
}

#[cfg(test)]
mod tests;
