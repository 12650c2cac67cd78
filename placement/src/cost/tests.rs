use proptest::prelude::*;

use super::*;
use crate::affinity::{Arrivals, Popularity};
use crate::block_keys::{BlockKey, KeyChain, token_keys};
use crate::rates::{LearnedRates, LoadRates, RatePool, Samples};

const BLOCK: u32 = 16;

fn idle(replica: usize) -> Candidate {
    Candidate {
        replica,
        matched: 0,
        loaded: 0,
        read: 0,
        load_seconds: 0.0,
        in_flight: 0,
        pending: 0,
        context: 0,
        capacity: 1_000_000,
        kv_use: 0.0,
        budget: 8192,
        overdue: 0.0,
        rates: Rates::default(),
        time_left: f64::INFINITY,
        most_beside: u32::MAX,
        doubtful: false,
    }
}

/// A replica that decodes twenty sequences of two thousand tokens, and has the beginning of the
/// prompt.
fn busy(replica: usize, matched: u32) -> Candidate {
    Candidate { matched, in_flight: 20, context: 40_000, ..idle(replica) }
}

fn fleet(utilisation: f64) -> Conditions {
    Conditions { nominal: Rates::default(), utilisation }
}

fn decide(tokens: u32, candidates: &[Candidate], utilisation: f64, seed: u64) -> Decision {
    let arrivals = Arrivals::empty();
    let ask = PricingInput { tokens, output: 200.0, long_output: 600.0, arrivals: &arrivals };
    place(&ask, candidates, &fleet(utilisation), &mut Vec::new(), &mut fastrand::Rng::with_seed(seed)).unwrap()
}

fn chosen(tokens: u32, candidates: &[Candidate], utilisation: f64) -> usize {
    decide(tokens, candidates, utilisation, 1).choice().candidate.replica
}

fn keys(seed: u32, tokens: u32) -> Vec<BlockKey> {
    token_keys(KeyChain::new("", ""), &(seed..seed + tokens).collect::<Vec<_>>(), BLOCK as usize)
}

fn assert_close(left: f64, right: f64) {
    assert!((left - right).abs() <= 1e-9 * right.abs().max(1.0), "{left} instead of {right}");
}

#[test]
fn every_cost_term_matches_a_calculation_by_hand() {
    let rates = Rates { step: 0.01, prefill: 1e-4, attention: 1e-8, decode: 1e-3, context: 1e-6, slowness: 2.0 };
    let candidate = Candidate {
        matched: 1_000,
        in_flight: 4,
        pending: 3_000,
        context: 8_000,
        capacity: 9_000,
        kv_use: 0.0,
        budget: 2_048,
        overdue: 0.1,
        rates,
        ..idle(0)
    };
    let arrivals = Arrivals::empty();
    let ask = PricingInput { tokens: 3_000, output: 100.0, long_output: 300.0, arrivals: &arrivals };
    let conditions = Conditions { nominal: Rates { prefill: 1e-4, attention: 0.0, ..rates }, utilisation: 0.5 };
    let decision = place(&ask, &[candidate], &conditions, &mut Vec::new(), &mut fastrand::Rng::with_seed(1)).unwrap();
    let Scored { uncached, terms, .. } = *decision.choice();
    assert_eq!(uncached, 2_000);
    assert_close(terms.queue, 1e-4 * 3_000.0 * 2.0);
    assert_close(terms.prefill, (1e-4 * 2_000.0 + 1e-8 * 2_000.0 * (1_000.0 + 1_000.0)) * 2.0);
    let step = 0.01 + 1e-3 * 4.0 + 1e-6 * 8_000.0;
    assert_close(terms.steps, 3.0 * step);
    // 1,100 tokens are too many. One of the four sequences of 2,000 has to end, which happens every
    // 25 steps.
    assert_close(terms.memory, 25.0 * step);
    assert_close(terms.congestion, 2.0 * 1e-4 * 2_000.0);
    assert_close(terms.decode, 0.15 * 100.0 * (step + 4.0 * (1e-3 + 1e-6 * (3_000.0 + 50.0))));
    assert_close(terms.first_token(), terms.queue + terms.prefill + terms.steps + terms.memory);
    assert_close(terms.total(), terms.first_token() + terms.congestion + terms.decode);
    assert_eq!((decision.why, decision.tied, decision.utilisation), (ChoiceReason::Only, 1, 0.5));
    assert_close(decision.choice().finish, terms.first_token() + 1.5 * 300.0 * step + 1.0);
}

#[test]
fn a_long_match_outweighs_a_busy_replica() {
    for (tokens, matched, pending, expected) in [
        (32_000, 32_000, 0, "busy"),
        (8_000, 8_000, 0, "busy"),
        (32_000, 31_000, 10_000, "busy"),
        (1_000, 1_000, 0, "idle"),
        (8_000, 512, 0, "idle"),
        (8_000, 8_000, 20_000, "idle"),
        (64, 0, 0, "idle"),
    ] {
        let busy = Candidate { pending, ..busy(1, matched) };
        let replica = ["idle", "busy"][chosen(tokens, &[idle(0), busy], 0.0)];
        assert_eq!(replica, expected, "{matched} of {tokens} tokens matched, {pending} pending");
    }
}

/// Loads a token in 4 µs, where computing one takes 40, and reads one from a file in another 20.
const TIERS: LowerTiers = LowerTiers { on_host: 0, in_files: 0, loading: 0, reading: 0, rates: LoadRates { load: 4e-6, read: 2e-5 } };

/// A replica whose GPU has so many of a prompt's tokens, and these tiers behind it.
fn tiered(replica: usize, on_gpu: u32, tiers: LowerTiers) -> Candidate {
    let mut candidate = Candidate { matched: on_gpu, ..idle(replica) };
    candidate.add_lower_tiers(&tiers);
    candidate
}

#[test]
fn a_near_copy_goes_before_a_far_one_and_a_far_one_before_computing() {
    let [on_gpu, on_host, in_files] = [
        tiered(1, 7_984, TIERS),
        tiered(2, 0, LowerTiers { on_host: 7_984, ..TIERS }),
        tiered(3, 0, LowerTiers { in_files: 7_984, ..TIERS }),
    ];
    assert_eq!(chosen(8_000, &[idle(0), in_files], 0.0), 3);
    assert_eq!(chosen(8_000, &[idle(0), in_files, on_host], 0.0), 2);
    assert_eq!(chosen(8_000, &[idle(0), in_files, on_host, on_gpu], 0.0), 1);
    let terms = decide(8_000, &[tiered(0, 2_984, LowerTiers { on_host: 7_984, ..TIERS })], 0.0, 1).choice().terms;
    assert_close(terms.load, 0.02);
    assert_close(terms.first_token(), terms.queue + terms.prefill + 0.02 + terms.steps + terms.memory);
}

#[test]
fn what_follows_the_part_in_memory_is_read_from_files_and_loaded() {
    let candidate = tiered(0, 1_000, LowerTiers { on_host: 3_000, in_files: 8_000, ..TIERS });
    assert_eq!((candidate.matched, candidate.loaded, candidate.read), (8_000, 7_000, 5_000));
    assert_close(candidate.load_seconds, 7_000.0 * 4e-6 + 5_000.0 * 2e-5);
    let candidate = tiered(0, 5_000, LowerTiers { on_host: 3_000, in_files: 4_000, ..TIERS });
    assert_eq!((candidate.matched, candidate.loaded, candidate.read), (5_000, 0, 0));
}

#[test]
fn an_idle_fleet_computes_what_loads_more_slowly_and_a_busy_one_spares_it() {
    let [slow, fast] =
        [2.5e-4, 4e-6].map(|load| tiered(1, 0, LowerTiers { on_host: 7_984, rates: LoadRates { load, ..TIERS.rates }, ..TIERS }));
    for (loads, utilisation, expected) in [(slow, 0.0, 0), (slow, 0.9, 1), (fast, 0.0, 1), (fast, 0.9, 1)] {
        assert_eq!(chosen(8_000, &[idle(0), loads], utilisation), expected, "{} s at {utilisation}", loads.load_seconds);
    }
}

#[test]
fn loads_ahead_delay_what_is_loaded_and_nothing_that_is_computed() {
    let busy = LowerTiers { loading: 1_000_000, reading: 100_000, ..TIERS };
    let load = |of| decide(8_000, &[of], 0.0, 1).choice().terms.load;
    assert_close(load(tiered(0, 2_984, LowerTiers { on_host: 7_984, ..busy })), 4.02);
    assert_close(load(tiered(0, 2_984, LowerTiers { in_files: 7_984, ..busy })), 4.02 + 2.1);
    assert_eq!(load(tiered(0, 7_984, busy)), 0.0);
    assert_eq!(chosen(8_000, &[idle(0), tiered(1, 0, LowerTiers { on_host: 7_984, ..busy })], 0.0), 0);
}

#[test]
fn loaded_tokens_need_room_in_the_cache() {
    let full = Candidate { in_flight: 10, context: 6_000, capacity: 10_000, ..idle(0) };
    let on_gpu = Candidate { matched: 7_984, ..full };
    let on_host = Candidate { loaded: 7_984, ..on_gpu };
    assert_eq!(decide(8_000, &[on_gpu], 0.0, 1).choice().terms.memory, 0.0);
    assert!(decide(8_000, &[on_host], 0.0, 1).choice().terms.memory > 0.0);
}

#[test]
fn a_hung_replica_costs_the_time_waited_so_far() {
    let hung = Candidate { in_flight: 3, overdue: 2.0, ..idle(0) };
    assert_eq!(chosen(8_000, &[hung, busy(1, 0)], 0.0), 1);
    let matched = Candidate { matched: 8_000, ..hung };
    assert_eq!(chosen(8_000, &[matched, busy(1, 0)], 0.0), 1, "the match is not worth two seconds");
}

#[test]
fn each_request_in_flight_raises_the_cost_of_the_next() {
    let costs: Vec<f64> =
        (0..50).map(|in_flight| decide(2_000, &[Candidate { in_flight, ..idle(0) }], 0.0, 1).choice().terms.total()).collect();
    assert!(costs.windows(2).all(|pair| pair[0] < pair[1]), "{costs:?}");
    let hung = Candidate { in_flight: 30, ..idle(0) };
    assert_eq!(chosen(2_000, &[hung, Candidate { in_flight: 10, context: 20_000, ..idle(1) }], 0.0), 1);
}

#[test]
fn a_replica_slower_than_its_rates_gets_fewer_requests() {
    let slow = Candidate { rates: Rates { slowness: 3.0, ..Rates::default() }, ..idle(0) };
    assert_eq!(chosen(8_000, &[slow, Candidate { in_flight: 10, ..idle(1) }], 0.0), 1);
}

#[test]
fn equal_replicas_share_evenly_over_and_within_seeds() {
    let equals = [idle(0), idle(1)];
    let first = (0..2_000).filter(|&seed| decide(500, &equals, 0.3, seed).chosen == 0).count();
    assert!((800..1_200).contains(&first), "{first}");
    let arrivals = Arrivals::empty();
    let ask = PricingInput { tokens: 500, output: 200.0, long_output: 600.0, arrivals: &arrivals };
    let mut random = fastrand::Rng::with_seed(9);
    let mut counts = [0; 5];
    let equals: Vec<Candidate> = (0..5).map(idle).collect();
    (0..5_000).for_each(|_| counts[place(&ask, &equals, &fleet(0.3), &mut Vec::new(), &mut random).unwrap().chosen] += 1);
    assert!(counts.iter().all(|count| (800..1_200).contains(count)), "{counts:?}");
}

#[test]
fn the_longest_match_wins_among_near_ties() {
    // A few tokens ahead outweigh the short match, but by less than the estimates' error.
    let matched = Candidate { matched: 160, pending: 200, ..idle(1) };
    for seed in 0..50 {
        let decision = decide(8_000, &[idle(0), matched, idle(2)], 0.0, seed);
        assert!(decision.scored[1].terms.total() > decision.scored[0].terms.total());
        assert_eq!((decision.chosen, decision.why, decision.tied), (1, ChoiceReason::NearTie, 3));
    }
}

#[test]
fn a_doubtful_replica_is_used_only_as_a_last_resort() {
    let doubtful = |replica| Candidate { doubtful: true, matched: 8_000, ..idle(replica) };
    let overloaded = Candidate { pending: 1_000_000, ..busy(1, 0) };
    let decision = decide(8_000, &[doubtful(0), overloaded], 0.0, 1);
    assert_eq!((decision.chosen, decision.why), (1, ChoiceReason::Cheapest));
    let decision = decide(8_000, &[doubtful(0), Candidate { pending: 90_000, ..doubtful(1) }], 0.0, 1);
    assert_eq!((decision.chosen, decision.why), (0, ChoiceReason::LastResort));
}

/// A replica on which a long answer of 600 tokens needs 10 s.
fn ends_in(replica: usize, time_left: f64) -> Candidate {
    Candidate { time_left, matched: 8_000, ..idle(replica) }
}

#[test]
fn an_answer_goes_where_it_can_end_whatever_that_costs() {
    for (time_left, expected) in [(30.0, 0), (10.1, 0), (9.9, 1), (0.0, 1)] {
        let decision = decide(8_000, &[ends_in(0, time_left), busy(1, 0)], 0.0, 1);
        assert_eq!((decision.chosen, decision.why), (expected, ChoiceReason::Cheapest), "{time_left} s left: {:?}", decision.scored[0]);
    }
}

#[test]
fn a_request_waits_rather_than_being_cut_short() {
    let full = Candidate { pending: 1_000_000, ..busy(1, 0) };
    for (time_left, expected) in [(9.9, 0), (3.5, 0), (2.5, 1), (0.0, 1)] {
        let decision = decide(8_000, &[ends_in(0, time_left), full], 0.0, 1);
        assert_eq!(decision.chosen, expected, "{time_left} s left: {decision:?}");
    }
    let both_full = [Candidate { pending: 1_000_000, ..ends_in(0, 5.0) }, full];
    assert_eq!(decide(8_000, &both_full, 0.0, 1).chosen, 1, "waiting for one that ends first is no better");
}

#[test]
fn the_replica_that_leaves_last_is_chosen_when_none_suffices() {
    let dear = Candidate { matched: 0, ..ends_in(1, 9.0) };
    let doubtful = Candidate { doubtful: true, ..idle(2) };
    let decision = decide(8_000, &[ends_in(0, 2.0), dear, doubtful], 0.0, 1);
    assert_eq!((decision.chosen, decision.why), (1, ChoiceReason::EndsFirst), "before one that may be dead");
    assert!(decision.choice().ends_first());
    assert_eq!(decide(8_000, &[ends_in(0, 1.0), ends_in(1, 2.0)], 0.0, 1).chosen, 1, "also where it is cut on both");
    assert_eq!(decide(8_000, &[ends_in(0, 2.0)], 0.0, 1).why, ChoiceReason::EndsFirst, "also where it is the only one");
}

/// Prices of equal replicas that seem to take this many times as long.
fn rates_of_equals(factors: [f64; 4]) -> [Rates; 4] {
    let learned = factors.map(|factor| {
        let Rates { step, prefill, attention, decode, context, slowness } = Rates::default();
        let [step, prefill, attention, decode, context] = [step, prefill, attention, decode, context].map(|part| part * factor);
        let samples = Samples { count: 100.0, spread: 0.0 };
        let rates = Rates { step, prefill, attention, decode, context, slowness };
        LearnedRates { rates, first_tokens: samples, intervals: samples, mean_load: 8.0, learned_at: 0.0 }
    });
    let mean = RatePool::new(learned.iter()).mean(0.0);
    learned.map(|one| mean.rates_of(&one))
}

#[test]
fn a_cached_prefix_counts_in_full_among_equally_fast_replicas() {
    let rates = rates_of_equals([0.9, 1.0, 1.0, 1.1]);
    let mut replicas = [0, 1, 2, 3].map(|replica| Candidate { rates: rates[replica], ..idle(replica) });
    replicas[3].matched = 480;
    for seed in 0..20 {
        let decision = decide(8_000, &replicas, 0.0, seed);
        assert_eq!((decision.chosen, decision.why), (3, ChoiceReason::Cheapest), "of what is cached nothing is given away");
    }
}

#[test]
fn streams_spread_over_equal_replicas_that_decode_at_flat_rates() {
    let rates = rates_of_equals([0.9, 1.0, 1.0, 1.1]).map(|rates| Rates { decode: 0.0, context: 0.0, ..rates });
    let mut replicas = [0, 1, 2, 3].map(|replica| Candidate { rates: rates[replica], ..idle(replica) });
    for seed in 0..20 {
        let chosen = decide(100, &replicas, 0.0, seed).chosen;
        replicas[chosen].in_flight += 1;
    }
    assert_eq!(replicas.map(|replica| replica.in_flight), [5; 4]);
}

#[test]
fn no_decision_is_made_without_candidates() {
    let arrivals = Arrivals::empty();
    let ask = PricingInput { tokens: 1, output: 1.0, long_output: 3.0, arrivals: &arrivals };
    assert_eq!(place(&ask, &[], &fleet(0.0), &mut Vec::new(), &mut fastrand::Rng::with_seed(1)), None);
}

#[test]
fn memory_costs_only_where_it_is_known_to_be_short() {
    let running = Candidate { context: 95_000, ..busy(0, 0) };
    for (capacity, kv_use, short) in [
        (0, 0.0, false),
        (200_000, 0.0, false),
        (100_000, 0.0, true),
        (100_000, 0.95, true),
        (100_000, 0.4, false), // sequences share prefixes
        (200_000, 0.99, false),
    ] {
        let terms = decide(8_000, &[Candidate { capacity, kv_use, ..running }], 0.0, 1).choice().terms;
        assert_eq!(terms.memory > 0.0, short, "capacity {capacity}, in use {kv_use}");
    }
    let full = Candidate { capacity: 100_000, matched: 2_000, ..running };
    assert_eq!(chosen(8_000, &[full, Candidate { replica: 1, ..running }], 0.0), 1, "memory is worth more than a quarter of the prompt");
}

#[test]
fn a_prompt_stays_with_its_prefix_near_saturation() {
    let home = Candidate { pending: 9_000, ..busy(0, 6_000) };
    assert_eq!(chosen(8_000, &[home, idle(1)], 0.0), 1, "when idle, latency rules");
    assert_eq!(chosen(8_000, &[home, idle(1)], 0.9), 0, "when busy, recomputing delays everyone");
}

#[test]
fn a_hot_prefix_spreads_where_a_cold_one_stays() {
    let home = Candidate { pending: 12_000, ..busy(0, 8_000) };
    let (popularity, keys) = (Popularity::default(), keys(0, 8_000));
    let place_it = |arrivals: &Arrivals| {
        let ask = PricingInput { tokens: 8_000, output: 200.0, long_output: 600.0, arrivals };
        place(&ask, &[home, idle(1)], &fleet(0.6), &mut Vec::new(), &mut fastrand::Rng::with_seed(1)).unwrap().choice().candidate.replica
    };
    assert_eq!(place_it(&popularity.arrive(&keys, BLOCK, 0.0)), 0);
    let later: Vec<Arrivals> = (0..40).map(|_| popularity.arrive(&keys, BLOCK, 0.0)).collect();
    assert_eq!(place_it(&later[39]), 1);
}

#[test]
fn a_burst_of_equal_prompts_uses_at_most_two_replicas() {
    for (tokens, utilisation) in [(4_000, 0.5), (8_000, 0.3), (8_000, 0.5), (32_000, 0.0), (32_000, 0.7)] {
        for seed in 0..20 {
            let (popularity, keys) = (Popularity::default(), keys(0, tokens));
            let mut random = fastrand::Rng::with_seed(seed);
            let mut replicas: Vec<Candidate> = (0..4).map(idle).collect();
            for _ in 0..16 {
                let arrivals = popularity.arrive(&keys, BLOCK, 0.0);
                let ask = PricingInput { tokens, output: 200.0, long_output: 600.0, arrivals: &arrivals };
                let decision = place(&ask, &replicas, &fleet(utilisation), &mut Vec::new(), &mut random).unwrap();
                let uncached = decision.choice().uncached;
                let replica = &mut replicas[decision.chosen];
                replica.pending += u64::from(uncached);
                replica.in_flight += 1;
                replica.matched = tokens;
            }
            let counts: Vec<u32> = replicas.iter().map(|replica| replica.in_flight).collect();
            let used = counts.iter().filter(|&&count| count > 0).count();
            assert!(used <= 2, "{tokens} tokens at utilisation {utilisation}, seed {seed}: {counts:?}");
        }
    }
}

#[test]
fn a_replica_has_room_until_three_steps_or_memory_fill() {
    let room = |pending, kv_use, budget| has_room(&Candidate { pending, kv_use, budget, ..idle(0) });
    assert!(room(3 * 8192, 0.97, 8192));
    assert!(!room(3 * 8192 + 1, 0.0, 8192));
    assert!(!room(0, 0.98, 8192));
    assert!(room(3 * u64::from(DEFAULT_TOKEN_BUDGET), f64::NAN, 0), "what is unknown holds nobody back");
}

fn figure() -> impl Strategy<Value = f64> {
    prop_oneof![Just(f64::NAN), Just(-f64::NAN), Just(f64::INFINITY), Just(-1.0), Just(0.0), Just(1e300), 1e-9..10.0]
}

fn any_rates() -> impl Strategy<Value = Rates> {
    (figure(), figure(), figure(), figure(), figure(), figure()).prop_map(|(step, prefill, attention, decode, context, slowness)| Rates {
        step,
        prefill,
        attention,
        decode,
        context,
        slowness,
    })
}

#[test]
fn a_full_engine_is_worth_the_wait_for_a_place() {
    let full = Candidate { in_flight: 16, most_beside: 15, ..idle(0) };
    assert!(!has_room(&full) && has_room(&Candidate { in_flight: 15, ..full }) && has_room(&Candidate { most_beside: u32::MAX, ..full }));
    let memory = |candidate| decide(100, &[candidate], 0.0, 1).choice().terms.memory;
    assert!(memory(full) > 0.0 && memory(Candidate { in_flight: 20, ..full }) > memory(full));
    assert_eq!(memory(Candidate { in_flight: 15, ..full }), 0.0);
    assert_eq!(chosen(100, &[full, Candidate { in_flight: 15, ..idle(1) }], 0.0), 1);
}

fn any_candidate() -> impl Strategy<Value = Candidate> {
    let counts = (any::<u32>(), any::<u32>(), any::<u64>(), any::<u64>(), any::<u64>(), any::<u32>());
    (counts, figure(), figure(), prop_oneof![any_rates(), Just(Rates::default())], figure(), any::<bool>()).prop_map(
        |((matched, in_flight, pending, context, capacity, budget), kv_use, overdue, rates, time_left, doubtful)| Candidate {
            replica: 0,
            matched,
            loaded: matched / 2,
            read: matched / 4,
            load_seconds: overdue,
            in_flight,
            pending,
            context,
            capacity,
            kv_use,
            budget,
            most_beside: if budget % 2 == 0 { u32::MAX } else { budget % 64 },
            overdue,
            rates,
            time_left,
            doubtful,
        },
    )
}

proptest! {
    #[test]
    fn nonsense_never_panics_and_costs_stay_finite(
        candidates in prop::collection::vec(any_candidate(), 1..12), tokens: u32, output in figure(), utilisation in figure(),
        nominal in any_rates(), seed: u64,
    ) {
        let arrivals = Arrivals::empty();
        let ask = PricingInput { tokens, output, long_output: output, arrivals: &arrivals };
        let conditions = Conditions { nominal, utilisation };
        let decision = place(&ask, &candidates, &conditions, &mut Vec::new(), &mut fastrand::Rng::with_seed(seed)).unwrap();
        prop_assert_eq!(decision.scored.len(), candidates.len());
        for scored in &decision.scored {
            prop_assert!(scored.terms.total().is_finite() && scored.terms.total() >= 0.0, "{:?}", scored);
        }
        let standing = |scored: &Scored| if scored.candidate.doubtful { 2 } else { u8::from(scored.ends_first()) };
        let (own, cost) = (standing(decision.choice()), decision.choice().terms.total());
        for other in &decision.scored {
            let other_cost = other.terms.total();
            let near = cost <= (other_cost * 1.02).max(other_cost + 0.001);
            // A candidate that ends first goes before sound ones that are full, and is not chosen
            // by its cost.
            let is_passed_over = own == 1 && (standing(other) == 1 || !has_room(&other.candidate));
            prop_assert!(is_passed_over || if standing(other) == own { near } else { standing(other) > own }, "{:?}", decision);
        }
        prop_assert_eq!(decision.chosen, place(&ask, &candidates, &conditions, &mut Vec::new(), &mut fastrand::Rng::with_seed(seed)).unwrap().chosen);
    }

    #[test]
    fn an_answer_avoids_a_replica_that_ends_before_it_can(
        loads in prop::array::uniform2((0..200_u32, 0..100_000_u64, 0..300_000_u64)), (tokens, matched) in (1..50_000_u32, 0..50_000_u32),
        (output, long_output) in (0.0..4000.0_f64, 0.0..4000.0_f64), utilisation in 0.0..1.0, seed: u64,
    ) {
        let [(in_flight, pending, context), other] = loads;
        let ending = Candidate { matched, in_flight, pending, context, time_left: 30.0, ..idle(0) };
        let staying = Candidate { in_flight: other.0, pending: other.1, context: other.2, ..idle(1) };
        let arrivals = Arrivals::empty();
        let ask = PricingInput { tokens, output, long_output, arrivals: &arrivals };
        let decision = place(&ask, &[ending, staying], &fleet(utilisation), &mut Vec::new(), &mut fastrand::Rng::with_seed(seed)).unwrap();
        let terms = decision.scored[0].terms;
        let step = ending.rates.step_seconds(in_flight, context);
        let needed = terms.first_token() + 1.5 * long_output * step + 1.0;
        let expected = terms.first_token() + output * step + 1.0;
        let is_tight = !has_room(&staying) && has_room(&ending) && expected <= 30.0 + 1e-9;
        prop_assert!(decision.chosen == 1 || needed <= 30.0 + 1e-9 || is_tight, "{:?}", decision);
        // The end of a replica does not count against it if there is time.
        let endless = [Candidate { time_left: f64::INFINITY, ..ending }, staying];
        if needed < 30.0 - 1e-9 {
            let without = place(&ask, &endless, &fleet(utilisation), &mut Vec::new(), &mut fastrand::Rng::with_seed(seed)).unwrap();
            prop_assert_eq!(decision.chosen, without.chosen);
        }
    }

    #[test]
    fn a_decision_remembers_the_chosen_and_the_cheapest_candidates(loads in prop::collection::vec(0..40_u64, 1..300), seed: u64) {
        // Few distinct loads, so that many candidates cost the same.
        let candidates: Vec<Candidate> =
            loads.iter().enumerate().map(|(replica, load)| Candidate { pending: load * 1_000, ..idle(replica) }).collect();
        let decision = decide(1_000, &candidates, 0.5, seed);
        let chosen = decision.choice().candidate;
        prop_assert_eq!((decision.candidates, chosen), (candidates.len(), candidates[chosen.replica]));
        let mut expected = candidates.clone();
        if candidates.len() > MAX_RECORDED {
            expected.sort_by_key(|candidate| (candidate.replica != chosen.replica, candidate.pending));
            expected.truncate(MAX_RECORDED);
        }
        let remembered: Vec<Candidate> = decision.scored.iter().map(|scored| scored.candidate).collect();
        prop_assert_eq!(remembered, expected);
    }

    #[test]
    fn a_replica_with_nonsensical_rates_loses_to_any_other(rates in any_rates(), seed: u64) {
        let parts = [rates.step, rates.prefill, rates.attention, rates.decode, rates.context];
        prop_assume!(parts.iter().any(|part| part.is_nan()) || rates.slowness.is_nan());
        let nonsense = Candidate { rates, in_flight: 1, context: 1, pending: 1, ..idle(0) };
        let overloaded = Candidate { pending: 10_000_000, ..busy(1, 0) };
        prop_assert_eq!(decide(1_000, &[nonsense, overloaded], 0.5, seed).chosen, 1);
    }

    #[test]
    fn a_longer_match_never_costs_more(tokens in 1..200_000_u32, matched in (0..200_000_u32, 0..200_000_u32), utilisation in 0.0..1.0) {
        let at = |matched| busy(0, matched);
        let cost = |candidate| decide(tokens, &[candidate], utilisation, 1).choice().terms.total();
        let (less, more) = (matched.0.min(matched.1), matched.0.max(matched.1));
        prop_assert!(cost(at(more)) <= cost(at(less)) + 1e-9);
    }
}
