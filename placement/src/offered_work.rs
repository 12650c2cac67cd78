//! Work that the fleet was recently offered, as a share of its capacity.
//!
//! The router reports each request that it places; the cost reads the result as the utilisation.

use std::sync::atomic::{AtomicU64, Ordering};

/// Time after which earlier work counts for 1/e: long against a burst, short against the hours of a
/// day.
const DECAY_SECONDS: f64 = 30.0;

/// Limit of the utilisation, above which the price of congestion would grow without bound.
pub(crate) const MAX_UTILISATION: f64 = 0.95;

/// Decayed sum of the work that requests brought.
///
/// The sum starts at 0, so in its first half minute it is too small and latency alone decides.
/// Reads and writes take no lock: of two requests at the same moment one may be lost, and the sum
/// may be read with the previous time.
#[derive(Debug, Default)]
pub struct OfferedWork {
    /// Sum as the bits of an `f64`.
    sum_bits: AtomicU64,
    time_bits: AtomicU64,
}

impl OfferedWork {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts a request that keeps a replica busy for `work_seconds`.
    ///
    /// A value that is not positive is ignored.
    pub fn add_request(&self, work_seconds: f64, now: f64) {
        if work_seconds.is_finite() && work_seconds > 0.0 && now.is_finite() {
            let (seconds, at) = (self.decayed_sum(now) + work_seconds, load_f64(&self.time_bits).max(now));
            self.sum_bits.store(seconds.to_bits(), Ordering::Relaxed);
            self.time_bits.store(at.to_bits(), Ordering::Relaxed);
        }
    }

    /// Share of `replicas`' time that was recently in demand: 0 to 0.95.
    #[must_use]
    pub fn utilisation(&self, replicas: usize, now: f64) -> f64 {
        let share = self.decayed_sum(now) / (DECAY_SECONDS * replicas.max(1) as f64);
        if share.is_nan() { 0.0 } else { share.clamp(0.0, MAX_UTILISATION) }
    }

    /// Decayed sum at `now`. If the clock runs backwards, nothing decays.
    fn decayed_sum(&self, now: f64) -> f64 {
        load_f64(&self.sum_bits) * (-(now - load_f64(&self.time_bits)).max(0.0) / DECAY_SECONDS).exp()
    }
}

fn load_f64(bits: &AtomicU64) -> f64 {
    f64::from_bits(bits.load(Ordering::Relaxed))
}

#[cfg(test)]
mod tests;
