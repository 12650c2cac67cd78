//! Tests of the load generator, against the simulated engine and by itself.

use clap::Parser;
use proptest::prelude::*;

use super::events::EventScanner;
use super::histogram::Histogram;
use super::report::Outcome;
use super::*;
use crate::tests::{RunningEngine, fixture};

#[derive(Parser)]
struct Alone {
    #[command(flatten)]
    args: LoadArgs,
}

fn load_args(target: &str, flags: &[&str]) -> LoadArgs {
    let words = ["load", "--target", target].into_iter().chain(flags.iter().copied());
    Alone::try_parse_from(words).expect("flags written in code are valid").args
}

fn target(engine: &RunningEngine) -> String {
    format!("unix:{}", engine.socket.display())
}

#[tokio::test]
async fn a_load_counts_requests_events_and_times() {
    let engine = RunningEngine::start(&[]).await;
    for (path, events) in [("/v1/completions", 6), ("/v1/chat/completions", 7)] {
        let flags = ["--streams", "4", "--requests", "20", "--max-tokens", "5", "--path", path];
        let report = run_load(load_args(&target(&engine), &flags)).await.unwrap();
        assert_eq!((report.requests, report.succeeded, report.errors), (20, 20, Errors::default()));
        assert_eq!(report.events, 20 * events);
        assert!(report.first_event_ms.p50 >= 2.0 && report.request_ms.p50 >= 10.0, "{report}");
        assert!(report.to_string().contains("20 succeeded, 0 failed"));
    }
    let flags = ["--requests", "5", "--no-stream", "--max-tokens", "3", "--model", "tiny"];
    let report = run_load(load_args(&target(&engine), &flags)).await.unwrap();
    assert_eq!((report.succeeded, report.events), (5, 0));
}

#[tokio::test]
async fn failures_are_counted_by_kind() {
    let engine = RunningEngine::start(&[]).await;
    let flags = ["--requests", "3", "--model", "nope"];
    let report = run_load(load_args(&target(&engine), &flags)).await.unwrap();
    assert_eq!(report.errors, Errors { status: 3, ..Errors::default() });

    let flags = ["--requests", "4", "--streams", "4", "--max-tokens", "3000"];
    let load = tokio::spawn(run_load(load_args(&target(&engine), &flags)));
    engine.wait_for_metric("vllm:num_requests_running", 4.0).await;
    engine.post("/sim/fault", r#"{"kind":"error_event"}"#).await;
    assert_eq!(load.await.unwrap().unwrap().errors.error_event, 4);

    let load = tokio::spawn(run_load(load_args(&target(&engine), &flags)));
    engine.wait_for_metric("vllm:num_requests_running", 4.0).await;
    engine.shutdown.cancel();
    assert_eq!(load.await.unwrap().unwrap().errors.aborted, 4);
}

#[tokio::test]
async fn a_request_that_takes_too_long_is_an_error() {
    let engine = RunningEngine::start(&[]).await;
    let flags = ["--requests", "2", "--max-tokens", "3000", "--request-timeout", "50ms"];
    let report = run_load(load_args(&target(&engine), &flags)).await.unwrap();
    assert_eq!(report.errors, Errors { timeout: 2, ..Errors::default() });
    engine.wait_for_metric("vllm:num_requests_running", 0.0).await;
}

#[tokio::test]
async fn a_target_that_is_not_there_is_named() {
    let error = run_load(load_args("unix:/nowhere/engine.sock", &[])).await.unwrap_err();
    assert!(error.to_string().contains("unix:/nowhere/engine.sock"), "{error}");
}

#[test]
fn loads_that_begin_apart_share_no_prompt_and_spread_their_answers_alike() {
    let body = |flags: &[&str], number| request_body(&load_args("http://127.0.0.1:1", flags), number);
    assert_ne!(body(&[], 0), body(&[], 1_000_000));
    let spread = ["--max-tokens", "192", "--least-tokens", "64"];
    let args = load_args("http://127.0.0.1:1", &spread);
    let lengths: Vec<u32> = (0..1_000).map(|number| tokens_to_ask_for(&args, number)).collect();
    assert!(lengths.iter().all(|tokens| (64..=192).contains(tokens)), "{lengths:?}");
    let mean = lengths.iter().sum::<u32>() / 1_000;
    assert!((120..=136).contains(&mean), "mean {mean}");
    assert_eq!(body(&spread, 7), body(&spread, 7), "the same prompt asks for the same");
}

#[test]
fn targets_are_read_as_they_are_written() {
    for text in ["http://127.0.0.1:8000", "unix:/run/x.sock"] {
        assert_eq!(text.parse::<Target>().unwrap().to_string(), text);
    }
    for text in ["https://a:1", "localhost:8000", "http://a", "http://a:1/v1"] {
        assert!(text.parse::<Target>().is_err(), "{text}");
    }
}

/// The body of a recorded stream, without its HTTP chunks.
fn recorded(name: &str) -> Vec<u8> {
    crate::tests::Answer::parse(&fixture(name)).body
}

proptest! {
    #[test]
    fn events_are_read_the_same_wherever_they_are_split(cuts in prop::collection::vec(0..3000_usize, 0..30)) {
        for (name, outcome, events) in [
            ("sse_chat_stream_usage.raw", Outcome::Success, 9),
            ("sse_sigterm_abort_midstream.raw", Outcome::Aborted, 12),
            ("sse_error_midstream_worker_killed.raw", Outcome::ErrorEvent, 13),
            ("sse_responses.raw", Outcome::Success, 10),
        ] {
            let body = recorded(name);
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % body.len()).collect();
            cuts.extend([0, body.len()]);
            cuts.sort_unstable();
            let mut scanner = EventScanner::default();
            let read: u64 = cuts.windows(2).map(|cut| scanner.scan(&body[cut[0]..cut[1]])).sum();
            prop_assert_eq!((read, scanner.outcome()), (events, outcome), "{}", name);
        }
    }

    #[test]
    fn quantiles_are_close_to_the_times(mut micros in prop::collection::vec(0..10_000_000_u64, 1..200)) {
        let mut histogram = Histogram::default();
        for time in &micros {
            histogram.add(Duration::from_micros(*time), 1);
        }
        micros.sort_unstable();
        let median = micros[(micros.len() - 1) / 2] as f64 / 1000.0;
        let ours = histogram.quantile(0.5);
        // The longest time is kept as seconds, so its last digits may differ.
        prop_assert!(ours >= median - 1e-6 && ours <= median * 1.04 + 0.001, "{} for {}", ours, median);
    }
}

#[test]
fn a_stream_without_its_end_is_truncated() {
    let body = recorded("sse_chat_stream_usage.raw");
    let cut = body.len() - b"data: [DONE]\n\n".len();
    let mut scanner = EventScanner::default();
    scanner.scan(&body[..cut]);
    assert_eq!(scanner.outcome(), Outcome::Truncated);
}
