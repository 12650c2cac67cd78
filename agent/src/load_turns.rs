//! Turns to read a model from a file system that hosts share: fifty jobs that start at once would
//! share its speed, and all be late.
//!
//! A router with `router.max_loads` grants them, in its own order. Uplink sessions carry the wish
//! there and the word back. Whoever has no router that limits, or gets no word, goes on.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::{Mutex, watch};
use tokio::time::{Instant, sleep, sleep_until};

/// How long a router may be absent, or silent, before the read begins without its word.
const WORD_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest wait for a turn of a router that goes on to answer.
const MAX_WAIT: Duration = Duration::from_secs(2 * 3600);

/// How often a wait shows that it goes on.
const SIGN_INTERVAL: Duration = Duration::from_secs(5);

/// What a router has said about this node's wish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RouterWord {
    /// It limits nothing.
    Unlimited,
    Silent,
    /// So many nodes come first.
    Queued(u32),
    Granted,
}

/// What this node wants of its routers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LoadWish {
    pub(crate) file_system: Arc<str>,
    /// It reads now.
    pub(crate) holds: bool,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct TurnState {
    wish: Option<LoadWish>,
    /// By the router's life. All nodes of a fleet ask the same one of several.
    routers: BTreeMap<u64, RouterWord>,
}

/// The turns of one agent, whose engines read one model.
#[derive(Debug, Default)]
pub(crate) struct LoadTurns {
    state: watch::Sender<TurnState>,
    /// The turn that engines of this agent share. Locked while one is waited for.
    held: Mutex<Weak<TurnGuard>>,
}

/// Permission to read, given back when the last clone is dropped.
pub(crate) type Turn = Arc<TurnGuard>;

#[derive(Debug)]
pub(crate) struct TurnGuard(watch::Sender<TurnState>);

impl Drop for TurnGuard {
    fn drop(&mut self) {
        self.0.send_modify(|state| {
            state.wish = None;
            // A word belongs to the wish that it answers.
            let limiting = state.routers.values_mut().filter(|word| **word != RouterWord::Unlimited);
            limiting.for_each(|word| *word = RouterWord::Silent);
        });
    }
}

/// A session's end of the turns; its router counts until this is dropped.
#[derive(Debug)]
pub(crate) struct TurnLink {
    state: watch::Sender<TurnState>,
    changes: watch::Receiver<TurnState>,
    router: u64,
    sent: Option<LoadWish>,
}

impl TurnState {
    /// The router that decides, and its word.
    fn decider(&self) -> Option<(u64, RouterWord)> {
        let mut limiting = self.routers.iter().filter(|(_, word)| **word != RouterWord::Unlimited);
        limiting.next().or_else(|| self.routers.iter().next()).map(|(router, word)| (*router, *word))
    }

    /// What a router is to know. While a node waits, only the one that decides counts it.
    fn wish_for(&self, router: u64) -> Option<LoadWish> {
        let is_asked = self.routers.get(&router).is_some_and(|word| *word != RouterWord::Unlimited);
        self.wish.clone().filter(|wish| is_asked && (wish.holds || self.decider().is_some_and(|(decider, _)| decider == router)))
    }
}

impl LoadTurns {
    /// Waits for a turn to read from this file system; `None` to read without one.
    pub(crate) async fn acquire(&self, file_system: &str) -> Option<Turn> {
        self.acquire_while(file_system, || {}).await
    }

    /// Like `acquire`, and says now and then that the wait goes on.
    pub(crate) async fn acquire_while(&self, file_system: &str, sign: impl Fn()) -> Option<Turn> {
        let mut held = self.held.lock().await;
        if let Some(turn) = held.upgrade() {
            return Some(turn);
        }
        let mut changes = self.state.subscribe();
        let guard = Arc::new(TurnGuard(self.state.clone()));
        self.state.send_modify(|state| state.wish = Some(LoadWish { file_system: file_system.into(), holds: false }));
        let began = Instant::now();
        let mut silent_since = began;
        loop {
            let word = changes.borrow_and_update().decider().map(|(_, word)| word);
            match word {
                Some(RouterWord::Unlimited) => return None,
                Some(RouterWord::Granted) => break,
                Some(RouterWord::Queued(_)) if began.elapsed() < MAX_WAIT => silent_since = Instant::now(),
                Some(RouterWord::Silent) | None if silent_since.elapsed() < WORD_TIMEOUT => {}
                word => {
                    let reason = match word {
                        Some(RouterWord::Queued(_)) => "the turn did not come within two hours",
                        Some(_) => "the router said nothing",
                        None => "no router has this agent",
                    };
                    tracing::warn!(event = "load_without_turn", file_system, reason, "the model is read without a turn");
                    return None;
                }
            }
            tokio::select! {
                // The sender is this agent's own.
                _ = changes.changed() => {}
                () = sleep_until(silent_since + WORD_TIMEOUT), if matches!(word, Some(RouterWord::Silent) | None) => {}
                () = sleep(SIGN_INTERVAL) => sign(),
            }
        }
        self.state.send_modify(|state| state.wish.iter_mut().for_each(|wish| wish.holds = true));
        let waited = began.elapsed().as_secs();
        tracing::info!(event = "load_turn", file_system, waited, "this node's turn to read the model");
        *held = Arc::downgrade(&guard);
        Some(guard)
    }

    /// What is waited for, in words.
    pub(crate) fn waits_for(&self) -> Option<String> {
        let state = self.state.borrow();
        let wish = state.wish.as_ref().filter(|wish| !wish.holds)?;
        let before = match state.decider() {
            Some((_, RouterWord::Queued(1))) => " (1 node is before it)".to_owned(),
            Some((_, RouterWord::Queued(nodes))) if nodes > 0 => format!(" ({nodes} nodes are before it)"),
            _ => String::new(),
        };
        Some(format!("waits for its turn to read {}{before}", wish.file_system))
    }

    /// Adds a router that has this agent. `max_loads` is its limit; 0 is none.
    pub(crate) fn attach(&self, router: u64, max_loads: u32) -> TurnLink {
        let word = if max_loads == 0 { RouterWord::Unlimited } else { RouterWord::Silent };
        set_word(&self.state, router, Some(word));
        TurnLink { state: self.state.clone(), changes: self.state.subscribe(), router, sent: None }
    }
}

impl TurnLink {
    /// The next wish that the router is to know; `None` inside takes the last one back.
    pub(crate) async fn next_wish(&mut self) -> Option<LoadWish> {
        loop {
            let wish = self.changes.borrow_and_update().wish_for(self.router);
            if wish != self.sent {
                self.sent.clone_from(&wish);
                return wish;
            }
            if self.changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Takes the router's word. One about another file system is late.
    pub(crate) fn hear(&self, file_system: &str, word: RouterWord) {
        let is_meant = self.sent.as_ref().is_some_and(|wish| *wish.file_system == *file_system);
        if is_meant {
            set_word(&self.state, self.router, Some(word));
        }
    }
}

impl Drop for TurnLink {
    fn drop(&mut self) {
        set_word(&self.state, self.router, None);
    }
}

/// Notes a router's word, or that the router is gone.
fn set_word(state: &watch::Sender<TurnState>, router: u64, word: Option<RouterWord>) {
    state.send_modify(|state| match word {
        Some(word) => _ = state.routers.insert(router, word),
        None => _ = state.routers.remove(&router),
    });
}

#[cfg(test)]
mod tests;
