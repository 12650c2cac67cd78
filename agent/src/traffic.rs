//! The requests in flight on one replica, and the tokens of their prompts, counted exactly, over all routers and for each. The relay enters a request and holds its guard; probes, drain and reports read the counts and are woken when they change. `flow` tells the watchdog whether their answers move, `named` which of them were there when an engine died.

mod flow;
mod gaps;
mod named;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use rustc_hash::FxHashMap;
use tokio::sync::watch;

pub use self::flow::{Flow, Wait};
pub use self::gaps::Gaps;
use self::named::Named;
use crate::deaths::Fingerprint;

/// Which router a request came from: a number the uplink gives to each router it knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RouterKey(pub u64);

/// What a router estimated of one request's prompt. The engine may find more or less of it cached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Prompt {
    /// Its tokens.
    pub tokens: u32,
    /// Those among them that have to be computed.
    pub uncached: u32,
}

/// Requests in flight, and the tokens of their prompts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sum {
    /// Requests.
    pub requests: u32,
    /// Prompt tokens that are still to be computed.
    pub pending_tokens: u64,
    /// All prompt tokens.
    pub context_tokens: u64,
}

impl Sum {
    fn enter(&mut self, prompt: Prompt) {
        self.requests += 1;
        self.pending_tokens += u64::from(prompt.uncached);
        self.context_tokens += u64::from(prompt.tokens);
    }

    fn computed(&mut self, prompt: Prompt) {
        self.pending_tokens -= u64::from(prompt.uncached);
    }

    fn leave(&mut self, prompt: Prompt) {
        self.requests -= 1;
        self.context_tokens -= u64::from(prompt.tokens);
    }
}

/// The counts of one replica at one moment.
#[derive(Debug, Default)]
pub struct Counts {
    all: Sum,
    served: u64,
    routers: FxHashMap<RouterKey, Sum>,
}

impl Counts {
    /// What is in flight, over all routers.
    pub fn sum(&self) -> Sum {
        self.all
    }

    /// What is in flight and came from one router.
    pub fn sum_of(&self, router: RouterKey) -> Sum {
        self.routers.get(&router).copied().unwrap_or_default()
    }

    /// Requests in flight, over all routers.
    pub fn total(&self) -> u32 {
        self.all.requests
    }

    /// Requests in flight that came from one router.
    pub fn of(&self, router: RouterKey) -> u32 {
        self.sum_of(router).requests
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
    flow: Flow,
    named: Named,
    guided: AtomicU32,
}

impl Default for Traffic {
    fn default() -> Self {
        Self { counts: watch::Sender::new(Counts::default()), flow: Flow::default(), named: Named::default(), guided: AtomicU32::new(0) }
    }
}

impl Traffic {
    /// A replica without requests.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Counts one request of `router`, of whose prompt nothing is known, until the returned guard is dropped.
    #[must_use = "the request is counted only while the guard lives"]
    pub fn enter(self: &Arc<Self>, router: RouterKey) -> InFlight {
        self.enter_with(router, Prompt::default())
    }

    /// Counts one request of `router` and its prompt until the returned guard is dropped.
    #[must_use = "the request is counted only while the guard lives"]
    pub fn enter_with(self: &Arc<Self>, router: RouterKey, prompt: Prompt) -> InFlight {
        self.counts.send_modify(|counts| {
            counts.all.enter(prompt);
            counts.routers.entry(router).or_default().enter(prompt);
        });
        InFlight {
            traffic: Arc::clone(self),
            router,
            prompt,
            pending: AtomicBool::new(true),
            named: AtomicU64::new(0),
            broke: AtomicBool::new(false),
        }
    }

    /// Counts a request whose answer follows a schema or grammar until the returned guard is dropped.
    #[must_use = "the request is counted only while the guard lives"]
    pub fn enter_guided(self: &Arc<Self>) -> Guided {
        self.guided.fetch_add(1, Ordering::Relaxed);
        Guided { traffic: Arc::clone(self) }
    }

    /// Requests in flight whose answer follows a schema or grammar. Nobody is woken for it: the advisor looks once a second.
    pub fn guided(&self) -> u32 {
        self.guided.load(Ordering::Relaxed)
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
        self.wait_until(|counts| counts.total() == 0).await;
    }

    /// Resolves when a request is in flight. Has no deadline of its own.
    pub async fn busy(&self) {
        self.wait_until(|counts| counts.total() > 0).await;
    }

    /// A receiver that wakes whenever a request enters or leaves.
    pub fn changes(&self) -> watch::Receiver<Counts> {
        self.counts.subscribe()
    }

    /// Whether the engine's answers move.
    pub fn flow(&self) -> &Flow {
        &self.flow
    }

    /// The requests that this life of the engine had when it ended: those in flight now, those whose answer it broke off within the last ten seconds,
    /// and those that were given up unanswered within them, because the engine hung.
    pub fn casualties(&self, epoch: u64) -> Vec<Fingerprint> {
        self.named.casualties(epoch)
    }

    async fn wait_until(&self, condition: impl FnMut(&Counts) -> bool) {
        self.counts.subscribe().wait_for(condition).await.expect("the sender is borrowed by this very call");
    }

    fn computed(&self, router: RouterKey, prompt: Prompt) {
        self.counts.send_modify(|counts| {
            counts.all.computed(prompt);
            if let Some(sum) = counts.routers.get_mut(&router) {
                sum.computed(prompt);
            }
        });
    }

    fn leave(&self, router: RouterKey, prompt: Prompt) {
        self.counts.send_modify(|counts| {
            counts.all.leave(prompt);
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

/// One request in flight whose answer follows a schema or grammar.
#[derive(Debug)]
pub struct Guided {
    traffic: Arc<Traffic>,
}

impl Drop for Guided {
    fn drop(&mut self) {
        self.traffic.guided.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One request in flight; dropping it, for whatever reason, ends the count.
#[derive(Debug)]
pub struct InFlight {
    traffic: Arc<Traffic>,
    router: RouterKey,
    prompt: Prompt,
    /// Its prompt is still to be computed.
    pending: AtomicBool,
    /// Its number among the named, zero where it is not.
    named: AtomicU64,
    /// Its answer broke off.
    broke: AtomicBool,
}

impl InFlight {
    /// The engine of this life has got all of the request, which has this name. Before that it can be no death's cause.
    pub fn sent(&self, epoch: u64, fingerprint: Fingerprint) {
        self.named.store(self.traffic.named.open(epoch, fingerprint), Ordering::Relaxed);
    }

    /// The engine broke its answer off, or failed it as a dying engine does.
    pub fn broke(&self) {
        self.broke.store(true, Ordering::Relaxed);
    }

    /// Its wait for the engine, which has not begun.
    pub fn wait(&self) -> Wait<'_> {
        Wait::new(&self.traffic.flow)
    }

    /// The engine has computed the prompt, as far as anyone can tell. Only the first call counts.
    pub fn computed(&self) {
        // Asked at each event of an answer: a look is cheaper than a swap.
        if self.pending.load(Ordering::Relaxed) && self.pending.swap(false, Ordering::Relaxed) {
            self.traffic.computed(self.router, self.prompt);
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let number = self.named.load(Ordering::Relaxed);
        if number > 0 {
            let unanswered = self.pending.load(Ordering::Relaxed);
            self.traffic.named.close(number, unanswered || self.broke.load(Ordering::Relaxed));
        }
        self.computed();
        self.traffic.leave(self.router, self.prompt);
    }
}

#[cfg(test)]
mod tests;
