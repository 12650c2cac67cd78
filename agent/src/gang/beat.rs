//! Beats, by which the agents of a replica hear that the others live.

use std::time::Duration;

use tokio::time::{Instant, Interval, MissedTickBehavior, interval};

/// How often each end of a connection says something.
const INTERVAL: Duration = Duration::from_secs(1);

/// A beat this late shows that this program did not run meanwhile.
const PAUSED_AFTER: Duration = Duration::from_secs(2);

/// Source of beats.
pub(crate) struct Beats {
    ticks: Interval,
    last: Instant,
}

impl Beats {
    pub(crate) fn new() -> Self {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { ticks, last: Instant::now() }
    }

    /// Waits for the next beat. Returns for how long this program, or its clock, did not run
    /// before.
    ///
    /// Cancel safe.
    pub(crate) async fn next(&mut self) -> Duration {
        self.ticks.tick().await;
        let now = Instant::now();
        let late = now.saturating_duration_since(self.last).saturating_sub(INTERVAL);
        self.last = now;
        if late > PAUSED_AFTER { late } else { Duration::ZERO }
    }
}
