//! How much work the fleet has lately been asked for, as a share of what it can do. The router tells it each request that it places;
//! the cost reads the result as the utilisation.

use std::sync::atomic::{AtomicU64, Ordering};

/// The time in which earlier work loses all but 1/e of its weight: long against a burst, short against the hours of a day.
const MEMORY_SECONDS: f64 = 30.0;

/// Beyond this the price of congestion would be without bound.
pub(crate) const MOST_UTILISATION: f64 = 0.95;

/// Decayed sum of the work that requests brought.
///
/// It begins at nothing, so for the first half minute of its life it says too little: latency alone rules then. It is read and written
/// without a lock: two requests at the same moment may count as one, and the sum be read with the moment of the one before.
#[derive(Debug, Default)]
pub struct Offered {
    /// The sum, as bits.
    seconds: AtomicU64,
    /// The moment of which it is, as bits.
    at: AtomicU64,
}

impl Offered {
    /// Nothing has been asked for.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts a request that will keep a replica busy for `work_seconds`. What is not a number above zero is ignored.
    pub fn arrive(&self, work_seconds: f64, now: f64) {
        if work_seconds.is_finite() && work_seconds > 0.0 && now.is_finite() {
            let (seconds, at) = (self.decayed(now) + work_seconds, read(&self.at).max(now));
            self.seconds.store(seconds.to_bits(), Ordering::Relaxed);
            self.at.store(at.to_bits(), Ordering::Relaxed);
        }
    }

    /// The share of `replicas`' time that was asked for lately: from 0 to 0.95, whatever was asked for.
    #[must_use]
    pub fn utilisation(&self, replicas: usize, now: f64) -> f64 {
        let share = self.decayed(now) / (MEMORY_SECONDS * replicas.max(1) as f64);
        if share.is_nan() { 0.0 } else { share.clamp(0.0, MOST_UTILISATION) }
    }

    /// A clock that runs backwards lets nothing decay.
    fn decayed(&self, now: f64) -> f64 {
        read(&self.seconds) * (-(now - read(&self.at)).max(0.0) / MEMORY_SECONDS).exp()
    }
}

fn read(bits: &AtomicU64) -> f64 {
    f64::from_bits(bits.load(Ordering::Relaxed))
}

#[cfg(test)]
mod tests;
