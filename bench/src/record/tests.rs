//! Figures computed from samples.

use proptest::prelude::*;

use super::histogram::upper_bound;
use super::*;

const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// A complete answer of 11 tokens in a second, the first after 100 ms.
fn complete() -> Sample {
    Sample {
        kind: "short",
        late: Duration::ZERO,
        first: Some(ms(100)),
        whole: ms(1100),
        prompt_tokens: 50,
        cached_tokens: None,
        output_tokens: 11,
        outcome: Outcome::Complete,
    }
}

fn recorder(limits: Limits) -> (Recorder, Instant) {
    let start = Instant::now() + Duration::from_secs(100);
    (Recorder::new(start, None, limits), start)
}

fn near(value: f64, expected: f64) -> bool {
    (value - expected).abs() <= expected.abs() * 0.04
}

#[test]
fn totals_cover_all_requests() {
    let (recorder, start) = recorder(Limits::default());
    for second in 0..10 {
        let cached_tokens = (second < 5).then_some(20);
        recorder.record(start + Duration::from_secs(second), Sample { cached_tokens, ..complete() }, &[100_000; 10]);
    }
    let all = recorder.figures(None).all;
    assert_eq!((all.requests, all.complete, all.failed.len()), (10, 10, 0));
    assert!(near(all.seconds, 10.1), "{}", all.seconds);
    assert!(near(all.output_tokens_per_second, 110.0 / 10.1) && near(all.prompt_tokens_per_second, 500.0 / 10.1));
    assert_eq!((all.prompt_tokens_mean, all.output_tokens_mean), (Some(50.0), Some(11.0)));
    assert_eq!(all.cached_share, Some(0.4), "of the answers that said it");
    assert_eq!((all.ttft_ms.count, all.itl_ms.count, all.tpot_ms.count, all.e2e_ms.count), (10, 100, 10, 10));
    for (quantiles, expected) in [(all.ttft_ms, 100.0), (all.itl_ms, 100.0), (all.tpot_ms, 100.0), (all.e2e_ms, 1100.0)] {
        assert!(
            [quantiles.mean, quantiles.p50, quantiles.p99, quantiles.max].into_iter().all(|time| near(time, expected)),
            "{quantiles:?}"
        );
    }
    assert_eq!((all.goodput, all.met), (None, None));
}

#[test]
fn warm_up_requests_show_only_in_the_series() {
    let (recorder, start) = recorder(Limits::default());
    recorder.record(start - ms(500), complete(), &[100_000; 10]);
    let figures = recorder.figures(None);
    assert_eq!(figures.all.requests, 0);
    let second = figures.series[0];
    assert_eq!((second.at, second.complete, second.ttft_p50_ms), (0, 1, 0.0), "its first token came before the start");
    assert_eq!(second.tokens, 7, "tokens at 0, 100, … 600 ms");
}

#[test]
fn an_even_load_counts_tokens_that_arrived_in_time() {
    let start = Instant::now() + Duration::from_secs(100);
    let recorder = Recorder::new(start, Some(start + Duration::from_secs(2)), Limits::default());
    // The answer's 11 tokens come from 600 ms before the start to 400 ms after it: 5 of them in
    // time.
    recorder.record(start - ms(700), complete(), &[100_000; 10]);
    recorder.record(start + ms(500), complete(), &[100_000; 10]);
    // 4 of the tokens come in time.
    recorder.record(start + ms(1550), complete(), &[100_000; 10]);
    recorder.record(start + ms(300), Sample { outcome: Outcome::Broken, ..complete() }, &[100_000; 10]);
    let all = recorder.figures(None).all;
    assert_eq!((all.requests, all.complete), (3, 2), "those that were due");
    assert_eq!(all.seconds, 2.0);
    assert_eq!(all.requests_per_second, 1.0, "those that ended");
    assert!(near(all.output_tokens_per_second, (5.0 + 11.0 + 4.0) / 2.0), "{all:?}");
    assert_eq!(all.prompt_tokens_per_second, 50.0);
}

#[test]
fn tokens_count_in_the_second_of_their_arrival() {
    let (recorder, start) = recorder(Limits::default());
    let slow = Sample { first: Some(ms(900)), whole: ms(3500), output_tokens: 5, ..complete() };
    recorder.record(start, slow, &[0, 200_000, 2_000_000, 0]);
    recorder.live.begin();
    let in_flight = recorder.live.begin();
    recorder.tick(Some(0.5));
    drop(in_flight);
    let series = recorder.figures(None).series;
    assert_eq!(series.iter().map(|second| second.tokens).collect::<Vec<_>>(), [2, 1, 0, 2]);
    assert_eq!(series.iter().map(|second| second.complete).collect::<Vec<_>>(), [0, 0, 0, 1]);
    assert!(near(series[0].ttft_p50_ms, 900.0) && series[1].ttft_p50_ms == 0.0);
    assert_eq!((series[0].in_flight, series[0].kv_use), (1, Some(0.5)));
}

#[test]
fn several_kinds_of_requests_are_shown_separately() {
    let (recorder, start) = recorder(Limits::default());
    recorder.record(start, complete(), &[]);
    assert!(recorder.figures(None).kinds.is_empty());
    recorder.record(start, Sample { kind: "long", outcome: Outcome::Status(429), first: None, ..complete() }, &[]);
    let figures = recorder.figures(None);
    assert_eq!(figures.kinds.keys().collect::<Vec<_>>(), ["long", "short"]);
    assert_eq!(figures.all.failed, [("status 429".to_owned(), 1)].into());
    assert_eq!((figures.all.requests, figures.all.complete, figures.kinds["long"].requests), (2, 1, 1));
}

#[test]
fn a_good_request_meets_every_limit() {
    let limits = Limits { ttft: Some(ms(100)), itl: Some(ms(100)), e2e: Some(ms(1100)) };
    let (recorder, start) = recorder(limits);
    let others = [
        Sample { first: Some(ms(101)), ..complete() },
        Sample { output_tokens: 10, ..complete() },
        Sample { whole: ms(1200), output_tokens: 100, ..complete() },
        Sample { outcome: Outcome::Truncated, ..complete() },
        // This answer is not a stream: its first token came with the last.
        Sample { first: None, ..complete() },
    ];
    for sample in std::iter::once(complete()).chain(others) {
        recorder.record(start, sample, &[]);
    }
    let all = recorder.figures(None).all;
    assert_eq!(all.met, Some(1.0 / 6.0));
    assert!(near(all.goodput.unwrap(), 1.0 / 1.2), "{:?}", all.goodput);
}

#[test]
fn an_answer_of_one_token_has_no_time_between_tokens() {
    assert_eq!(Sample { output_tokens: 1, ..complete() }.tpot(), None);
    assert_eq!(Sample { output_tokens: 0, ..complete() }.tpot(), None);
    assert_eq!(complete().tpot(), Some(ms(100)));
}

proptest! {
    #[test]
    fn quantiles_are_close_to_the_times(mut micros in prop::collection::vec(0..10_000_000_u64, 1..200), parts in 1..4_usize) {
        let mut histograms = vec![Histogram::default(); parts];
        for (number, time) in micros.iter().enumerate() {
            histograms[number % parts].add(Duration::from_micros(*time));
        }
        let mut histogram = Histogram::default();
        histograms.iter().for_each(|part| histogram.merge(part));
        micros.sort_unstable();
        let quantiles = histogram.quantiles();
        let median = micros[(micros.len() - 1) / 2] as f64 / 1000.0;
        prop_assert!(quantiles.p50 >= median && quantiles.p50 <= median * 1.04 + 0.001, "{} for {}", quantiles.p50, median);
        prop_assert_eq!(quantiles.max, *micros.last().unwrap() as f64 / 1000.0);
        let mean = micros.iter().sum::<u64>() as f64 / micros.len() as f64 / 1000.0;
        prop_assert!((quantiles.mean - mean).abs() < 1e-6);
    }

    #[test]
    fn a_bucket_ends_little_above_every_time_in_it(micros in any::<u64>()) {
        let bound = upper_bound(histogram::bucket(micros));
        prop_assert!(bound >= micros && bound - micros <= micros / 32 + 1);
    }
}
