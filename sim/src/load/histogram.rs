//! A histogram of times with a fixed size: 32 buckets for each power of two of
//! microseconds, so a quantile is at most 3 % off.

use std::time::Duration;

/// Buckets for each power of two.
const STEPS: u64 = 32;
/// Enough for any `u64` of microseconds.
const BUCKETS: usize = 60 * 32;

/// Counts of times.
#[derive(Clone, Debug)]
pub(super) struct Histogram {
    counts: Vec<u64>,
    total: u64,
    longest: Duration,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS], total: 0, longest: Duration::ZERO }
    }
}

impl Histogram {
    /// Counts `times` times of the same length.
    pub(super) fn add(&mut self, time: Duration, times: u64) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.counts[bucket(micros)] += times;
        self.total += times;
        self.longest = self.longest.max(time);
    }

    /// The time that a part of all times (0 to 1) does not exceed, in milliseconds.
    pub(super) fn quantile(&self, part: f64) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^52")]
        let wanted = part * self.total as f64;
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += count;
            #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^52")]
            if *count > 0 && seen as f64 >= wanted {
                return (upper_bound(index) as f64 / 1000.0).min(self.longest());
            }
        }
        0.0
    }

    /// The longest time, in milliseconds.
    pub(super) fn longest(&self) -> f64 {
        self.longest.as_secs_f64() * 1000.0
    }
}

fn bucket(micros: u64) -> usize {
    let index = if micros < STEPS {
        micros
    } else {
        let power = u64::from(micros.ilog2()) - u64::from(STEPS.ilog2());
        (power + 1) * STEPS + ((micros >> power) - STEPS)
    };
    usize::try_from(index).expect("there are fewer than 2000 buckets")
}

/// The longest time in a bucket, in microseconds.
fn upper_bound(index: usize) -> u64 {
    let index = index as u64;
    if index < STEPS {
        index
    } else {
        let power = index / STEPS - 1;
        ((index % STEPS + STEPS + 1) << power) - 1
    }
}
