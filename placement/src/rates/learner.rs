//! Learner of one replica's rates, from its first tokens and the intervals between tokens.

use super::{LearnedRates, MAX_SLOWNESS, MIN_GAIN, MIN_SLOWNESS, Rates, Samples};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FirstTokenSample {
    /// `Terms::first_token` when the request was placed.
    pub predicted_seconds: f64,
    /// Part of that prediction for loading tokens from the host's memory.
    pub load_seconds: f64,
    /// Rates behind that prediction.
    pub priced: Rates,
    /// Seconds from dispatch to the first token.
    pub actual_seconds: f64,
    /// Prompt tokens that had to be computed.
    pub uncached: u32,
    /// Prompt tokens that were cached.
    pub matched: u32,
    /// Uncached prompt tokens of the requests ahead at its dispatch.
    pub pending: u64,
    /// Other requests in flight there at its dispatch.
    pub in_flight: u32,
}

/// Fewer computed tokens take about as long as an empty step and say nothing about speed.
const MIN_SAMPLE_TOKENS: f64 = 256.0;

/// Largest share of the prediction that loading may have. Beyond it a sample says little about the
/// speed of prefill, and teaches the speed of loading instead.
pub(super) const MAX_LOAD_SHARE: f64 = 0.5;

/// With up to this many requests in flight, their decoding adds less to a step than its noise.
const MAX_QUIET_IN_FLIGHT: u32 = 4;

/// Weight of the prior, in samples.
const PRIOR_SAMPLES: f64 = 4.0;

/// Exponent with which a deviation under load moves the slowness.
const SLOWNESS_GAIN: f64 = 0.1;

/// Share of the slowness that each sample under load moves into the prefill rate, so that a lasting
/// deviation becomes part of the coefficient.
const SLOWNESS_TO_RATE_SHARE: f64 = 0.01;

/// Share of the slowness that each unloaded sample removes, since it shows the speed directly.
const SLOWNESS_DECAY: f64 = 0.1;

/// Bounds of the learned seconds per prompt token: no accelerator is faster, and none in use is
/// slower.
const PREFILL_BOUNDS: (f64, f64) = (1e-7, 1e-1);

/// Weight of an interval longer than expected, against a shorter one.
///
/// Prompts computed in between lengthen intervals and nothing shortens them, so the shorter ones
/// show how long a step takes by itself.
const LONG_INTERVAL_WEIGHT: f64 = 0.1;

/// Share of the earlier intervals' weight that each new one leaves: the last hundred or so count.
const INTERVAL_DECAY: f64 = 0.99;

/// Learner of one replica's rates while it serves.
///
/// Prefill is learned as one factor, with the attention scaled alike: first tokens cannot
/// distinguish the two while prompts are of similar length. The two decoding coefficients are
/// likewise learned as one. A first token's deviation under load goes into the slowness, and from
/// there into the rate if it lasts. A first token counts as at most e times faster or slower than
/// expected, an interval as twice, so one absurd sample has little effect. Samples that are not
/// finite or not positive have none.
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
        let is_mostly_load = seen.load_seconds > MAX_LOAD_SHARE * seen.predicted_seconds;
        if !positive(seen.actual_seconds) || uncached + ahead < MIN_SAMPLE_TOKENS || is_mostly_load {
            return;
        }
        self.learned_at = now;
        let work_of = |rates: &Rates| rates.prefill_seconds(seen.uncached, seen.matched) + rates.prefill * ahead;
        let work = work_of(&self.rates);
        if uncached >= MIN_SAMPLE_TOKENS && ahead * 8.0 <= uncached && seen.in_flight <= MAX_QUIET_IN_FLIGHT {
            self.learn_unloaded(seen, work);
        } else if positive(seen.predicted_seconds) && positive(work) {
            // Prediction by the replica's own rates, which differ from those used for its price.
            let own = self.rates.slowness * work;
            let predicted = (seen.predicted_seconds - seen.priced.slowness * work_of(&seen.priced)).max(0.0) + own;
            self.learn_loaded(seen.actual_seconds / predicted, own / predicted);
        }
    }

    /// Learns from the mean time between the tokens of a stream, while `sequences` that held
    /// `context` tokens were decoded.
    ///
    /// Such a mean includes steps that also computed prompts. If all steps did, a step looks longer
    /// than it is without them.
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

    /// Rates, and the number of samples behind them.
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

    /// Learns from a sample without load.
    ///
    /// With nothing else running, the time beyond a step and the loading is the prefill. At least a
    /// tenth of the time is, in case a step is overestimated.
    fn learn_unloaded(&mut self, seen: &FirstTokenSample, work: f64) {
        let beside = self.rates.step_seconds(seen.in_flight, 0) + seen.load_seconds;
        let prefill = (seen.actual_seconds - beside).max(seen.actual_seconds / 10.0);
        let factor = prefill / work;
        if positive(factor) {
            let gain = (1.0 / (self.quiet_samples + PRIOR_SAMPLES)).max(MIN_GAIN);
            self.quiet_samples += 1.0;
            self.first_tokens.add(factor, 1.0);
            self.scale_prefill(gain_factor(factor, gain));
            self.rates.slowness = self.rates.slowness.powf(1.0 - SLOWNESS_DECAY);
        }
    }

    /// Learns from a sample with requests ahead.
    ///
    /// It took `factor` times the prediction, of which prefill was `share`. Only that share goes
    /// into the slowness.
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

/// Factor by which an estimate moves for a sample that is `factor` times as large.
pub(super) fn gain_factor(factor: f64, gain: f64) -> f64 {
    (factor.ln().clamp(-1.0, 1.0) * gain).exp()
}

pub(super) fn positive(value: f64) -> bool {
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

    /// Offset and slope, neither negative.
    ///
    /// A few pseudo-observations on the prior's line determine the slope if all samples had the
    /// same `x`. They are scaled to the samples' level, so that the prior lends its shape and not
    /// its speed.
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
