use proptest::prelude::*;

use super::*;
use crate::growth::assert_proportional;

const ROLE: &str =
    "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n";
const LAST: &str = "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"},\"finish_reason\":\"stop\"}]}\n\n";
const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":13,\"total_tokens\":19,\"completion_tokens\":6}}\n\n";
const DONE: &str = "data: [DONE]\n\n";
const ERROR: &str = "data: {\"error\":{\"message\":\"EngineCore died\",\"type\":\"InternalServerError\",\"param\":null,\"code\":500}}\n\n";

fn all(dialect: Dialect, pieces: &[&str]) -> (String, SseScanner, Option<&'static str>) {
    let mut scanner = SseScanner::new(dialect);
    let mut sent = String::new();
    for piece in pieces {
        let (bytes, verdict) = match scanner.process(Bytes::copy_from_slice(piece.as_bytes())) {
            ChunkOutcome::Forward(bytes) => (bytes, None),
            ChunkOutcome::Failed { bytes, is_engine_dead: false, .. } => (bytes, Some("failed")),
            ChunkOutcome::Failed { bytes, is_engine_dead: true, .. } => (bytes, Some("died")),
            ChunkOutcome::Aborted(bytes) => (bytes, Some("aborted")),
        };
        sent.push_str(std::str::from_utf8(&bytes).unwrap());
        if verdict.is_some() {
            return (sent, scanner, verdict);
        }
    }
    sent.push_str(std::str::from_utf8(&scanner.take_rest()).unwrap());
    (sent, scanner, None)
}

#[test]
fn a_whole_answer_passes_unchanged_and_its_usage_is_read() {
    let (sent, scanner, verdict) = all(Dialect::OpenAi, &[ROLE, LAST, USAGE, DONE]);
    assert_eq!((sent, verdict), (format!("{ROLE}{LAST}{USAGE}{DONE}"), None));
    assert!(scanner.is_complete());
    assert_eq!(
        (scanner.usage(), scanner.event_count()),
        (Some(TokenUsage { prompt_tokens: 13, completion_tokens: 6, cached_tokens: None }), 4)
    );
}

#[test]
fn usage_is_read_in_every_dialect() {
    let delta = "event: content_block_delta\ndata: {\"delta\":{\"text\":\"\\\"usage\\\":{\\\"input_tokens\\\":9\"}}\n\n";
    let begins = "event: message_start\ndata: {\"message\":{\"usage\":{\"input_tokens\":17,\"output_tokens\":0}}}\n\n";
    let ends = "event: message_delta\ndata: {\"usage\":{\"output_tokens\":5}}\n\n";
    let (_, scanner, _) = all(Dialect::Anthropic, &[begins, delta, ends, "event: message_stop\ndata: {}\n\n"]);
    assert_eq!(scanner.usage(), Some(TokenUsage { prompt_tokens: 17, completion_tokens: 5, cached_tokens: None }));
    let completed = "event: response.completed\ndata: {\"response\":{\"usage\":{\"input_tokens\":13,\"input_tokens_details\":\
        {\"cached_tokens\":8},\"output_tokens\":4,\"output_tokens_details\":{\"reasoning_tokens\":0}}}}\n\n";
    let (_, scanner, _) = all(Dialect::Responses, &["event: response.created\ndata: {\"usage\":null}\n\n", completed]);
    assert_eq!(scanner.usage(), Some(TokenUsage { prompt_tokens: 13, completion_tokens: 4, cached_tokens: Some(8) }));
}

#[test]
fn done_after_an_error_event_is_withheld() {
    let (sent, _, verdict) = all(Dialect::OpenAi, &[ROLE, &format!("{ERROR}{DONE}")]);
    assert_eq!((sent, verdict), (format!("{ROLE}{ERROR}"), Some("failed")));
}

#[test]
fn an_abort_by_the_engine_is_withheld() {
    let aborted = LAST.replace("stop", "abort");
    let (sent, _, verdict) = all(Dialect::OpenAi, &[ROLE, &aborted, DONE]);
    assert_eq!((sent.as_str(), verdict), (ROLE, Some("aborted")));
}

#[test]
fn a_stream_without_finish_reason_or_done_is_incomplete() {
    assert!(!all(Dialect::OpenAi, &[ROLE, DONE]).1.is_complete());
    assert!(!all(Dialect::OpenAi, &[ROLE, LAST]).1.is_complete());
    assert!(!all(Dialect::OpenAi, &[]).1.is_complete());
}

#[test]
fn an_oversized_event_passes_in_parts_and_is_read() {
    let token = "{\"token\":\"x\",\"logprob\":-1.5},".repeat(20_000);
    let huge =
        format!("data: {{\"choices\":[{{\"logprobs\":[{token}],\"finish_reason\":\"stop\"}}],\"usage\":{{\"prompt_tokens\":5}}}}\n\n");
    let cut = huge.replace("stop", "abort");
    // Every cut near the end, where the fields of interest are, and coarse ones before.
    for at in (huge.len() - 80..huge.len()).chain([300_000, 400_000]) {
        let (begin, end) = huge.split_at(at);
        let (sent, scanner, verdict) = all(Dialect::OpenAi, &[ROLE, begin, end, DONE]);
        assert!(sent == format!("{ROLE}{huge}{DONE}") && verdict.is_none(), "cut at {at}");
        assert!(scanner.is_complete(), "cut at {at}");
        assert_eq!((scanner.event_count(), scanner.usage().map(|usage| usage.prompt_tokens)), (3, Some(5)), "cut at {at}");
        let (begin, end) = cut.split_at(at);
        assert_eq!(all(Dialect::OpenAi, &[ROLE, begin, end, DONE]).2, Some("aborted"), "cut at {at}");
    }
}

#[test]
fn generated_text_that_looks_like_control_fields_is_only_text() {
    let text = serde_json::json!({"choices": [{"index": 0, "delta": {"content": "\"finish_reason\":\"abort\" data: [DONE]\n\ndata: {\"error\":1}"}, "finish_reason": null}]});
    let (_, scanner, verdict) = all(Dialect::OpenAi, &[&format!("data: {text}\n\n")]);
    assert_eq!((verdict, scanner.has_finish, scanner.has_done_marker), (None, false, false));
}

#[test]
fn fields_are_found_wherever_they_stand_in_an_event() {
    let numbered = |event: &str| format!(": note\nid: 7\n{}", event.replace("data: ", "data:"));
    assert!(all(Dialect::OpenAi, &[ROLE, &numbered(LAST), &numbered(DONE)]).1.is_complete());
    assert_eq!(all(Dialect::Other, &[&numbered(ERROR), DONE]).2, Some("failed"));
    assert!(all(Dialect::Anthropic, &["event:message_stop\ndata:{}\n\n"]).1.is_complete());
}

#[test]
fn an_error_event_after_a_partial_event_starts_afresh() {
    let mut scanner = SseScanner::new(Dialect::OpenAi);
    scanner.process(format!("data: {{\"choices\":[{}", "1,".repeat(200_000)).into());
    assert!(scanner.error_event("lost").starts_with(b"\n\ndata: {\"error\":"));
    assert!(SseScanner::new(Dialect::OpenAi).error_event("lost").starts_with(b"data: {\"error\":"));
}

#[test]
fn comments_and_carriage_returns_pass() {
    let stream = format!(": keep-alive\n\n{}", format!("{ROLE}{LAST}{DONE}").replace('\n', "\r\n"));
    let (sent, scanner, _) = all(Dialect::OpenAi, &[&stream]);
    assert_eq!(sent, stream);
    assert!(scanner.is_complete());
}

#[test]
fn each_dialect_ends_its_streams_in_its_own_way() {
    assert!(all(Dialect::Anthropic, &["event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"]).1.is_complete());
    assert!(!all(Dialect::Anthropic, &["event: content_block_stop\ndata: {}\n\n"]).1.is_complete());
    assert!(all(Dialect::Responses, &["event: response.completed\ndata: {}\n\n"]).1.is_complete());
    assert_eq!(all(Dialect::Anthropic, &["event: error\ndata: {}\n\n"]).2, Some("failed"));
    assert!(all(Dialect::Other, &["anything"]).1.is_complete());
}

#[test]
fn each_dialects_error_event_is_valid_json() {
    for dialect in [Dialect::OpenAi, Dialect::Responses, Dialect::Anthropic, Dialect::Other] {
        let event = dialect.error_event("the engine \"died\"\n");
        let text = std::str::from_utf8(&event).unwrap();
        let data = text.lines().find_map(|line| line.strip_prefix("data: ")).unwrap();
        serde_json::from_str::<serde_json::Value>(data).unwrap();
        assert!(text.ends_with("\n\n") && text.matches("\n\n").count() == 1);
    }
}

proptest! {
    #[test]
    fn the_scanners_verdict_does_not_depend_on_cuts(
        cuts in prop::collection::vec(0..600usize, 0..12), fails: bool, crlf: bool,
    ) {
        let mut stream = if fails { format!("{ROLE}{ERROR}{DONE}") } else { format!("{ROLE}{LAST}{USAGE}{DONE}") };
        if crlf {
            stream = stream.replace('\n', "\r\n");
        }
        let mut cuts: Vec<usize> = cuts.into_iter().filter(|cut| *cut < stream.len()).collect();
        cuts.extend([0, stream.len()]);
        cuts.sort_unstable();
        let pieces: Vec<&str> = cuts.windows(2).map(|pair| &stream[pair[0]..pair[1]]).filter(|piece| !piece.is_empty()).collect();
        let (sent, scanner, verdict) = all(Dialect::OpenAi, &pieces);
        if fails {
            prop_assert_eq!(verdict, Some("failed"));
            prop_assert!(sent.contains("EngineCore died") && !sent.contains("[DONE]"));
        } else {
            prop_assert_eq!(sent, stream);
            prop_assert!(scanner.is_complete());
        }
    }
}

/// A schema that a client may send and an engine repeats.
const SCHEMA: &str = r#"{"usage":{"input_tokens":0,"output_tokens":0,"prompt_tokens":0,"completion_tokens":0},"choices":[{"finish_reason":"abort"}],"finish_reason":"abort"}"#;

#[test]
fn a_schema_repeated_in_the_answer_is_ignored() {
    let created = format!("event: response.created\ndata: {{\"response\":{{\"tools\":[{SCHEMA}],\"usage\":null}}}}\n\n");
    let completed = format!(
        "event: response.completed\ndata: {{\"response\":{{\"tools\":[{SCHEMA}],\"usage\":{{\"input_tokens\":13,\"output_tokens\":500}}}}}}\n\n"
    );
    let (_, scanner, verdict) = all(Dialect::Responses, &[&created, &completed]);
    assert_eq!((verdict, scanner.usage()), (None, Some(TokenUsage { prompt_tokens: 13, completion_tokens: 500, cached_tokens: None })));
    let chunk = format!("data: {{\"choices\":[{{\"delta\":{SCHEMA},\"finish_reason\":null}}]}}\n\n");
    let (_, scanner, verdict) = all(Dialect::OpenAi, &[ROLE, &chunk, LAST, USAGE, DONE]);
    assert_eq!((verdict, scanner.usage()), (None, Some(TokenUsage { prompt_tokens: 13, completion_tokens: 6, cached_tokens: None })));
    let block = format!("event: message_start\ndata: {{\"message\":{{\"content\":[{SCHEMA}],\"usage\":{{\"input_tokens\":7}}}}}}\n\n");
    let (_, scanner, _) = all(Dialect::Anthropic, &[&block]);
    assert_eq!(scanner.usage(), Some(TokenUsage { prompt_tokens: 7, completion_tokens: 0, cached_tokens: None }));
}

#[test]
fn an_oversized_event_is_not_misread_for_repeated_text() {
    // Wherever the event is cut, the rest begins like an error.
    let echo = format!("[{}0]", "{\"error\":{\"message\":\"EngineCore encountered an issue\"}},".repeat(10_000));
    let huge = format!(
        "event: response.completed\ndata: {{\"response\":{{\"tools\":{echo},\"schema\":{SCHEMA},\"usage\":{{\"input_tokens\":13,\"output_tokens\":500}},\"x\":{SCHEMA}}}}}\n\n"
    );
    for piece in [1 << 16, 262_111, 262_144 + 50] {
        let pieces: Vec<&str> = huge.as_bytes().chunks(piece).map(|piece| std::str::from_utf8(piece).unwrap()).collect();
        let (sent, scanner, verdict) = all(Dialect::Responses, &pieces);
        assert!(sent == huge && verdict.is_none() && scanner.is_complete(), "pieces of {piece}: {verdict:?}");
        assert_eq!(
            scanner.usage(),
            Some(TokenUsage { prompt_tokens: 13, completion_tokens: 500, cached_tokens: None }),
            "pieces of {piece}"
        );
        let without_end = &pieces[..pieces.len() - 1];
        assert!(!all(Dialect::Responses, without_end).1.is_complete(), "half of it is no end");
    }
}

#[test]
fn an_oversized_error_fails_the_answer_once_passed() {
    let huge = format!("data: {{\"error\":{{\"message\":\"{}\"}}}}\n\n", "x".repeat(600_000));
    let pieces: Vec<&str> = huge.as_bytes().chunks(1 << 16).map(|piece| std::str::from_utf8(piece).unwrap()).collect();
    let (sent, _, verdict) = all(Dialect::OpenAi, &pieces);
    assert!(sent == huge && verdict == Some("failed"));
}

#[test]
fn reading_a_stream_takes_no_more_than_its_length() {
    let repeated = [ROLE, "data: x\n", "event: x\n", ": comment\n", "\n", "data:", r#"data: {"choices":[{"index":0}"#, r#""usage":{"#];
    for part in repeated {
        for piece_bytes in [16, 64 * 1024] {
            let write = |count| part.repeat(count).into_bytes();
            assert_proportional(&format!("{part:?} in {piece_bytes} bytes"), 48 * 1024 / part.len(), write, |stream| {
                for dialect in [Dialect::OpenAi, Dialect::Responses, Dialect::Anthropic, Dialect::Other] {
                    let mut scanner = SseScanner::new(dialect);
                    for piece in stream.chunks(piece_bytes) {
                        if !matches!(scanner.process(Bytes::copy_from_slice(piece)), ChunkOutcome::Forward(_)) {
                            break;
                        }
                    }
                }
            });
        }
    }
}
