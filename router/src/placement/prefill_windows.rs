//! Schedules prompts in bursts for busy replicas.
//!
//! An engine step that reads prompts beside its streams takes much longer than a step that only
//! generates, and not much longer for ten prompts than for one. A busy replica that gets prompts in
//! short windows, with pauses between, therefore generates more, at the cost of a later first
//! token. Off unless `router.prefill_interval` is set.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

/// Fewest requests in flight of a busy replica. One with fewer gets prompts at any time: its steps
/// are short anyway, and few streams are slowed.
const BUSY_IN_FLIGHT: u32 = 64;

/// The share of time in which prefill windows are open.
const OPEN_SHARE: f64 = 0.125;

/// Shortest window in seconds. Waiting requests are scanned every ten milliseconds.
const MIN_WINDOW_SECONDS: f64 = 0.02;

/// Longest interval between windows. A longer one would delay first tokens too much.
const MAX_INTERVAL: Duration = Duration::from_secs(5);

/// The times at which busy replicas get prompts.
///
/// The windows follow from the time of day alone, so all routers have the same windows, and all
/// replicas are open at once. A request then goes to the best replica, not to the one whose turn it
/// is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PrefillWindows {
    /// Seconds between the starts of two windows; 0 means always open.
    interval_seconds: f64,
    /// A moment and its time of day in seconds.
    reference: Instant,
    reference_unix_seconds: f64,
}

impl PrefillWindows {
    /// Windows at intervals of `every`; zero means always open.
    #[must_use]
    pub(crate) fn from_now(every: Duration) -> Self {
        Self::new(every, Instant::now(), SystemTime::now())
    }

    /// Windows at intervals of `every`, with `now` at the time of day `time`.
    #[must_use]
    pub(crate) fn new(every: Duration, now: Instant, time: SystemTime) -> Self {
        let time = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { interval_seconds: every.min(MAX_INTERVAL).as_secs_f64(), reference: now, reference_unix_seconds: time.as_secs_f64() }
    }

    /// Whether a replica with so many requests in flight gets prompts now.
    #[must_use]
    pub(crate) fn is_open(&self, in_flight: u32, now: Instant) -> bool {
        if self.interval_seconds == 0.0 || in_flight < BUSY_IN_FLIGHT {
            return true;
        }
        let time = self.reference_unix_seconds + now.saturating_duration_since(self.reference).as_secs_f64();
        let into = (time / self.interval_seconds).fract() * self.interval_seconds;
        into < (self.interval_seconds * OPEN_SHARE).max(MIN_WINDOW_SECONDS)
    }
}

#[cfg(test)]
mod tests;
