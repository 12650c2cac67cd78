//! What the replicas that a request may go to have shown together, and what of one's difference from the others is more than noise.

use super::{LearnedRates, Rates, Samples};

/// The weight of the pool's mean, in samples of a replica's own. Replicas of a fleet are mostly
/// alike, so one's samples inform the next, and mere noise must not send all requests to one of
/// them.
const POOL_WEIGHT: f64 = 20.0;

/// After so many seconds without a sample the others' weigh twice as much, after twice as many three times. So whoever looked slow once is
/// tried again.
const POOL_WEIGHT_SECONDS: f64 = 60.0;

/// The most samples that count: a replica has learned from its last hundred or so.
const MAX_SAMPLES: f64 = 200.0;

/// What the speeds of equal replicas differ by at least, as a standard deviation: what was learned on a busy host differs by a tenth.
const MIN_SPREAD: f64 = 0.1;

/// A difference by more than this share is never all noise.
const MAX_NOISE: f64 = 0.5;

/// The pooled samples of the replicas that a request may go to.
///
/// Without it a replica that was never used keeps the prior, and looks slower or faster than all
/// others until somebody tries it.
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

    /// What all have shown, on average; what is assumed of all, when nobody has shown anything.
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

    /// What that says of each of them at this time.
    #[must_use]
    pub fn mean(&self, now: f64) -> MeanRates {
        let prior = Rates::default();
        let [prefill, attention, slowness] = self.first_tokens.mean([prior.prefill, prior.attention, 1.0]);
        let [prefill, attention] = [prefill, attention].map(|part| part / slowness);
        let [step, decode, context] = self.intervals.mean([prior.step, prior.decode, prior.context]);
        // The greatest of n numbers out of noise is sqrt(2 ln n) standard deviations from their mean (Donoho and Johnstone's universal
        // threshold), and the greatest is the one that is chosen.
        let extreme = (2.0 * self.replicas.max(1.0).ln()).sqrt();
        MeanRates { rates: Rates { step, prefill, attention, decode, context, slowness }, extreme, now }
    }
}

/// What replicas have shown together, and how far one may differ from it by chance.
#[derive(Debug, Clone, Copy)]
pub struct MeanRates {
    rates: Rates,
    /// The deviation of the luckiest, in standard deviations.
    extreme: f64,
    now: f64,
}

impl MeanRates {
    /// The rates that one replica is priced with: those of all, times what it is known to be slower or faster by.
    ///
    /// A difference counts the less, the fewer samples it was seen in and the longer ago. One that noise alone makes among so many
    /// replicas does not count at all: equal replicas cost the same then, and the one with the least in flight is taken. What is cached or
    /// waits there is known, and is no part of this.
    ///
    /// Of its steps only the level is its own, at the load that it has seen; how they grow with the load is what all have shown together. A
    /// replica sees mostly one load, which says little of that: two equal ones that each learned it alone were seen to differ by a factor of
    /// two, and to be loaded as differently.
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

    /// How many times the mean it is.
    #[inline]
    fn level(&self, samples: &Samples, pool_weight: f64, own: f64, mean: f64) -> f64 {
        let count = samples.count.clamp(0.0, MAX_SAMPLES);
        let difference = count / (count + pool_weight) * (own / mean - 1.0);
        let noise = (self.extreme * (MIN_SPREAD + samples.spread)).min(MAX_NOISE);
        // What is beyond doubt counts nearly whole, and nothing jumps at the border.
        if difference.abs() > noise && difference.is_finite() { 1.0 + difference - noise * noise / difference } else { 1.0 }
    }
}
