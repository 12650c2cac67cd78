use proptest::prelude::*;

use super::*;

/// An engine with known coefficients, which the learner has to find.
struct Engine {
    rates: Rates,
    noise: fastrand::Rng,
}

impl Engine {
    fn new(rates: Rates, seed: u64) -> Self {
        Self { rates, noise: fastrand::Rng::with_seed(seed) }
    }

    /// Serves one first token and one interval, with up to a fifth of noise either way and now and
    /// then an outlier.
    fn serve(&mut self, learner: &mut RateLearner, quiet: bool) {
        let noise = &mut self.noise;
        let (uncached, matched) = (noise.u32(300..16_000), noise.u32(0..8_000));
        let (pending, in_flight) = if quiet { (0, noise.u32(0..3)) } else { (noise.u64(0..60_000), noise.u32(0..80)) };
        let context = u64::from(in_flight) * noise.u64(500..4_000);
        let factor = if noise.u32(..40) == 0 { 5.0 } else { 0.8 + 0.4 * noise.f64() };
        let learned = learner.rates();
        let seen = FirstTokenSample {
            load_seconds: 0.0,
            priced: learned,
            predicted_seconds: first_token(&learned, uncached, matched, pending, (in_flight, context)),
            actual_seconds: first_token(&self.rates, uncached, matched, pending, (in_flight, context)) * factor,
            uncached,
            matched,
            pending,
            in_flight,
        };
        learner.learn_first_token(&seen, 0.0);
        learner.learn_interval(in_flight, context, self.rates.step_seconds(in_flight, context) * factor, 0.0);
    }
}

fn first_token(rates: &Rates, uncached: u32, matched: u32, pending: u64, (sequences, context): (u32, u64)) -> f64 {
    let steps = (pending + u64::from(uncached)).div_ceil(8192) as f64;
    rates.slowness * (rates.prefill * pending as f64 + rates.prefill_seconds(uncached, matched))
        + steps * rates.step_seconds(sequences, context)
}

fn assert_close(left: f64, right: f64, share: f64, what: &str) {
    assert!((left / right - 1.0).abs() < share, "{what}: {left} instead of {right}");
}

fn assert_predicts(learner: &RateLearner, truth: &Rates) {
    let learned = learner.rates();
    for uncached in [2_000, 8_000, 16_000] {
        for load in [(0, 0), (10, 20_000), (60, 130_000)] {
            for pending in [0, 10_000] {
                let predicted = first_token(&learned, uncached, 4_000, pending, load);
                let took = first_token(truth, uncached, 4_000, pending, load);
                assert_close(predicted, took, 0.2, &format!("{uncached} tokens after {pending} at load {load:?} with {learned:?}"));
            }
        }
    }
    for load in [(1, 2_000), (30, 60_000), (80, 180_000)] {
        assert_close(learned.step_seconds(load.0, load.1), truth.step_seconds(load.0, load.1), 0.2, &format!("step at load {load:?}"));
    }
}

const SLOWER: Rates = Rates { step: 0.025, prefill: 120e-6, attention: 4e-9, decode: 100e-6, context: 5e-8, slowness: 1.0 };
const FASTER: Rates = Rates { step: 0.004, prefill: 12e-6, attention: 2e-10, decode: 15e-6, context: 1e-8, slowness: 1.0 };

#[test]
fn a_prompt_costs_its_tokens_and_their_attention() {
    let rates = Rates { prefill: 2.0, attention: 0.5, ..Rates::default() };
    assert_eq!(rates.prefill_seconds(10, 100), 10.0 * 2.0 + 0.5 * 10.0 * (100.0 + 5.0));
    assert_eq!(rates.prefill_seconds(0, 100), 0.0);
    let rates = Rates { step: 1.0, decode: 2.0, context: 0.5, ..Rates::default() };
    assert_eq!(rates.step_seconds(3, 8), 1.0 + 6.0 + 4.0);
}

#[test]
fn the_mean_rate_ignores_nonsense_and_defaults_to_the_prior() {
    let (one, three) = (Rates { step: 1.0, ..Rates::default() }, Rates { step: 3.0, ..Rates::default() });
    let nonsense = Rates { prefill: f64::NAN, ..Rates::default() };
    assert_eq!(Rates::mean([one, nonsense, three].iter()).step, 2.0);
    assert_eq!(Rates::mean([nonsense].iter()), Rates::default());
    assert_eq!(Rates::mean([].iter()), Rates::default());
}

#[test]
fn rates_without_samples_are_the_prior() {
    assert_eq!(RateLearner::new(FASTER).rates(), FASTER);
}

#[test]
fn a_few_hundred_noisy_samples_teach_another_engine() {
    for (truth, seed) in [(SLOWER, 1), (SLOWER, 2), (FASTER, 3), (FASTER, 4)] {
        let (mut engine, mut learner) = (Engine::new(truth, seed), RateLearner::new(Rates::default()));
        (0..400).for_each(|sample| engine.serve(&mut learner, sample % 2 == 0));
        assert_predicts(&learner, &truth);
    }
}

#[test]
fn an_engine_that_is_never_idle_is_learned_too() {
    for (truth, seed) in [(SLOWER, 5), (FASTER, 6)] {
        let (mut engine, mut learner) = (Engine::new(truth, seed), RateLearner::new(Rates::default()));
        (0..600).for_each(|_| engine.serve(&mut learner, false));
        assert_predicts(&learner, &truth);
        assert_close(learner.rates().slowness, 1.0, 0.4, "what lasts becomes speed");
    }
}

#[test]
fn a_replica_that_turns_slow_is_detected_and_forgiven() {
    let (mut engine, mut learner) = (Engine::new(Rates::default(), 7), RateLearner::new(Rates::default()));
    (0..200).for_each(|sample| engine.serve(&mut learner, sample % 2 == 0));
    engine.rates.slowness = 3.0;
    (0..150).for_each(|_| engine.serve(&mut learner, false));
    assert_predicts(&learner, &engine.rates);
    engine.rates.slowness = 1.0;
    (0..300).for_each(|sample| engine.serve(&mut learner, sample % 2 == 0));
    assert_predicts(&learner, &engine.rates);
}

#[test]
fn intervals_at_one_load_set_the_level_and_keep_shape() {
    let prior = Rates::default();
    let mut learner = RateLearner::new(prior);
    (0..300).for_each(|_| learner.learn_interval(40, 0, 2.0 * prior.step_seconds(40, 0), 0.0));
    let learned = learner.rates();
    assert_close(learned.step, 2.0 * prior.step, 0.1, "step");
    assert_close(learned.decode, 2.0 * prior.decode, 0.1, "decode");
    assert_close(learned.context, 2.0 * prior.context, 0.1, "context");
}

#[test]
fn prefills_between_tokens_hardly_lengthen_the_learned_step() {
    let mut learner = RateLearner::new(Rates::default());
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..600 {
        let sequences = random.u32(1..80);
        let context = u64::from(sequences) * 2_000;
        // A third of the answers met prompts of others on their way.
        let met = if random.u32(..3) == 0 { 1.0 + 3.0 * random.f64() } else { 1.0 };
        learner.learn_interval(sequences, context, SLOWER.step_seconds(sequences, context) * met, 0.0);
    }
    for load in [(1, 2_000), (30, 60_000), (80, 160_000)] {
        let (learned, truth) = (learner.rates().step_seconds(load.0, load.1), SLOWER.step_seconds(load.0, load.1));
        assert_close(learned, truth, 0.25, &format!("step at load {load:?}"));
    }
}

#[test]
fn short_prompts_do_not_teach_the_prefill_rate() {
    let mut learner = RateLearner::new(Rates::default());
    let seen = FirstTokenSample {
        load_seconds: 0.0,
        priced: Rates::default(),
        predicted_seconds: 0.01,
        actual_seconds: 1.0,
        uncached: 255,
        matched: 5_000,
        pending: 0,
        in_flight: 0,
    };
    (0..100).for_each(|_| learner.learn_first_token(&seen, 0.0));
    assert_eq!(learner.rates(), Rates::default());
}

#[test]
fn one_absurd_sample_changes_little() {
    let mut learner = RateLearner::new(Rates::default());
    let seen = FirstTokenSample {
        load_seconds: 0.0,
        priced: Rates::default(),
        predicted_seconds: 0.1,
        actual_seconds: 1e6,
        uncached: 2_000,
        matched: 0,
        pending: 0,
        in_flight: 0,
    };
    learner.learn_first_token(&seen, 0.0);
    learner.learn_first_token(&FirstTokenSample { pending: 50_000, ..seen }, 0.0);
    learner.learn_interval(3, 100, 1e6, 0.0);
    let (learned, prior) = (learner.rates(), Rates::default());
    assert!(learned.prefill < 1.4 * prior.prefill && learned.slowness < 1.2 && learned.step < 2.5 * prior.step, "{learned:?}");
}

fn figure() -> impl Strategy<Value = f64> {
    prop_oneof![Just(f64::NAN), Just(f64::INFINITY), Just(-1.0), Just(0.0), Just(1e-300), Just(1e300), 1e-6..100.0]
}

proptest! {
    #[test]
    fn rates_stay_usable_whatever_is_fed(
        prior in prop::collection::vec(figure(), 5),
        first_tokens in prop::collection::vec((figure(), figure(), any::<u32>(), any::<u32>(), any::<u64>(), any::<u32>()), 0..40),
        intervals in prop::collection::vec((any::<u32>(), any::<u64>(), figure()), 0..40),
    ) {
        for prior in [Rates::default(), Rates { step: prior[0], prefill: prior[1], attention: prior[2], decode: prior[3], context: prior[4], slowness: 1.0 }] {
            let mut learner = RateLearner::new(prior);
            for &(predicted_seconds, actual_seconds, uncached, matched, pending, in_flight) in &first_tokens {
                let sample = FirstTokenSample { load_seconds: 0.0, priced: prior, predicted_seconds, actual_seconds, uncached, matched, pending, in_flight };
                learner.learn_first_token(&sample, predicted_seconds);
            }
            for &(sequences, context, seconds) in &intervals {
                learner.learn_interval(sequences, context, seconds, seconds);
            }
            let rates = learner.rates();
            if prior == Rates::default() {
                for part in [rates.step, rates.prefill, rates.attention, rates.decode, rates.context, rates.slowness] {
                    prop_assert!(part.is_finite() && part >= 0.0, "{:?}", rates);
                }
                prop_assert!((MIN_SLOWNESS..=MAX_SLOWNESS).contains(&rates.slowness));
            }
        }
    }
}

#[test]
fn a_requests_work_is_its_prompt_and_share_of_steps() {
    let rates = Rates { step: 1.0, prefill: 0.5, attention: 0.0, decode: 0.25, context: 0.125, slowness: 1.0 };
    assert_eq!(rates.work_seconds(10, 90, 0.0), 5.0);
    assert_eq!(rates.work_seconds(10, 90, 8.0), 5.0 + 8.0 * (0.25 + 0.125 * 104.0));
}

fn samples(count: f64) -> Samples {
    Samples { count, spread: 0.0 }
}

/// Rates used to price each of these replicas.
fn priced(all: &[LearnedRates], now: f64) -> Vec<Rates> {
    let mean = RatePool::new(all.iter()).mean(now);
    all.iter().map(|learned| mean.rates_of(learned)).collect()
}

/// A replica that takes this many times as long for prompts and for steps as the prior says.
fn times_as_slow(factor: f64) -> LearnedRates {
    let Rates { step, prefill, attention, decode, context, slowness } = Rates::default();
    let [step, prefill, attention, decode, context] = [step, prefill, attention, decode, context].map(|part| part * factor);
    let rates = Rates { step, prefill, attention, decode, context, slowness };
    LearnedRates { rates, first_tokens: samples(100.0), intervals: samples(100.0), mean_load: 8.0, learned_at: 0.0 }
}

#[test]
fn an_unknown_replica_is_assumed_as_fast_as_the_others() {
    let fast = Rates { step: 0.004, prefill: 5e-6, ..Rates::default() };
    let shown = LearnedRates { rates: fast, first_tokens: samples(50.0), intervals: samples(50.0), mean_load: 8.0, learned_at: 0.0 };
    let unknown = priced(&[shown, LearnedRates::default()], 0.0)[1];
    assert!((unknown.step - 0.004).abs() < 1e-9 && (unknown.prefill - 5e-6).abs() < 1e-12, "{unknown:?}");
    assert_eq!(priced(&[LearnedRates::default()], 0.0), [Rates::default()], "nobody has shown anything");
}

#[test]
fn a_replicas_own_samples_count_more_as_they_grow() {
    let with = |step, intervals| LearnedRates {
        rates: Rates { step, ..Rates::default() },
        intervals: samples(intervals),
        ..LearnedRates::default()
    };
    let others = [with(0.01, 200.0), with(0.01, 200.0), with(0.01, 200.0)];
    let steps = [1.0, 20.0, 200.0].map(|samples| {
        let slow = with(0.05, samples);
        priced(&[others[0], others[1], others[2], slow], 0.0)[3].step
    });
    assert!(steps[0] < 0.013 && (0.025..0.035).contains(&steps[1]) && steps[2] > 0.045, "{steps:?}");
}

#[test]
fn nonsense_of_one_replica_does_not_reach_the_others() {
    let nonsense = LearnedRates {
        rates: Rates { step: f64::NAN, ..Rates::default() },
        first_tokens: samples(10.0),
        intervals: samples(10.0),
        mean_load: 1.0,
        learned_at: 0.0,
    };
    let good = LearnedRates { intervals: samples(10.0), ..LearnedRates::default() };
    assert_eq!(priced(&[nonsense, good], 0.0)[1].step, Rates::default().step);
}

#[test]
fn equal_replicas_with_different_learned_shapes_cost_the_same() {
    // Seen on two H200s: at some 450 sequences both take 21 ms, and neither knows more.
    let with = |step, decode, load| LearnedRates {
        rates: Rates { step, decode, ..Rates::default() },
        intervals: samples(100.0),
        mean_load: load,
        ..LearnedRates::default()
    };
    let rates = priced(&[with(0.0006, 46e-6, 440.0), with(0.0096, 26e-6, 440.0)], 0.0);
    for sequences in [1, 100, 440, 1_000] {
        assert_close(rates[0].step_seconds(sequences, 0), rates[1].step_seconds(sequences, 0), 0.02, &format!("{sequences} sequences"));
    }
    let slow = with(0.03, 90e-6, 440.0);
    let rates = priced(&[with(0.01, 30e-6, 440.0), slow], 0.0);
    assert_close(rates[1].step_seconds(440, 0), slow.rates.step_seconds(440, 0), 0.1, "what it is slower by stays");
}

#[test]
fn differences_within_noise_are_ignored_and_larger_ones_kept() {
    let fleet = |of: usize, one: f64| (0..of).map(|index| times_as_slow(if index == 0 { one } else { 1.0 })).collect::<Vec<_>>();
    let level = |of, one| priced(&fleet(of, one), 0.0)[0].step / priced(&fleet(of, one), 0.0)[1].step;
    assert_eq!((level(12, 0.8), level(12, 1.2), level(1_000, 1.3)), (1.0, 1.0, 1.0));
    assert!(level(1_000, 1.4) < level(4, 1.4), "more replicas have greater outliers");
    assert!(level(1_000, 3.0) > 2.2 && level(12, 3.0) > 2.2 && level(12, 0.5) < 0.8, "{} {}", level(1_000, 3.0), level(12, 3.0));
}

#[test]
fn a_wider_spread_of_samples_widens_the_noise_band() {
    let level = |spread| {
        let one = LearnedRates { intervals: Samples { count: 100.0, spread }, ..times_as_slow(1.4) };
        priced(&[one, times_as_slow(1.0), times_as_slow(1.0), times_as_slow(1.0)], 0.0)[0].step / Rates::default().step
    };
    assert!(level(0.0) > 1.2 && (level(0.2) - 1.1).abs() < 0.001, "{} {}", level(0.0), level(0.2));
}

#[test]
fn an_unused_slow_replica_drifts_back_towards_the_others() {
    let all = [times_as_slow(3.0), times_as_slow(1.0), times_as_slow(1.0), times_as_slow(1.0)];
    let levels = [0.0, 60.0, 600.0, 7_200.0].map(|now| {
        let rates = priced(&all, now);
        rates[0].prefill / rates[1].prefill
    });
    assert!(levels[0] > 2.0 && levels.windows(2).all(|pair| pair[0] > pair[1]), "{levels:?}");
    assert_eq!(levels[3], 1.0, "after two hours it costs what the others cost");
}

#[test]
fn slowness_within_noise_is_ignored_too() {
    let with = |slowness| LearnedRates { rates: Rates { slowness, ..Rates::default() }, ..times_as_slow(1.0) };
    let seconds = |of: &Rates| of.slowness * of.prefill;
    let rates = priced(&[with(1.2), with(0.9), with(1.0), with(1.1)], 0.0);
    assert!(rates.iter().all(|one| seconds(one) == seconds(&rates[0])), "{rates:?}");
    let rates = priced(&[with(3.0), with(0.9), with(1.0), with(1.1)], 0.0);
    assert!(seconds(&rates[0]) > 2.0 * seconds(&rates[1]), "{rates:?}");
}

#[test]
fn the_spread_of_samples_is_learned() {
    let mut learner = RateLearner::new(Rates::default());
    let steady = Rates::default().step_seconds(4, 8_000);
    (0..200).for_each(|_| learner.learn_interval(4, 8_000, steady, 5.0));
    assert!(learner.learned().intervals.spread < 0.001 && learner.learned().learned_at == 5.0, "{:?}", learner.learned());
    let mut random = fastrand::Rng::with_seed(3);
    (0..200).for_each(|_| learner.learn_interval(4, 8_000, steady * (0.7 + 0.6 * random.f64()), 9.0));
    assert!((0.05..0.35).contains(&learner.learned().intervals.spread), "{:?}", learner.learned());
}

#[test]
fn a_replica_priced_at_the_mean_learns_its_true_speed() {
    // The replica is priced by the mean for as long as the difference may be noise. The part that
    // the price leaves out must not be learned again and again.
    let truth = Rates { prefill: 1.15 * Rates::default().prefill, attention: 1.15 * Rates::default().attention, ..Rates::default() };
    let mut learner = RateLearner::new(Rates::default());
    for _ in 0..2_000 {
        let took = |rates: &Rates| first_token(rates, 4_000, 0, 20_000, (30, 60_000));
        let sample = FirstTokenSample {
            load_seconds: 0.0,
            priced: Rates::default(),
            predicted_seconds: took(&Rates::default()),
            actual_seconds: took(&truth),
            uncached: 4_000,
            matched: 0,
            pending: 20_000,
            in_flight: 30,
        };
        learner.learn_first_token(&sample, 0.0);
    }
    let learned = learner.rates();
    assert_close(learned.prefill * learned.slowness, truth.prefill, 0.05, "prefill");
}

proptest! {
    #[test]
    fn a_slower_replica_is_never_priced_as_a_faster_one(
        factors in prop::collection::vec(0.1..10.0_f64, 2..40), spread in 0.0..1.0_f64, now in 0.0..10_000.0_f64,
    ) {
        let all: Vec<LearnedRates> = factors
            .iter()
            .map(|factor| LearnedRates { intervals: Samples { count: 100.0, spread }, ..times_as_slow(*factor) })
            .collect();
        let rates = priced(&all, now);
        for (one, rates_of_one) in all.iter().zip(&rates) {
            prop_assert!(rates_of_one.step > 0.0 && rates_of_one.prefill > 0.0, "{rates_of_one:?}");
            for (other, rates_of_other) in all.iter().zip(&rates) {
                prop_assert!(one.rates.step > other.rates.step || rates_of_one.step <= rates_of_other.step * (1.0 + 1e-9));
            }
        }
    }
}

#[test]
fn loading_does_not_look_like_slow_prefill() {
    let prior = Rates::default();
    let (uncached, matched, load_seconds) = (2_000, 30_000, 0.05);
    let exact = prior.step + prior.prefill_seconds(uncached, matched) + load_seconds;
    let seen = FirstTokenSample {
        predicted_seconds: exact,
        load_seconds,
        priced: prior,
        actual_seconds: exact,
        uncached,
        matched,
        pending: 0,
        in_flight: 0,
    };
    let learned = |seen: FirstTokenSample| {
        let mut learner = RateLearner::new(prior);
        (0..50).for_each(|_| learner.learn_first_token(&seen, 0.0));
        learner.rates().prefill / prior.prefill
    };
    assert!((learned(seen) - 1.0).abs() < 1e-6);
    assert!(learned(FirstTokenSample { load_seconds: 0.0, ..seen }) > 1.2, "without it the sample would count as slow");
    let mostly_load = FirstTokenSample { load_seconds: 0.4, predicted_seconds: 0.5, actual_seconds: 5.0, ..seen };
    assert_eq!(learned(mostly_load), 1.0, "a sample that is mostly loading teaches nothing");
}
