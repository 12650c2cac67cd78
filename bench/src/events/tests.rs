//! Values read from streams, including recorded ones of a real engine.

use proptest::prelude::*;

use super::*;

/// Body of a recorded stream, without its head and its HTTP chunks.
fn recorded(name: &str) -> Vec<u8> {
    let path = format!("{}/../tests/fixtures/vllm/{name}", env!("CARGO_MANIFEST_DIR"));
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("cannot read {path}: {error}"));
    let head = bytes.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
    let (mut rest, mut body) = (&bytes[head + 4..], Vec::new());
    while let Some(end) = rest.windows(2).position(|window| window == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..end]).unwrap(), 16).unwrap();
        let Some(chunk) = rest.get(end + 2..end + 2 + size).filter(|chunk| !chunk.is_empty()) else { break };
        body.extend_from_slice(chunk);
        rest = rest.get(end + 4 + size..).unwrap_or_default();
    }
    body
}

fn scanned(body: &str) -> (u32, EventScanner) {
    let mut scanner = EventScanner::new(true);
    let events = scanner.scan(body.as_bytes()).unwrap();
    (events, scanner)
}

/// Result of a parser for the whole stream: events with text, and the text.
fn parsed(body: &[u8]) -> (u32, String) {
    let (mut events, mut text) = (0, String::new());
    for line in std::str::from_utf8(body).unwrap().lines() {
        let Some(Ok(event)) = line.strip_prefix("data: ").map(serde_json::from_str::<serde_json::Value>) else { continue };
        let choice = &event["choices"][0];
        let words = choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or("");
        events += u32::from(!words.is_empty());
        text.push_str(words);
    }
    (events, text)
}

proptest! {
    #[test]
    fn events_parse_the_same_wherever_they_are_split(cuts in prop::collection::vec(0..3000_usize, 0..30)) {
        for (name, outcome) in [
            ("sse_chat_stream_usage.raw", Outcome::Complete),
            ("sse_completions_usage.raw", Outcome::Complete),
            ("sse_chat_stream_continuous_usage.raw", Outcome::Complete),
            ("sse_stream_interval8.raw", Outcome::Complete),
            ("sse_sigterm_abort_midstream.raw", Outcome::Aborted),
            ("sse_error_midstream_worker_killed.raw", Outcome::ErrorEvent),
        ] {
            let body = recorded(name);
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % body.len()).collect();
            cuts.extend([0, body.len()]);
            cuts.sort_unstable();
            let mut scanner = EventScanner::new(true);
            let events: u32 = cuts.windows(2).map(|cut| scanner.scan(&body[cut[0]..cut[1]]).unwrap()).sum();
            prop_assert_eq!(scanner.outcome(), outcome, "{}", name);
            prop_assert_eq!((events, scanner.into_text()), parsed(&body), "{}", name);
        }
    }
}

#[test]
fn the_last_usage_of_a_stream_counts() {
    for name in ["sse_chat_stream_usage.raw", "sse_completions_usage.raw", "sse_chat_stream_continuous_usage.raw"] {
        let body = recorded(name);
        let mut scanner = EventScanner::default();
        scanner.scan(&body).unwrap();
        let text = String::from_utf8(body).unwrap();
        let last = text.lines().rfind(|line| line.contains(r#""usage":{"#)).unwrap();
        let event: serde_json::Value = serde_json::from_str(last.strip_prefix("data: ").unwrap()).unwrap();
        let usage = scanner.usage().unwrap();
        let expected = (event["usage"]["prompt_tokens"].as_u64().unwrap(), event["usage"]["completion_tokens"].as_u64().unwrap());
        assert_eq!((usage.prompt_tokens, usage.completion_tokens), expected, "{name}");
    }
    let (_, scanner) = scanned(
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n",
    );
    assert_eq!(scanner.usage().unwrap().cached_tokens(), Some(4));
    let (_, scanner) = scanned("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"prompt_tokens_details\":null}}\n\n");
    assert_eq!(scanner.usage().unwrap().cached_tokens(), None);
    let (_, scanner) = scanned("data: {\"choices\":[{\"delta\":{\"content\":\"{\"}}],\"usage\":null}\n\n");
    assert_eq!(scanner.usage(), None);
}

#[test]
fn an_event_without_text_is_no_token() {
    let without = [
        r#"data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#,
        r#"data: {"choices":[{"delta":{"role":"assistant","content":null}}]}"#,
        r#"data: {"choices":[],"usage":{"prompt_tokens":1}}"#,
        "data: [DONE]",
        ": a comment with \"content\":\"x\"",
        "event: ping",
        "",
    ];
    for line in without {
        assert_eq!(scanned(&format!("{line}\n")).0, 0, "{line}");
    }
    let with = [
        r#"data: {"choices":[{"delta":{"content":"a"}}]}"#,
        r#"data:{"choices": [{"delta": {"content": "a"}}]}"#,
        r#"data: {"choices":[{"delta":{"content":"","reasoning_content":"hm"}}]}"#,
        r#"data: {"choices":[{"delta":{"reasoning":"hm"}}]}"#,
        r#"data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}}]}"#,
        r#"data: {"choices":[{"index":0,"text":"\"content\":\"\""}]}"#,
    ];
    for line in with {
        assert_eq!(scanned(&format!("{line}\r\n")).0, 1, "{line}");
    }
}

#[test]
fn the_end_of_a_stream_is_not_guessed() {
    let finished = r#"data: {"choices":[{"delta":{"content":"a"},"finish_reason": "stop"}]}"#;
    assert_eq!(scanned(&format!("{finished}\n\ndata: [DONE]\n\n")).1.outcome(), Outcome::Complete);
    assert_eq!(scanned(&format!("{finished}\n\n")).1.outcome(), Outcome::Truncated, "without [DONE]");
    assert_eq!(scanned("data: [DONE]\n\n").1.outcome(), Outcome::Truncated, "without a reason");
    assert_eq!(scanned(&finished.replace("stop", "abort")).1.outcome(), Outcome::Truncated, "its last line has no end");
    let aborted = finished.replace("stop", "abort");
    assert_eq!(scanned(&format!("{aborted}\n\ndata: [DONE]\n\n")).1.outcome(), Outcome::Aborted);
    assert_eq!(scanned(&format!("{finished}\n\ndata: {{\"error\":{{}}}}\n\n")).1.outcome(), Outcome::ErrorEvent);
}

#[test]
fn an_endless_line_is_given_up() {
    let mut scanner = EventScanner::default();
    let piece = vec![b'a'; MAX_LINE_BYTES / 4];
    assert!((0..4).all(|_| scanner.scan(&piece).is_ok()));
    assert!(scanner.scan(&piece).is_err());
}
