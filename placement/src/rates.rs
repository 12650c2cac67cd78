//! Speed of a replica: the coefficients of a step's duration, learned from observations.
//!
//! Observers of first tokens and of the time between tokens feed a [`RateLearner`] per replica; the
//! cost reads its [`Rates`].

mod learner;
mod load;
mod pool;

use serde::Serialize;

pub use self::learner::{FirstTokenSample, RateLearner};
pub use self::load::{LoadFactors, LoadRates, LoadSample};
pub use self::pool::{MeanRates, RatePool};

pub(crate) const MIN_SLOWNESS: f64 = 0.25;
pub(crate) const MAX_SLOWNESS: f64 = 8.0;

/// Least exponent with which a sample's factor moves an estimate; larger while there are few
/// samples.
const MIN_GAIN: f64 = 0.05;

/// Coefficients of one replica.
///
/// A step takes `step + prefill·u + attention·u·(h + u/2) + decode·n + context·c` seconds. It
/// computes `u` prompt tokens after `h` cached ones, and one token for each of `n` sequences that
/// hold `c` tokens together.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rates {
    /// Seconds of an empty step.
    pub step: f64,
    /// Seconds per prompt token.
    pub prefill: f64,
    /// Seconds per prompt token and token before it.
    pub attention: f64,
    /// Seconds per sequence.
    pub decode: f64,
    /// Seconds per token that the sequences hold.
    pub context: f64,
    /// Recent slowdown against the coefficients, as a factor.
    pub slowness: f64,
}

/// Assumed rates of a replica without observations: a model of 7 to 32 billion parameters on one or
/// two H100.
///
/// Only the order of magnitude matters: a wrong prior that all replicas share hardly changes which
/// of them is cheapest.
impl Default for Rates {
    fn default() -> Self {
        Self {
            // Reading 16 to 32 GB of weights at 3.35 TB/s takes 5 to 10 ms; scheduling and launches
            // add to the smaller figure.
            step: 0.01,
            // Two operations per parameter: 20 GFLOP for ten billion, at about 500 TFLOP/s, which
            // is half of the peak in 16 bits.
            prefill: 40e-6,
            // Four operations per layer and width: 0.5 MFLOP for 32 layers of 4,096, at about 500
            // TFLOP/s.
            attention: 1e-9,
            // The arithmetic of a prompt token, partly hidden behind the reading of weights, and
            // some sampling and scheduling.
            decode: 30e-6,
            // Reading 57 kB of keys and values (28 layers, four heads of 128, 16 bits) at 3.35
            // TB/s. Larger models need two or three times that.
            context: 2e-8,
            slowness: 1.0,
        }
    }
}

impl Rates {
    /// Seconds for the prompt itself: `uncached` tokens after `matched` cached ones, without
    /// slowness.
    #[must_use]
    pub fn prefill_seconds(&self, uncached: u32, matched: u32) -> f64 {
        f64::from(uncached) * self.prefill_seconds_each(uncached, matched)
    }

    /// Average prefill seconds per uncached token.
    pub(crate) fn prefill_seconds_each(&self, uncached: u32, matched: u32) -> f64 {
        self.prefill + self.attention * (f64::from(matched) + f64::from(uncached) / 2.0)
    }

    /// Seconds of a step that computes one token for each of `sequences`, which hold `context`
    /// tokens together.
    #[must_use]
    pub fn step_seconds(&self, sequences: u32, context: u64) -> f64 {
        self.step + self.decode * f64::from(sequences) + self.context * context as f64
    }

    /// Seconds that a request takes from a replica's others: its prompt, and its token's and
    /// context's part of each step.
    ///
    /// With long contexts most of it is reading keys and values. The empty step is charged to
    /// nobody.
    #[must_use]
    pub fn work_seconds(&self, uncached: u32, matched: u32, output: f64) -> f64 {
        let context = f64::from(uncached) + f64::from(matched) + output / 2.0;
        self.prefill_seconds(uncached, matched) + output * (self.decode + self.context * context)
    }

    /// Mean of each coefficient, used to count work that any replica could take.
    ///
    /// Replicas with a coefficient that is negative or not a number are left out. Returns the prior
    /// if none is left.
    #[must_use]
    pub fn mean<'a>(of: impl Iterator<Item = &'a Self>) -> Self {
        let mut sum = [0.0; 6];
        let mut count = 0.0;
        for rates in of {
            let parts = [rates.step, rates.prefill, rates.attention, rates.decode, rates.context, rates.slowness];
            // The sum of non-negative numbers is finite only if each is.
            if parts.iter().all(|part| *part >= 0.0) && parts.iter().sum::<f64>().is_finite() {
                sum.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
                count += 1.0;
            }
        }
        if count == 0.0 {
            return Self::default();
        }
        let [step, prefill, attention, decode, context, slowness] = sum.map(|part| part / count);
        Self { step, prefill, attention, decode, context, slowness }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LearnedRates {
    /// Rates from the replica's own samples alone.
    pub rates: Rates,
    /// Samples from first tokens: the speed of prefill and the slowness.
    pub first_tokens: Samples,
    /// Samples from intervals between tokens: the duration of a step.
    pub intervals: Samples,
    /// Average load at which the intervals were seen: sequences, plus their context converted into
    /// sequences that take as long.
    pub mean_load: f64,
    /// When the replica last gave a sample, in seconds of the observer's clock.
    pub learned_at: f64,
}

/// Confidence in an estimate.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Samples {
    /// Number of samples.
    pub count: f64,
    /// Average share by which samples recently differed from the expectation.
    pub spread: f64,
}

impl Samples {
    /// Adds a sample that was `factor` times the expectation.
    fn add(&mut self, factor: f64, weight: f64) {
        self.count += weight;
        self.spread += weight * (1.0 / self.count).max(MIN_GAIN) * (factor.ln().abs().min(1.0) - self.spread);
    }
}

impl Default for LearnedRates {
    fn default() -> Self {
        RateLearner::new(Rates::default()).learned()
    }
}

#[cfg(test)]
mod tests;
