//! Prompts in bursts. A step of an engine that reads prompts beside its streams takes much longer than one that only generates, and not much
//! longer for ten prompts than for one. A busy replica that is given prompts in short windows, with pauses between them, therefore generates
//! more, for some more time to a first token. Off unless `router.prefill_interval` is set.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

/// A replica with fewer requests in flight gets prompts at any time: its steps are short anyway,
/// and few streams are slowed.
const BUSY_IN_FLIGHT: u32 = 64;

/// The share of the time in which prefill windows are open.
const OPEN_SHARE: f64 = 0.125;

/// The shortest window in seconds: waiting requests are scanned every ten milliseconds.
const MIN_WINDOW_SECONDS: f64 = 0.02;

/// The longest interval between windows: a longer one would delay first tokens too much.
const MAX_INTERVAL: Duration = Duration::from_secs(5);

/// When busy replicas are given prompts. It follows from the time of day alone, so that all routers
/// have the same windows, and all replicas are open at once: a request then goes to the best
/// replica, not to the one whose turn it is.
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

    /// The same, with `now` at the time of day `time`.
    #[must_use]
    pub(crate) fn new(every: Duration, now: Instant, time: SystemTime) -> Self {
        let time = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { interval_seconds: every.min(MAX_INTERVAL).as_secs_f64(), reference: now, reference_unix_seconds: time.as_secs_f64() }
    }

    /// Whether a replica with so many requests in flight is given prompts now.
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
