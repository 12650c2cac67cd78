//! How fast a replica is: the coefficients of a step's duration, learned from what really happened. Whoever sees first tokens and the
//! time between tokens feeds a [`RateLearner`] per replica; the cost reads its [`Rates`].

use serde::Serialize;

/// Coefficients of one replica. A step takes `step + prefill·u + attention·u·(h + u/2) + decode·n +
/// context·c` seconds. It computes `u` prompt tokens after `h` cached ones, and one token for each
/// of `n` sequences that hold `c` tokens together.
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
    /// How much slower than its coefficients it has lately been, as a factor.
    pub slowness: f64,
}

/// Assumed of a replica that has shown nothing yet: a model of 7 to 32 billion parameters on one or
/// two H100. Only the order of magnitude matters: a wrong prior that all replicas share hardly
/// changes which of them is cheapest.
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
            // The same arithmetic as for a prompt token, partly hidden behind the reading of
            // weights, and some sampling and scheduling.
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

    /// The average of that per uncached token.
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
    /// context's part of each step. With long contexts most of it is reading keys and values. The
    /// empty step is charged to nobody.
    #[must_use]
    pub fn work_seconds(&self, uncached: u32, matched: u32, output: f64) -> f64 {
        let context = f64::from(uncached) + f64::from(matched) + output / 2.0;
        self.prefill_seconds(uncached, matched) + output * (self.decode + self.context * context)
    }

    /// The mean of each coefficient, in which work that any replica could take is counted. Replicas
    /// with a coefficient that is negative or no number are left out; the prior if none is left.
    #[must_use]
    pub fn mean<'a>(of: impl Iterator<Item = &'a Self>) -> Self {
        let mut sum = [0.0; 6];
        let mut count = 0.0;
        for rates in of {
            let parts = [rates.step, rates.prefill, rates.attention, rates.decode, rates.context, rates.slowness];
            // Of non-negative numbers the sum is finite only if each is.
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
    /// Its rates from its own samples alone.
    pub rates: Rates,
    /// What first tokens told: the speed of prefill and the slowness.
    pub first_tokens: Samples,
    /// What intervals between tokens told: the duration of a step.
    pub intervals: Samples,
    /// The load at which the intervals were seen, on average: sequences, and their context in sequences that take as long.
    pub mean_load: f64,
    /// When it last showed anything, in seconds of whoever fed it.
    pub learned_at: f64,
}

/// How well something is known.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Samples {
    /// How many told it.
    pub count: f64,
    /// By which share one lately differed from what was expected, on average.
    pub spread: f64,
}

impl Samples {
    /// One more came, which was `factor` times what was expected.
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

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FirstTokenSample {
    /// `Terms::first_token` when the request was placed.
    pub predicted_seconds: f64,
    /// The rates that it said it with.
    pub priced: Rates,
    /// Seconds from dispatch to the first token.
    pub actual_seconds: f64,
    /// Prompt tokens that had to be computed.
    pub uncached: u32,
    /// Prompt tokens that were cached.
    pub matched: u32,
    /// Uncached prompt tokens of the requests ahead of it at its dispatch.
    pub pending: u64,
    /// Other requests in flight there at its dispatch.
    pub in_flight: u32,
}

/// Fewer computed tokens take about as long as an empty step and say nothing about speed.
const MIN_SAMPLE_TOKENS: f64 = 256.0;

/// With up to this many requests in flight, their decoding adds less to a step than its noise.
const MAX_QUIET_IN_FLIGHT: u32 = 4;

/// The least exponent with which a sample's factor moves an estimate; larger while there are few
/// samples.
const MIN_GAIN: f64 = 0.05;

/// The weight of the prior, in samples.
const PRIOR_SAMPLES: f64 = 4.0;

/// The exponent with which a deviation under load moves the slowness.
const SLOWNESS_GAIN: f64 = 0.1;

/// Share of the slowness that each sample under load moves into the prefill rate, so that a lasting
/// deviation becomes part of the coefficient.
const SLOWNESS_TO_RATE_SHARE: f64 = 0.01;

/// Share of the slowness that each unloaded sample removes, since it shows the speed directly.
const SLOWNESS_DECAY: f64 = 0.1;

pub(crate) const MIN_SLOWNESS: f64 = 0.25;
pub(crate) const MAX_SLOWNESS: f64 = 8.0;

/// Bounds of the learned seconds per prompt token: no accelerator is faster, and none in use is
/// slower.
const PREFILL_BOUNDS: (f64, f64) = (1e-7, 1e-1);

/// The weight of an interval longer than expected, against a shorter one. Prompts computed in
/// between lengthen intervals and nothing shortens them, so the shorter ones tell what a step takes
/// by itself.
const LONG_INTERVAL_WEIGHT: f64 = 0.1;

/// Share of the earlier intervals' weight that each new one leaves: the last hundred or so count.
const INTERVAL_DECAY: f64 = 0.99;

/// Learns one replica's rates while it serves.
///
/// Prefill is learned as one factor, with the attention scaled alike: first tokens cannot tell the
/// two apart while prompts are of similar length. The two decoding coefficients are likewise
/// learned as one. A first token's deviation under load goes into the slowness, and from there into
/// the rate if it lasts. A first token counts as at most e times faster or slower than expected, an
/// interval as twice, so one absurd sample does little; samples that are not finite or not positive
/// do nothing.
#[derive(Debug, Clone)]
pub struct RateLearner {
    prior: Rates,
    rates: Rates,
    quiet_samples: f64,
    first_tokens: Samples,
    intervals: LineMoments,
    interval_spread: f64,
    learned_at: f64,
}

impl RateLearner {
    #[must_use]
    pub fn new(prior: Rates) -> Self {
        let (first_tokens, intervals) = (Samples::default(), LineMoments::default());
        Self { prior, rates: prior, quiet_samples: 0.0, first_tokens, intervals, interval_spread: 0.0, learned_at: 0.0 }
    }

    /// Learns from a first token at this time.
    pub fn learn_first_token(&mut self, seen: &FirstTokenSample, now: f64) {
        let ahead = seen.pending as f64;
        let uncached = f64::from(seen.uncached);
        if !positive(seen.actual_seconds) || uncached + ahead < MIN_SAMPLE_TOKENS {
            return;
        }
        self.learned_at = now;
        let work_of = |rates: &Rates| rates.prefill_seconds(seen.uncached, seen.matched) + rates.prefill * ahead;
        let work = work_of(&self.rates);
        if uncached >= MIN_SAMPLE_TOKENS && ahead * 8.0 <= uncached && seen.in_flight <= MAX_QUIET_IN_FLIGHT {
            self.learn_unloaded(seen, work);
        } else if positive(seen.predicted_seconds) && positive(work) {
            // What it would have predicted by its own rates, which are not those that it was priced with.
            let own = self.rates.slowness * work;
            let predicted = (seen.predicted_seconds - seen.priced.slowness * work_of(&seen.priced)).max(0.0) + own;
            self.learn_loaded(seen.actual_seconds / predicted, own / predicted);
        }
    }

    /// Learns from the mean time between the tokens of a stream, while `sequences` that held `context` tokens were decoded. Steps that
    /// also computed prompts are in such a mean; where they are in all of them, a step looks longer than it is without them.
    pub fn learn_interval(&mut self, sequences: u32, context: u64, seconds: f64, now: f64) {
        if !positive(seconds) {
            return;
        }
        self.learned_at = now;
        let usual = self.rates.step_seconds(sequences, context);
        let seconds = if positive(usual) { seconds.clamp(usual / 2.0, usual * 2.0) } else { seconds };
        let per_sequence = if positive(self.prior.decode) { self.prior.context / self.prior.decode } else { 0.0 };
        let weight = if seconds > usual { LONG_INTERVAL_WEIGHT } else { 1.0 };
        self.interval_spread +=
            if positive(usual) { weight * MIN_GAIN * ((seconds / usual).ln().abs() - self.interval_spread) } else { 0.0 };
        self.intervals.add(f64::from(sequences) + per_sequence * context as f64, seconds, weight);
        let (step, decode) = self.intervals.fit_line(self.prior.step, self.prior.decode);
        if step.is_finite() && decode.is_finite() {
            (self.rates.step, self.rates.decode, self.rates.context) = (step, decode, decode * per_sequence);
        }
    }

    #[must_use]
    pub fn rates(&self) -> Rates {
        self.rates
    }

    /// The rates, and the number of samples behind them.
    #[must_use]
    pub fn learned(&self) -> LearnedRates {
        let LineMoments { weight, x, .. } = self.intervals;
        let load = if weight > 0.0 { x / weight } else { 0.0 };
        LearnedRates {
            rates: self.rates,
            first_tokens: self.first_tokens,
            intervals: Samples { count: weight, spread: self.interval_spread },
            mean_load: load,
            learned_at: self.learned_at,
        }
    }

    /// With nothing else running, the time beyond a step is the prefill; at least a tenth of the
    /// time is, in case a step is overestimated.
    fn learn_unloaded(&mut self, seen: &FirstTokenSample, work: f64) {
        let prefill = (seen.actual_seconds - self.rates.step_seconds(seen.in_flight, 0)).max(seen.actual_seconds / 10.0);
        let factor = prefill / work;
        if positive(factor) {
            let gain = (1.0 / (self.quiet_samples + PRIOR_SAMPLES)).max(MIN_GAIN);
            self.quiet_samples += 1.0;
            self.first_tokens.add(factor, 1.0);
            self.scale_prefill(gain_factor(factor, gain));
            self.rates.slowness = self.rates.slowness.powf(1.0 - SLOWNESS_DECAY);
        }
    }

    /// With requests ahead, it took `factor` times the prediction, of which prefill was `share`.
    /// Only that share goes into the slowness.
    fn learn_loaded(&mut self, factor: f64, share: f64) {
        if !(positive(factor) && positive(share)) {
            return;
        }
        self.first_tokens.add(factor, share);
        let slowness = self.rates.slowness * gain_factor(factor, SLOWNESS_GAIN * share);
        let settled = slowness.powf(SLOWNESS_TO_RATE_SHARE);
        self.rates.slowness = (slowness / settled).clamp(MIN_SLOWNESS, MAX_SLOWNESS);
        self.scale_prefill(settled);
    }

    fn scale_prefill(&mut self, factor: f64) {
        let (least, most) = PREFILL_BOUNDS;
        self.rates.prefill = (self.rates.prefill * factor).clamp(least, most);
        if positive(self.prior.prefill) {
            self.rates.attention = self.prior.attention * (self.rates.prefill / self.prior.prefill);
        }
    }
}

/// The factor by which an estimate moves for a sample that is `factor` times as large.
fn gain_factor(factor: f64, gain: f64) -> f64 {
    (factor.ln().clamp(-1.0, 1.0) * gain).exp()
}

fn positive(value: f64) -> bool {
    value.is_finite() && value > 0.0
}

/// Weighted sums for fitting a line, with more weight on newer samples.
#[derive(Debug, Clone, Copy, Default)]
struct LineMoments {
    weight: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

impl LineMoments {
    fn add(&mut self, x: f64, y: f64, weight: f64) {
        let memory = 1.0 - weight * (1.0 - INTERVAL_DECAY);
        for (sum, new) in [(&mut self.weight, 1.0), (&mut self.x, x), (&mut self.y, y), (&mut self.xx, x * x), (&mut self.xy, x * y)] {
            *sum = *sum * memory + weight * new;
        }
    }

    /// Offset and slope, neither negative. A few pseudo-observations on the prior's line determine
    /// the slope where all samples had the same `x`. They are scaled to the samples' level, so that
    /// the prior lends its shape and not its speed.
    fn fit_line(&self, offset: f64, slope: f64) -> (f64, f64) {
        let expected = self.weight * offset + self.x * slope;
        let prior: [f64; 4] = [1.0, 8.0, 32.0, 128.0];
        let at_prior: f64 = prior.iter().map(|x| offset + slope * x).sum();
        let level = (self.y + at_prior) / (expected + at_prior);
        let mut sums = *self;
        for x in prior {
            let y = level * (offset + slope * x);
            sums.weight += 1.0;
            sums.x += x;
            sums.y += y;
            sums.xx += x * x;
            sums.xy += x * y;
        }
        let spread = sums.weight * sums.xx - sums.x * sums.x;
        let slope = (sums.weight * sums.xy - sums.x * sums.y) / spread;
        let offset = (sums.y - slope * sums.x) / sums.weight;
        if slope < 0.0 {
            (sums.y / sums.weight, 0.0)
        } else if offset < 0.0 {
            (0.0, sums.xy / sums.xx)
        } else {
            (offset, slope)
        }
    }
}

#[cfg(test)]
mod tests;
