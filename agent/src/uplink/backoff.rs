//! Pauses of an agent before it dials a router again.

use std::time::Duration;

/// First pause; each next one is twice as long.
const MIN_DELAY: Duration = Duration::from_millis(100);

/// Longest pause. A router that comes back is served again within about this time.
pub(super) const MAX_DELAY: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct Backoff {
    next: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { next: MIN_DELAY }
    }
}

impl Backoff {
    /// Pause after another failed attempt to reach a router.
    pub fn next_delay(&mut self) -> Duration {
        self.next_delay_up_to(MAX_DELAY)
    }

    /// Pause after another attempt; the next one is no longer than `longest`.
    ///
    /// The pause is random between half and all of the due time, so that the agents of a fleet do
    /// not come back in step.
    pub(super) fn next_delay_up_to(&mut self, longest: Duration) -> Duration {
        let pause = self.next.mul_f64(0.5 + 0.5 * fastrand::f64());
        self.next = (self.next * 2).min(longest);
        pause
    }
}
