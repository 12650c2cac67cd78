//! Pooled rates of the replicas that a request may go to, and the part of a replica's difference
//! from the others that exceeds noise.

use super::{LearnedRates, Rates, Samples};

/// Weight of the pool's mean, in samples of a replica's own.
///
/// Replicas of a fleet are mostly alike, so the samples of one inform the next. Mere noise must not
/// send all requests to one of them.
const POOL_WEIGHT: f64 = 20.0;

/// Seconds without a sample after which the others' samples weigh twice as much; after twice as
/// many they weigh three times.
///
/// So a replica that once looked slow is tried again.
const POOL_WEIGHT_SECONDS: f64 = 60.0;

/// Most samples that count: a replica has learned from its last hundred or so.
const MAX_SAMPLES: f64 = 200.0;

/// Least standard deviation between the speeds of equal replicas: rates learned on a busy host
/// differ by a tenth.
const MIN_SPREAD: f64 = 0.1;

/// A difference by more than this share is never all noise.
const MAX_NOISE: f64 = 0.5;

/// Pooled samples of the replicas that a request may go to.
///
/// Without the pool a replica that was never used keeps the prior, and looks slower or faster than
/// all others until somebody tries it.
#[derive(Debug, Clone, Copy, Default)]
pub struct RatePool {
    replicas: f64,
    first_tokens: PooledSamples,
    intervals: PooledSamples,
}

#[derive(Debug, Clone, Copy, Default)]
struct PooledSamples {
    samples: f64,
    sums: [f64; 3],
}

impl PooledSamples {
    #[inline]
    fn add(&mut self, samples: f64, shown: [f64; 3]) {
        let samples = samples.clamp(0.0, MAX_SAMPLES);
        // The sum is finite only if each is.
        if shown.iter().sum::<f64>().is_finite() {
            self.samples += samples;
            self.sums.iter_mut().zip(shown).for_each(|(sum, part)| *sum += part * samples);
        }
    }

    /// Average of all samples, or the prior if there are none.
    fn mean(&self, prior: [f64; 3]) -> [f64; 3] {
        if self.samples > 0.0 { self.sums.map(|sum| sum / self.samples) } else { prior }
    }
}

impl RatePool {
    #[must_use]
    pub fn new<'a>(all: impl Iterator<Item = &'a LearnedRates>) -> Self {
        let mut pool = Self::default();
        all.for_each(|learned| pool.add(learned));
        pool
    }

    #[inline]
    pub fn add(&mut self, learned: &LearnedRates) {
        let rates = &learned.rates;
        self.replicas += 1.0;
        let [prefill, attention] = [rates.prefill, rates.attention].map(|part| part * rates.slowness);
        self.first_tokens.add(learned.first_tokens.count, [prefill, attention, rates.slowness]);
        self.intervals.add(learned.intervals.count, [rates.step, rates.decode, rates.context]);
    }

    /// Means at this time, from which each replica's rates follow.
    #[must_use]
    pub fn mean(&self, now: f64) -> MeanRates {
        let prior = Rates::default();
        let [prefill, attention, slowness] = self.first_tokens.mean([prior.prefill, prior.attention, 1.0]);
        let [prefill, attention] = [prefill, attention].map(|part| part / slowness);
        let [step, decode, context] = self.intervals.mean([prior.step, prior.decode, prior.context]);
        // The greatest of n numbers out of noise is sqrt(2 ln n) standard deviations from their
        // mean (Donoho and Johnstone's universal threshold), and the greatest is the one that is
        // chosen.
        let extreme = (2.0 * self.replicas.max(1.0).ln()).sqrt();
        MeanRates { rates: Rates { step, prefill, attention, decode, context, slowness }, extreme, now }
    }
}

/// Pooled rates of replicas, and how far a replica may differ from them by chance.
#[derive(Debug, Clone, Copy)]
pub struct MeanRates {
    rates: Rates,
    /// Deviation of the luckiest replica, in standard deviations.
    extreme: f64,
    now: f64,
}

impl MeanRates {
    /// Rates to price one replica with: the pool's, times its known slowdown or speedup.
    ///
    /// A difference counts less if it was seen in fewer samples or longer ago. Differences within
    /// noise are ignored: equal replicas then cost the same, and the one with the fewest requests
    /// in flight is taken. Cached prefixes and waiting requests there are known, and are no part of
    /// this.
    ///
    /// Only the level of its steps is the replica's own, at the load that it has seen. The growth
    /// with the load is pooled. A replica mostly sees one load, which says little about growth: two
    /// equal ones that each learned it alone were seen to differ by a factor of two, and to be
    /// loaded as differently.
    #[must_use]
    #[inline]
    pub fn rates_of(&self, learned: &LearnedRates) -> Rates {
        let (own, mean) = (&learned.rates, &self.rates);
        let pool_weight = POOL_WEIGHT * (1.0 + (self.now - learned.learned_at).max(0.0) / POOL_WEIGHT_SECONDS);
        let steps = self.level(
            &learned.intervals,
            pool_weight,
            own.step + own.decode * learned.mean_load,
            mean.step + mean.decode * learned.mean_load,
        );
        let prefill = self.level(&learned.first_tokens, pool_weight, own.prefill * own.slowness, mean.prefill * mean.slowness);
        Rates {
            step: mean.step * steps,
            prefill: mean.prefill * prefill,
            attention: mean.attention * prefill,
            decode: mean.decode * steps,
            context: mean.context * steps,
            slowness: mean.slowness,
        }
    }

    /// Level of a replica as a multiple of the mean.
    #[inline]
    fn level(&self, samples: &Samples, pool_weight: f64, own: f64, mean: f64) -> f64 {
        let count = samples.count.clamp(0.0, MAX_SAMPLES);
        let difference = count / (count + pool_weight) * (own / mean - 1.0);
        let noise = (self.extreme * (MIN_SPREAD + samples.spread)).min(MAX_NOISE);
        // A difference beyond doubt counts nearly whole, and there is no jump at the border.
        if difference.abs() > noise && difference.is_finite() { 1.0 + difference - noise * noise / difference } else { 1.0 }
    }
}
