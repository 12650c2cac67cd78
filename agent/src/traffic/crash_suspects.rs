//! Suspects of a crash: the requests that one replica's engine has, by their content, with those
//! that it broke off a moment ago.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::time::Instant;

use crate::crashes::RequestFingerprint;

/// How long a failed request still counts as in flight at a crash. vLLM's front-end ends its
/// streams when its core is gone, and exits 2 to 5 s later.
const FAILED_RETENTION: Duration = Duration::from_secs(10);

/// Most requests that are remembered after they ended badly.
const MAX_FAILED: usize = 4096;

/// How a request of the engine has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestEnd {
    Answered,
    /// The client left before there was an answer.
    Abandoned,
    /// The answer broke off, or was an error as from a dying engine.
    Failed,
}

/// A request, and the life of the engine that got it.
#[derive(Debug, Clone, Copy)]
struct TrackedRequest {
    epoch: u64,
    fingerprint: RequestFingerprint,
}

/// Fingerprinted requests of one replica.
#[derive(Debug, Default)]
pub(super) struct SuspectTracker(Mutex<SuspectState>);

#[derive(Debug, Default)]
struct SuspectState {
    next: u64,
    open: FxHashMap<u64, TrackedRequest>,
    /// Failed requests, oldest first.
    recently_failed: VecDeque<(Instant, RequestEnd, TrackedRequest)>,
}

impl SuspectTracker {
    /// Adds a request that the engine of this life has received.
    ///
    /// The returned number, never zero, is for `untrack`.
    pub(super) fn track(&self, epoch: u64, fingerprint: RequestFingerprint) -> u64 {
        let mut state = self.0.lock();
        state.next += 1;
        let number = state.next;
        state.open.insert(number, TrackedRequest { epoch, fingerprint });
        number
    }

    /// Removes a request that has ended.
    pub(super) fn untrack(&self, number: u64, end: RequestEnd) {
        let mut state = self.0.lock();
        let Some(sent) = state.open.remove(&number) else { return };
        if end == RequestEnd::Answered {
            return;
        }
        let now = Instant::now();
        while state.recently_failed.front().is_some_and(|(at, ..)| now.saturating_duration_since(*at) > FAILED_RETENTION) {
            state.recently_failed.pop_front();
        }
        if state.recently_failed.len() == MAX_FAILED {
            state.recently_failed.pop_front();
        }
        state.recently_failed.push_back((now, end, sent));
    }

    /// Requests of this life of the engine, which has just ended; each once.
    pub(super) fn crash_suspects(&self, epoch: u64) -> Vec<RequestFingerprint> {
        let now = Instant::now();
        let state = self.0.lock();
        let fresh =
            state.recently_failed.iter().filter(|(at, ..)| now.saturating_duration_since(*at) <= FAILED_RETENTION).map(|(.., sent)| sent);
        let mut found: Vec<RequestFingerprint> =
            state.open.values().chain(fresh).filter(|sent| sent.epoch == epoch).map(|sent| sent.fingerprint).collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    /// Time of the first recent failure among the requests of this life.
    pub(super) fn failing_since(&self, epoch: u64) -> Option<Instant> {
        let now = Instant::now();
        let state = self.0.lock();
        let is_fresh = |at: &Instant| now.saturating_duration_since(*at) <= FAILED_RETENTION;
        let mut failed = state.recently_failed.iter().filter(|(_, end, sent)| *end == RequestEnd::Failed && sent.epoch == epoch);
        failed.find(|(at, ..)| is_fresh(at)).map(|(at, ..)| *at)
    }
}

#[cfg(test)]
mod tests;
