//! How much work the fleet has lately been asked for, as a share of what it can do. The router tells it each request that it places;
//! the cost reads the result as the utilisation.

/// The time in which earlier work loses all but 1/e of its weight: long against a burst, short against the hours of a day.
const MEMORY_SECONDS: f64 = 30.0;

/// Beyond this the price of congestion would be without bound.
pub(crate) const MOST_UTILISATION: f64 = 0.95;

/// Decayed sum of the work that requests brought.
///
/// It begins at nothing, so for the first half minute of its life it says too little: latency alone rules then.
#[derive(Debug, Clone, Default)]
pub struct Offered {
    seconds: f64,
    at: f64,
}

impl Offered {
    /// Nothing has been asked for.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts a request that will keep a replica busy for `work_seconds`. What is not a number above zero is ignored.
    pub fn arrive(&mut self, work_seconds: f64, now: f64) {
        if work_seconds.is_finite() && work_seconds > 0.0 && now.is_finite() {
            self.seconds = self.decayed(now) + work_seconds;
            self.at = self.at.max(now);
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
        self.seconds * (-(now - self.at).max(0.0) / MEMORY_SECONDS).exp()
    }
}

#[cfg(test)]
mod tests;
