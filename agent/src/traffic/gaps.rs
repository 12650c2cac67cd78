//! Pauses of an engine's streams between two events: a histogram that many tasks write at once,
//! without locks, and that forgets over time.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Buckets for each doubling of the time, as a power of two. The bounds are 19 to 25 % apart.
const SUB_BUCKET_BITS: u32 = 2;

/// Number of buckets. Gaps from 2^36 µs on, 19 hours, share the last one.
const BUCKETS: usize = 36 << SUB_BUCKET_BITS;

/// Fewer gaps than this say nothing about the slowest hundredth.
const MIN_SAMPLES: u32 = 100;

/// Number of gaps at which half of each bucket is forgotten: a few seconds of a busy engine, some
/// minutes of a single stream.
const DECAY_THRESHOLD: u32 = 20_000;

#[derive(Debug)]
pub struct GapHistogram {
    buckets: [AtomicU32; BUCKETS],
}

impl Default for GapHistogram {
    fn default() -> Self {
        Self { buckets: [const { AtomicU32::new(0) }; BUCKETS] }
    }
}

impl GapHistogram {
    pub fn record(&self, gap: Duration) {
        self.buckets[bucket_of(gap)].fetch_add(1, Ordering::Relaxed);
    }

    /// The gap that 99 % of all gaps do not exceed, rounded up to a bucket's bound; `None` until
    /// there are enough.
    pub fn p99(&self) -> Option<Duration> {
        let counts: [u32; BUCKETS] = std::array::from_fn(|index| self.buckets[index].load(Ordering::Relaxed));
        let total: u32 = counts.iter().sum();
        if total < MIN_SAMPLES {
            return None;
        }
        let longest_hundredth = total / 100;
        let mut above = 0;
        let index = counts.iter().rposition(|count| {
            above += count;
            above > longest_hundredth
        });
        index.map(bucket_end)
    }

    /// Halves the counts when there are many. Call this now and then.
    pub fn decay(&self) {
        let total: u32 = self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).sum();
        if total < DECAY_THRESHOLD {
            return;
        }
        for bucket in &self.buckets {
            // Round up, so that a single odd gap goes, too. Gaps counted meanwhile stay.
            bucket.fetch_sub(bucket.load(Ordering::Relaxed).div_ceil(2), Ordering::Relaxed);
        }
    }
}

/// Bucket of a gap: the position of the highest bit of its microseconds, and the bits after it.
fn bucket_of(gap: Duration) -> usize {
    let micros = u64::try_from(gap.as_micros()).unwrap_or(u64::MAX).max(1 << SUB_BUCKET_BITS);
    let highest = micros.ilog2();
    let fine = (micros >> (highest - SUB_BUCKET_BITS)) & ((1 << SUB_BUCKET_BITS) - 1);
    let index = (u64::from(highest - SUB_BUCKET_BITS) << SUB_BUCKET_BITS) + fine;
    usize::try_from(index).map_or(BUCKETS - 1, |index| index.min(BUCKETS - 1))
}

fn bucket_end(index: usize) -> Duration {
    let (doublings, fine) = (index >> SUB_BUCKET_BITS, index as u64 & ((1 << SUB_BUCKET_BITS) - 1));
    Duration::from_micros(((1 << SUB_BUCKET_BITS) + fine + 1) << doublings)
}

#[cfg(test)]
mod tests;
