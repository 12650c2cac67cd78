//! How much work the fleet has lately been asked for, as a share of what it can do. The router tells it each request that it places;
//! the cost reads the result as the utilisation.

use std::sync::atomic::{AtomicU64, Ordering};

/// The time in which earlier work loses all but 1/e of its weight: long against a burst, short against the hours of a day.
const DECAY_SECONDS: f64 = 30.0;

/// Beyond this the price of congestion would be without bound.
pub(crate) const MAX_UTILISATION: f64 = 0.95;

/// Decayed sum of the work that requests brought.
///
/// It begins at nothing, so for the first half minute of its life it says too little: latency alone rules then. It is read and written
/// without a lock: two requests at the same moment may count as one, and the sum be read with the moment of the one before.
#[derive(Debug, Default)]
pub struct OfferedWork {
    /// The sum, as bits.
    sum_bits: AtomicU64,
    /// The moment of which it is, as bits.
    time_bits: AtomicU64,
}

impl OfferedWork {
    /// Nothing has been asked for.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts a request that will keep a replica busy for `work_seconds`. What is not a number above zero is ignored.
    pub fn add_request(&self, work_seconds: f64, now: f64) {
        if work_seconds.is_finite() && work_seconds > 0.0 && now.is_finite() {
            let (seconds, at) = (self.decayed_sum(now) + work_seconds, load_f64(&self.time_bits).max(now));
            self.sum_bits.store(seconds.to_bits(), Ordering::Relaxed);
            self.time_bits.store(at.to_bits(), Ordering::Relaxed);
        }
    }

    /// The share of `replicas`' time that was asked for lately: from 0 to 0.95, whatever was asked for.
    #[must_use]
    pub fn utilisation(&self, replicas: usize, now: f64) -> f64 {
        let share = self.decayed_sum(now) / (DECAY_SECONDS * replicas.max(1) as f64);
        if share.is_nan() { 0.0 } else { share.clamp(0.0, MAX_UTILISATION) }
    }

    /// A clock that runs backwards lets nothing decay.
    fn decayed_sum(&self, now: f64) -> f64 {
        load_f64(&self.sum_bits) * (-(now - load_f64(&self.time_bits)).max(0.0) / DECAY_SECONDS).exp()
    }
}

fn load_f64(bits: &AtomicU64) -> f64 {
    f64::from_bits(bits.load(Ordering::Relaxed))
}

#[cfg(test)]
mod tests;
