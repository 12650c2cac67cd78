//! Which requests one replica's engine has, by their content, with those that it broke off a moment ago: what an engine's death is put down to.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::time::Instant;

use crate::deaths::Fingerprint;

/// How long a request that ended badly counts as having been there. vLLM's front-end ends its streams when its core is gone, and exits 2 to 5 s later.
const AFTERMATH: Duration = Duration::from_secs(10);

/// The most requests that are remembered after they ended badly.
const MOST_BROKEN: usize = 4096;

/// A request, and the life of the engine that got it.
#[derive(Debug, Clone, Copy)]
struct Sent {
    epoch: u64,
    fingerprint: Fingerprint,
}

/// The requests of one replica that have names.
#[derive(Debug, Default)]
pub(super) struct Named(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    next: u64,
    open: FxHashMap<u64, Sent>,
    /// Oldest first.
    broken: VecDeque<(Instant, Sent)>,
}

impl Named {
    /// The engine of this life has got the request. The number, which is never zero, is for `close`.
    pub(super) fn open(&self, epoch: u64, fingerprint: Fingerprint) -> u64 {
        let mut state = self.0.lock();
        state.next += 1;
        let number = state.next;
        state.open.insert(number, Sent { epoch, fingerprint });
        number
    }

    /// The request has ended, well or badly.
    pub(super) fn close(&self, number: u64, badly: bool) {
        let mut state = self.0.lock();
        let Some(sent) = state.open.remove(&number) else { return };
        if !badly {
            return;
        }
        let now = Instant::now();
        while state.broken.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > AFTERMATH) {
            state.broken.pop_front();
        }
        if state.broken.len() == MOST_BROKEN {
            state.broken.pop_front();
        }
        state.broken.push_back((now, sent));
    }

    /// What this life of the engine had when it ended, just now: each request once.
    pub(super) fn casualties(&self, epoch: u64) -> Vec<Fingerprint> {
        let now = Instant::now();
        let state = self.0.lock();
        let fresh = state.broken.iter().filter(|(at, _)| now.saturating_duration_since(*at) <= AFTERMATH).map(|(_, sent)| sent);
        let mut found: Vec<Fingerprint> =
            state.open.values().chain(fresh).filter(|sent| sent.epoch == epoch).map(|sent| sent.fingerprint).collect();
        found.sort_unstable();
        found.dedup();
        found
    }
}

#[cfg(test)]
mod tests;
