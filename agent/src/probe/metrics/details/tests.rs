//! Recorded pages and synthetic histograms.

use super::*;

const LOADED: &str = include_str!("../../../../../tests/fixtures/vllm/metrics_0.32_loaded.txt");
const RUST: &str = include_str!("../../../../../tests/fixtures/vllm/metrics_0.32_rust_frontend_idle.txt");

#[test]
fn a_loaded_engine_reports_the_lengths_of_its_requests() {
    let details = parse_details(LOADED);
    assert_eq!((details.requests, details.longest_prompt, details.longest_answer), (53, Some(1_000), Some(200)));
    assert_eq!(details.deferred, 0);
    assert!(details.queued > 0 && details.queue_seconds > 0.0, "{details:?}");
    assert!(details.gaps > 0 && details.gap_seconds > 0.0, "{details:?}");
}

#[test]
fn an_unused_front_end_has_no_details() {
    let details = parse_details(RUST);
    assert_eq!(
        details,
        EngineDetails { longest_prompt: details.longest_prompt, longest_answer: details.longest_answer, ..EngineDetails::default() }
    );
    assert!(details.longest_prompt.unwrap_or(0) == 0, "{details:?}");
    assert_eq!(parse_details(""), EngineDetails::default());
}

#[test]
fn lengths_beyond_the_histograms_scale_are_not_guessed() {
    let page = "vllm:request_prompt_tokens_bucket{le=\"100.0\"} 3\nvllm:request_prompt_tokens_bucket{le=\"+Inf\"} 4\n";
    assert_eq!(parse_details(page).longest_prompt, None);
}

#[test]
fn histograms_of_several_engines_are_merged() {
    let page = "vllm:request_prompt_tokens_bucket{engine=\"0\",le=\"10.0\"} 2\nvllm:request_prompt_tokens_bucket{engine=\"0\",le=\"20.0\"} 2\n\
        vllm:request_prompt_tokens_bucket{engine=\"0\",le=\"+Inf\"} 2\n\
        vllm:request_prompt_tokens_bucket{engine=\"1\",le=\"10.0\"} 0\nvllm:request_prompt_tokens_bucket{engine=\"1\",le=\"20.0\"} 1\n\
        vllm:request_prompt_tokens_bucket{engine=\"1\",le=\"+Inf\"} 1\n";
    assert_eq!(parse_details(page).longest_prompt, Some(20));
}

#[test]
fn requests_waiting_for_other_reasons_than_room_are_deferred() {
    let page = "vllm:num_requests_waiting_by_reason{engine=\"0\",reason=\"capacity\"} 9\n\
        vllm:num_requests_waiting_by_reason{engine=\"0\",reason=\"deferred\"} 4\n";
    assert_eq!(parse_details(page).deferred, 4);
}

#[test]
fn metric_details_are_requested_by_name() {
    let path = detailed_path();
    assert!(path.starts_with("/metrics/?name[]=") && path.parse::<http::Uri>().is_ok(), "{path}");
    assert_eq!(path.matches("name[]=").count(), 10);
}
