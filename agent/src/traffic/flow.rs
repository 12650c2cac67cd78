//! Flow of answers: how many requests wait on the engine right now, when any of them last got data,
//! and how long streams pause.
//!
//! Relays write it once an event, without a lock; the watchdog reads it.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use futures_util::poll;
use tokio::time::Instant;

use super::gaps::GapHistogram;

/// Answers of one replica's engine, over all its lives.
#[derive(Debug)]
pub struct ResponseFlow {
    origin: Instant,
    waiting: AtomicU32,
    /// Microseconds since `origin`.
    last_progress: AtomicU64,
    gaps: GapHistogram,
}

impl Default for ResponseFlow {
    fn default() -> Self {
        Self { origin: Instant::now(), waiting: AtomicU32::new(0), last_progress: AtomicU64::new(0), gaps: GapHistogram::default() }
    }
}

impl ResponseFlow {
    /// Number of requests that wait for the engine.
    ///
    /// Requests whose body is still on its way, or whose client does not read the available data,
    /// do not count.
    pub fn waiting(&self) -> u32 {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Number that changes whenever an answer has moved on.
    pub fn last_progress(&self) -> u64 {
        self.last_progress.load(Ordering::Relaxed)
    }

    pub fn gaps(&self) -> &GapHistogram {
        &self.gaps
    }
}

/// Wait of one request for its engine; dropping it, for whatever reason, ends the wait.
#[derive(Debug)]
pub struct EngineWait<'a> {
    flow: &'a ResponseFlow,
    is_waiting: bool,
    /// When the last event came; `None` if the request was held up since.
    last: Option<Instant>,
}

impl<'a> EngineWait<'a> {
    pub(super) fn new(flow: &'a ResponseFlow) -> Self {
        Self { flow, is_waiting: false, last: None }
    }

    /// Begins the wait: the engine has all that it needs.
    pub fn begin(&mut self) {
        if !std::mem::replace(&mut self.is_waiting, true) {
            self.flow.waiting.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn end(&mut self) {
        if std::mem::replace(&mut self.is_waiting, false) {
            self.flow.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Records that the engine sent something.
    pub fn record_progress(&mut self) {
        let now = Instant::now();
        let micros = now.saturating_duration_since(self.flow.origin).as_micros();
        self.flow.last_progress.store(u64::try_from(micros).unwrap_or(u64::MAX), Ordering::Relaxed);
        if let Some(last) = self.last.replace(now) {
            self.flow.gaps.record(now.saturating_duration_since(last));
        }
    }

    /// Pauses the wait while `passing` hands something on.
    ///
    /// While the receiver does not take it, the request does not wait for the engine, and the pause
    /// does not count as the engine's.
    pub async fn pause_during<F: Future>(&mut self, passing: F) -> F::Output {
        let mut passing = pin!(passing);
        if let std::task::Poll::Ready(output) = poll!(passing.as_mut()) {
            return output;
        }
        self.end();
        self.last = None;
        let output = passing.await;
        self.begin();
        output
    }
}

impl Drop for EngineWait<'_> {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests;
