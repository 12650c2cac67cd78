use super::*;
use crate::engine::FoundTokens;

fn record(ttft: f64, tpot: f64, cached: u32) -> RequestRecord {
    let (first, last) = (1.0 + ttft, 1.0 + ttft + tpot * 10.0);
    RequestRecord {
        arrived: 1.0,
        first,
        last,
        prompt: 100,
        output: 11,
        found: FoundTokens { cached, loaded: cached / 2 },
        replica: 0,
        cut: false,
    }
}

#[test]
fn a_percentile_is_the_least_value_covering_its_share() {
    let sorted: Vec<f64> = (1..=10).map(f64::from).collect();
    assert_eq!([0, 1, 50, 90, 91, 100].map(|percent| percentile(&sorted, percent)), [1.0, 1.0, 5.0, 9.0, 10.0, 10.0]);
    assert_eq!(percentile(&[], 50), 0.0);
}

#[test]
fn measures_are_computed_from_the_records() {
    let short = RequestRecord { output: 1, ..record(1.0, 9.0, 0) };
    let records = vec![record(1.0, 0.05, 50), record(3.0, 0.05, 100), record(1.0, 0.3, 0), short];
    let run = RunResult { records, busy: vec![1.0, 3.0], preemptions: 2 };
    let measures = measure(&run, &Objectives::default());
    assert!((measures.ttft_mean - 1.5).abs() < 1e-9 && (measures.ttft_p90 - 3.0).abs() < 1e-9);
    assert!((measures.tpot_mean - 0.4 / 3.0).abs() < 1e-9, "an answer of one token has no second one");
    assert!((measures.hit_rate - 150.0 / 400.0).abs() < 1e-9 && (measures.loaded_rate - 75.0 / 400.0).abs() < 1e-9);
    assert!((measures.goodput - 0.5).abs() < 1e-9, "one was too late, one too slow");
    assert!((measures.imbalance - 1.5).abs() < 1e-9);
}

#[test]
fn a_cut_answer_is_not_good_and_has_no_tpot() {
    let cut = RequestRecord { cut: true, ..record(1.0, 0.01, 0) };
    let run = RunResult { records: vec![record(1.0, 0.05, 0), cut], busy: vec![1.0], preemptions: 0 };
    let measures = measure(&run, &Objectives::default());
    assert_eq!((measures.cut, measures.goodput), (0.5, 0.5));
    assert!((measures.tpot_mean - 0.05).abs() < 1e-9);
}

#[test]
fn an_empty_run_measures_as_zeros() {
    let measures = measure(&RunResult { records: Vec::new(), busy: vec![0.0], preemptions: 0 }, &Objectives::default());
    assert_eq!((measures.ttft_mean, measures.hit_rate, measures.imbalance), (0.0, 0.0, 0.0));
}
