//! Tokens or requests per second, from counters in successive answers of the router. Pure: the time
//! is an argument.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Time over which the rate is measured. Agents read an engine's counters about as often as they
/// are shown here, so over a single interval the rate would jump between none and twice as much.
const WINDOW: Duration = Duration::from_secs(5);

/// Recent readings of one counter.
#[derive(Debug, Default)]
pub(super) struct CountMeter {
    epoch: u64,
    /// Samples, oldest first.
    samples: VecDeque<(Instant, u64)>,
}

impl CountMeter {
    /// Records a count. A new life of an engine, or another router, counts from zero.
    pub(super) fn record(&mut self, now: Instant, epoch: u64, count: u64) {
        if self.epoch != epoch || self.samples.back().is_some_and(|(_, last)| *last > count) {
            self.samples.clear();
        }
        self.epoch = epoch;
        self.samples.push_back((now, count));
        // Two samples are kept, however far they are apart.
        while self.samples.len() > 2 && self.samples.front().is_some_and(|(at, _)| now.duration_since(*at) > WINDOW) {
            self.samples.pop_front();
        }
    }

    /// Rate per second; `None` until the counter has been seen twice.
    pub(super) fn rate(&self) -> Option<f64> {
        let ((begun, first), (now, last)) = (self.samples.front()?, self.samples.back()?);
        let seconds = now.duration_since(*begun).as_secs_f64();
        #[allow(clippy::cast_precision_loss, reason = "counts of seconds")]
        (seconds > 0.0).then(|| (last - first) as f64 / seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_rate_covers_recent_seconds_of_one_engine_life() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut meter = CountMeter::default();
        meter.record(at(0), 1, 1000);
        assert_eq!(meter.rate(), None);
        meter.record(at(1), 1, 1100);
        assert_eq!(meter.rate(), Some(100.0));
        meter.record(at(6), 1, 1100);
        assert_eq!(meter.rate(), Some(0.0), "the first second is too long ago");
        meter.record(at(7), 2, 50);
        assert_eq!(meter.rate(), None, "the engine counts anew");
        meter.record(at(9), 2, 150);
        assert_eq!(meter.rate(), Some(50.0));
        meter.record(at(60), 2, 150);
        assert_eq!(meter.rate(), Some(0.0), "a router that was silent for long");
    }
}
