use hostler_placement::affinity::{Arrivals, Popularity};
use hostler_placement::cost::{self, Candidate, Conditions, Decision as Placed, PricingInput, place};
use hostler_placement::rates;
use proptest::prelude::*;

use super::*;

fn wire_rates(rates: &rates::Rates) -> Rates {
    let rates::Rates { step, prefill, attention, decode, context, slowness } = *rates;
    Rates { step, prefill, attention, decode, context, slowness }
}

fn wire_scored(index: usize, scored: &cost::Scored) -> Scored {
    let cost::Terms { queue, prefill, load, steps, memory, congestion, decode } = scored.terms;
    let Candidate {
        matched,
        loaded,
        read,
        load_seconds,
        in_flight,
        pending,
        context,
        capacity,
        kv_use,
        budget,
        overdue,
        time_left,
        doubtful,
        ..
    } = scored.candidate;
    Scored {
        replica: format!("n{index}/0"),
        matched,
        loaded,
        read,
        load_seconds,
        uncached: scored.uncached,
        in_flight,
        pending,
        context,
        capacity,
        kv_use,
        budget,
        overdue,
        doubtful,
        age: 0.01,
        rates: Some(wire_rates(&scored.candidate.rates)),
        terms: Some(Terms { queue, prefill, load, steps, memory, congestion, decode }),
        time_left: Some(time_left).filter(|left| left.is_finite()),
        finish: scored.finish,
    }
}

/// This decision as a router would send it.
fn decision_of(placed: &Placed, tokens: u32, output: f64) -> Decision {
    Decision {
        id: "00000000000000ab".into(),
        path: "/v1/chat/completions".into(),
        model: "m".into(),
        at_ms: 1_700_000_000_123,
        attempt: 1,
        level: "exact".into(),
        tokens,
        output,
        long_output: 3.0 * output,
        why: "cheapest".into(),
        tied: 1,
        utilisation: placed.utilisation,
        nominal: Some(wire_rates(&placed.nominal)),
        chosen: u32::try_from(placed.chosen).unwrap(),
        scored: placed.scored.iter().enumerate().map(|(index, scored)| wire_scored(index, scored)).collect(),
        candidates: u32::try_from(placed.candidates).unwrap(),
        ..Decision::default()
    }
}

fn candidate(matched: u32, in_flight: u32) -> Candidate {
    Candidate {
        replica: 0,
        matched,
        loaded: 0,
        read: 0,
        load_seconds: 0.0,
        in_flight,
        pending: 700,
        context: 9000,
        capacity: 65_536,
        kv_use: 0.1,
        budget: 2048,
        overdue: 0.0,
        rates: rates::Rates::default(),
        time_left: f64::INFINITY,
        most_beside: u32::MAX,
        doubtful: false,
    }
}

fn decided(candidates: &[Candidate]) -> Decision {
    let arrivals = Arrivals::empty();
    let ask = PricingInput { tokens: 1264, output: 200.0, long_output: 600.0, arrivals: &arrivals };
    let conditions = Conditions { nominal: rates::Rates::default(), utilisation: 0.5 };
    decision_of(&place(&ask, candidates, &conditions, &mut Vec::new(), &mut fastrand::Rng::with_seed(1)).unwrap(), 1264, 200.0)
}

#[test]
fn the_chosen_replica_comes_first_and_others_by_cost() {
    let mut decision = decided(&[candidate(0, 9), candidate(1024, 1), candidate(512, 1)]);
    assert_eq!(decision.chosen, 1);
    decision.first_token = Some(0.0421);
    decision.cached = Some(1008);
    let lines = text(&decision);
    let text = lines.join("\n");
    assert!(lines[0].starts_with("2023-11-14T22:13:20.123Z  00000000000000ab  /v1/chat/completions  model m"), "{text}");
    assert!(lines[2].starts_with("the cheapest of 3 candidates; utilisation of the fleet 0.500"), "{text}");
    let rows: Vec<&String> = lines.iter().skip(5).take(4).collect();
    assert!(rows[0].contains("REPLICA") && rows[1].starts_with("*  n1/0"), "{text}");
    assert!(rows[2].contains("n2/0") && rows[3].contains("n0/0"), "{text}");
    assert!(text.contains("first token") && text.contains("42.10 ms") && text.contains("1008 of 1264"), "{text}");
}

#[test]
fn unknown_facts_are_shown_as_unknown() {
    let text = text(&decided(&[candidate(0, 0)])).join("\n");
    assert!(text.contains("not known: it has not come, or the answer is no stream"), "{text}");
    assert!(super::text(&Decision::default()).len() > 3, "an empty answer is no reason to fail");
}

#[test]
fn a_replica_near_its_end_shows_its_time_left() {
    let ends = Candidate { time_left: 4.0, ..candidate(1024, 1) };
    let mut decision = decided(&[ends, candidate(0, 9)]);
    assert_eq!(decision.chosen, 1);
    let finish = decision.scored[0].finish;
    assert!(finish > 4.0, "{finish}");
    let output = text(&decision).join("\n");
    assert!(output.contains(&format!("ends in 4.0 s; this answer needs about {finish:.1} s")), "{output}");
    assert!(output.contains("200 expected of the answer and hardly more than 600;"), "{output}");
    let json = serde_json::to_value(&decision).unwrap();
    assert_eq!((&json["scored"][0]["time_left"], &json["scored"][0]["finish"]), (&json!(4.0), &json!(finish)));
    assert!(json["scored"][1]["time_left"].is_null() && json["long_output"] == 600.0);
    decision.why = "ends_first".into();
    assert!(text(&decision).join("\n").contains("none of 2 candidates can be expected to finish the answer before it leaves"));
}

#[test]
fn json_uses_wire_names_and_null_for_unknowns() {
    let json = serde_json::to_value(decided(&[candidate(1024, 1)])).unwrap();
    assert_eq!(json["scored"][0]["matched"], 1024);
    assert_eq!(json["scored"][0]["uncached"], 240);
    assert!(json["scored"][0]["terms"]["prefill"].as_f64().unwrap() > 0.0 && json["nominal"]["slowness"] == 1.0);
    assert!(json["first_token"].is_null() && json["cached"].is_null());
}

#[test]
fn numbers_have_four_significant_digits() {
    for (value, shown) in [
        (0.0, "0"),
        (1.0, "1"),
        (0.000_02, "0.00002"),
        (12.345_6, "12.35"),
        (1_234_567.0, "1234567"),
        (0.999_99, "1"),
        (f64::INFINITY, "inf"),
    ] {
        assert_eq!(figure(value), shown);
    }
}

proptest! {
    #[test]
    fn the_explained_terms_equal_those_of_the_decision(
        (matched, loaded, in_flight, pending, context) in (0..4000u32, 0..4000u32, 0..300u32, 0..50_000u64, 0..400_000u64),
        (capacity, kv_use, overdue, slowness) in (prop_oneof![Just(0u64), 1000..500_000u64], 0.0..1.0f64, 0.0..5.0f64, 0.1..10.0f64),
        (tokens, output, utilisation, arrivals) in (1..4000u32, 0.0..3000.0f64, 0.0..1.0f64, 0..4usize),
    ) {
        let rates = rates::Rates { slowness, ..rates::Rates::default() };
        let loaded = loaded.min(matched).min(tokens);
        let one = Candidate { loaded, load_seconds: overdue / 3.0, pending, context, capacity, kv_use, overdue, rates, ..candidate(matched, in_flight) };
        let popularity = Popularity::default();
        let keys: Vec<u64> = (0..u64::from(tokens / 16)).collect();
        let seen = (0..=arrivals).map(|_| popularity.arrive(&keys, 16, 0.0)).last().unwrap();
        let ask = PricingInput { tokens, output, long_output: 2.0 * output, arrivals: &seen };
        let conditions = Conditions { nominal: rates::Rates::default(), utilisation };
        let decision = decision_of(&place(&ask, &[one], &conditions, &mut Vec::new(), &mut fastrand::Rng::with_seed(1)).unwrap(), tokens, output);
        let scored = &decision.scored[0];
        let terms = scored.terms.unwrap();
        let expected = [terms.queue, terms.prefill, terms.load, terms.steps, terms.memory, terms.congestion, terms.decode];
        for (worked, expected) in arithmetic::terms(&decision, scored).iter().skip(1).zip(expected.map(milliseconds)) {
            prop_assert!((worked.value - expected).abs() <= 1e-6 * expected.max(1.0), "{worked:?} but {expected}");
        }
        let lines = arithmetic::break_down(&decision, scored);
        prop_assert!(lines.last().unwrap().contains("total"));
    }
}

#[test]
fn the_end_of_an_answer_is_told_once_it_is_known() {
    assert_eq!(end_words(&Decision::default()), None);
    let ended = Decision { status: Some(500), end: "error".into(), ..Decision::default() };
    assert_eq!(end_words(&ended).unwrap(), "the answer: status 500, error");
    let streamed = Decision { status: Some(200), end: "engine_lost".into(), between_tokens: Some(0.0125), ..Decision::default() };
    assert_eq!(end_words(&streamed).unwrap(), "the answer: status 200, engine lost, 12.50 ms between tokens");
}
