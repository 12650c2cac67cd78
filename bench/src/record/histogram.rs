//! Histogram of times in a fixed number of buckets: 32 for each power of two of microseconds, so a
//! quantile is at most 3 % too long.
//!
//! The `record` has one for each kind of time, whatever the number of requests.

use std::time::Duration;

use crate::figures::Quantiles;

/// Buckets for each power of two.
const STEPS: u64 = 32;
/// Number of buckets, enough for any `u64` of microseconds.
const BUCKETS: usize = 60 * 32;

/// Counts of times, which take memory only with the first one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Histogram {
    counts: Vec<u64>,
    count: u64,
    micros: u64,
    longest: u64,
}

impl Histogram {
    pub(crate) fn add(&mut self, time: Duration) {
        self.add_micros(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    pub(crate) fn add_micros(&mut self, micros: u64) {
        if self.counts.is_empty() {
            self.counts = vec![0; BUCKETS];
        }
        self.counts[usize::from(bucket(micros))] += 1;
        self.count += 1;
        self.micros = self.micros.saturating_add(micros);
        self.longest = self.longest.max(micros);
    }

    /// Adds all counts of another histogram.
    pub(crate) fn merge(&mut self, other: &Self) {
        if self.counts.len() < other.counts.len() {
            self.counts.resize(other.counts.len(), 0);
        }
        for (ours, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *ours += theirs;
        }
        self.count += other.count;
        self.micros = self.micros.saturating_add(other.micros);
        self.longest = self.longest.max(other.longest);
    }

    #[expect(clippy::cast_precision_loss, reason = "counts and microseconds stay far below 2^52")]
    pub(crate) fn quantiles(&self) -> Quantiles {
        if self.count == 0 {
            return Quantiles::default();
        }
        Quantiles {
            count: self.count,
            mean: self.micros as f64 / self.count as f64 / 1000.0,
            p50: self.quantile(0.5),
            p90: self.quantile(0.9),
            p99: self.quantile(0.99),
            max: self.longest as f64 / 1000.0,
        }
    }

    /// Time that a part of all times (0 to 1) does not exceed, in milliseconds.
    #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^52")]
    pub(crate) fn quantile(&self, part: f64) -> f64 {
        let target = part * self.count as f64;
        let mut seen = 0;
        for (bucket, count) in (0..).zip(&self.counts) {
            seen += count;
            if *count > 0 && seen as f64 >= target {
                return upper_bound(bucket).min(self.longest) as f64 / 1000.0;
            }
        }
        0.0
    }
}

pub(super) fn bucket(micros: u64) -> u16 {
    let index = if micros < STEPS {
        micros
    } else {
        let power = u64::from(micros.ilog2()) - u64::from(STEPS.ilog2());
        (power + 1) * STEPS + ((micros >> power) - STEPS)
    };
    u16::try_from(index).expect("there are fewer than 2000 buckets")
}

/// Longest time in a bucket, in microseconds.
pub(super) fn upper_bound(bucket: u16) -> u64 {
    let index = u64::from(bucket);
    if index < STEPS {
        index
    } else {
        let power = index / STEPS - 1;
        // The end of the last bucket would overflow.
        ((u128::from(index % STEPS + STEPS + 1) << power) - 1).try_into().unwrap_or(u64::MAX)
    }
}
