use hostler_api::Route;
use hostler_prompt::Dialect;
use serde_json::Value;

use super::*;
use crate::resumption::samples::{HEAD, answer, content, finish, role};
use crate::resumption::{Continuation, Sampling, samples};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn text(text: &str, prompt: &str, ids: &str) -> String {
    samples::text("cmpl-r1", text, prompt, ids, "null")
}

fn record(api: StreamApi) -> TokenRecord {
    TokenRecord::new(api, &RecordMemory::default())
}

/// The text that the client gets of events in one piece.
fn without_tokens(record: &mut TokenRecord, events: Bytes) -> String {
    let (passed, end) = record.process_common(&events).unwrap_or_else(|| (record.process(events.clone()), b""));
    String::from_utf8([&passed[..], end].concat()).unwrap()
}

/// The text that the client gets of these events.
fn pass(record: &mut TokenRecord, events: &[String]) -> String {
    events.iter().map(|event| without_tokens(record, event.clone().into())).collect()
}

fn known(api: StreamApi, events: &[String]) -> Option<(String, u64, u64, bool)> {
    let mut record = record(api);
    pass(&mut record, events);
    record.rewind().map(|known| (known.ids, known.prompt_tokens, known.emitted_tokens, known.is_finished))
}

#[test]
fn a_client_gets_no_tokens_that_it_did_not_request() {
    let usage = format!("{HEAD}],\"usage\":{{\"prompt_tokens\":3,\"total_tokens\":5,\"completion_tokens\":2}}}}\n\n");
    let done = "data: [DONE]\n\n".to_owned();
    let with_ids = [
        ": keep-alive\n\n".to_owned(),
        role("[1,2,3]"),
        content(" docu\\\"token_ids\\\":[7]", "[3428]"),
        content("", "[9]"),
        content("x", "[4,5,6]"),
        finish(" end", "[2]", "stop"),
        usage.clone(),
        done.clone(),
    ];
    let plain = [
        ": keep-alive\n\n".to_owned(),
        role("null"),
        content(" docu\\\"token_ids\\\":[7]", "null"),
        content("", "null"),
        content("x", "null"),
        finish(" end", "null", "stop"),
        usage,
        done,
    ];
    assert_eq!(pass(&mut record(StreamApi::Chat), &with_ids), plain.concat());
    // Several events come in one piece.
    assert_eq!(pass(&mut record(StreamApi::Chat), &[with_ids.concat()]), plain.concat());
    let with_ids = [text("State", "[74,75]", "[2606]"), text("y", "null", "[8,9]")];
    assert_eq!(pass(&mut record(StreamApi::Completions), &with_ids), [text("State", "null", "null"), text("y", "null", "null")].concat());
}

#[test]
fn an_event_that_carries_only_tokens_is_dropped() {
    let empty = format!("{HEAD}{{\"index\":0,\"delta\":{{}},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":[5]}}]}}\n\n");
    let mut record = record(StreamApi::Chat);
    assert_eq!(pass(&mut record, &[role("[1]"), empty, content("a", "[6]")]), [role("null"), content("a", "null")].concat());
    assert_eq!(record.rewind().unwrap().ids, "1,5,6");
}

#[test]
fn tokens_after_the_last_sent_text_are_forgotten() {
    use StreamApi::{Chat, Completions};
    let chat = |events: &[String]| known(Chat, events);
    assert_eq!(chat(&[role("[1,2]")]), Some(("1,2".into(), 2, 0, false)));
    assert_eq!(chat(&[role("[1,2]"), content("", "[3]")]), Some(("1,2".into(), 2, 0, false)));
    assert_eq!(chat(&[role("[1,2]"), content("a", "[3,4]"), content("", "[5]")]), Some(("1,2,3,4".into(), 2, 2, false)));
    assert_eq!(
        chat(&[role("[1,2]"), content("a", "[3,4]"), content("", "[5]"), content("é", "[6]")]),
        Some(("1,2,3,4,5,6".into(), 2, 4, false))
    );
    assert_eq!(chat(&[role("[1]"), content("a", "[3]"), finish("", "[4]", "stop")]), Some(("1,3,4".into(), 1, 2, true)));
    assert_eq!(known(Completions, &[text("a", "[1]", "[2]"), text("b", "null", "[3]")]), Some(("1,2,3".into(), 1, 2, false)));
}

#[test]
fn a_stream_with_an_unknown_event_is_not_recorded() {
    let with = |event: String| known(StreamApi::Chat, &[role("[1]"), event, content("a", "[2]")]);
    assert!(with(content("b", "[3]")).is_some());
    let reasoning = format!(
        "{HEAD}{{\"index\":0,\"delta\":{{\"reasoning\":\"x\"}},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":[5]}}]}}\n\n"
    );
    let second =
        format!("{HEAD}{{\"index\":1,\"delta\":{{\"content\":\"x\"}},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":[5]}}]}}\n\n");
    for other in [
        reasoning,
        second,
        content("b", "[3]").replace("chatcmpl-r1", "chatcmpl-r2"),
        "data: nonsense\n\n".into(),
        role("[1]"),
        content("b", "[-3]"),
    ] {
        assert_eq!(with(other.clone()), None, "{other}");
    }
    assert_eq!(known(StreamApi::Chat, &[role("null"), content("a", "[2]")]), None);
    assert_eq!(known(StreamApi::Chat, &[]), None);
}

#[test]
fn a_stream_beyond_the_record_memory_goes_on_unrecorded() {
    let memory = RecordMemory::with_bound(30);
    let mut record = TokenRecord::new(StreamApi::Chat, &memory);
    let events = [role("[1,2]"), content("a", "[3]"), content("b", "[1000000,1000000,1000000]"), content("c", "[4]")];
    let plain = [role("null"), content("a", "null"), content("b", "null"), content("c", "null")];
    assert_eq!(pass(&mut record, &events), plain.concat());
    assert_eq!((record.rewind(), record.emitted_tokens()), (None, 5), "they are counted all the same");
    drop(record);
    assert_eq!(memory.taken(), 0);
}

#[test]
fn tokens_of_an_unknown_event_are_counted() {
    let mut record = record(StreamApi::Chat);
    let unknown = content("b", "[4,5]").replace("\"content\"", "\"reasoning\"");
    pass(&mut record, &[role("[1,2]"), content("a", "[3]"), unknown, content("\\\"token_ids\\\":[7]", "[6]")]);
    assert_eq!((record.known(), record.emitted_tokens()), (None, 4));
}

/// Empty texts are parts of a character, which the next text completes.
const TEXTS: [&str; 10] = ["Hey", "", "", "\u{1f980}", " \\\"quo", "te\\\" ", "", "é", "\\n", "end"];

/// The client's stream if each engine dies behind its cut. The first engine has the first
/// front-end, all others have the second.
fn stream_cut_at(front_ends: [Dialect; 2], path: &str, body: &str, cuts: &[usize]) -> String {
    let api = StreamApi::for_route(Route::of(path)).unwrap();
    let (mut record, sampling) = (record(api), Sampling::parse(api, body.as_bytes()).unwrap());
    let mut continuation: Option<Continuation> = None;
    let (mut path, mut body) = (path, crate::resumption::ask_for_tokens(body.as_bytes()));
    let mut output = String::new();
    for (attempt, cut) in cuts.iter().copied().chain([usize::MAX]).enumerate() {
        let (id, front_end) = if attempt == 0 { ("cmpl-r1", front_ends[0]) } else { ("cmpl-other", front_ends[1]) };
        for event in answer(front_end, path, &body, id, &TEXTS).iter().take(cut) {
            // Split events in halves: pieces end anywhere.
            let (one, other) = event.as_bytes().split_at(event.len() / 2);
            let events = match &mut continuation {
                Some(continuation) => [continuation.retell(one), continuation.retell(other)].concat().into(),
                None => event.clone().into(),
            };
            output.push_str(&without_tokens(&mut record, events));
        }
        if output.ends_with("data: [DONE]\n\n") {
            break;
        }
        let known = record.rewind().unwrap();
        let Some(request) = known.continuation_request(&sampling, 1000) else {
            let has_usage = output.contains("\"usage\":{");
            return output + std::str::from_utf8(&known.ending(&sampling, has_usage)).unwrap();
        };
        (path, body) = (COMPLETIONS, request.body);
        continuation = Some(Continuation::new(&known));
    }
    output
}

/// The body of an answer that came in chunks.
fn recorded(name: &str) -> Vec<String> {
    let path = format!("{}/../tests/fixtures/vllm/{name}", env!("CARGO_MANIFEST_DIR"));
    let raw = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("cannot read {path}: {error}"));
    // The times of two recordings differ.
    let masked = |event: &str| {
        let (before, created) = event.split_once("\"created\":")?;
        let (_, after) = created.split_once(',')?;
        Some(format!("{before}\"created\":1,{after}\n\n"))
    };
    let events = raw.split("data: ").skip(1).map(|event| format!("data: {}", event.split_once("\n\n").unwrap().0));
    events.map(|event| masked(&event).unwrap_or(event + "\n\n")).collect()
}

#[test]
fn recorded_rust_streams_are_restored_without_their_tokens() {
    for (name, api, expected) in [
        ("chat_length", StreamApi::Chat, (11, 4)),
        ("chat_stop", StreamApi::Chat, (11, 11)),
        ("completions_length", StreamApi::Completions, (4, 4)),
        ("completions_stop", StreamApi::Completions, (4, 11)),
    ] {
        let (with_ids, plain) = (recorded(&format!("sse_rust_{name}_ids.raw")), recorded(&format!("sse_rust_{name}_plain.raw")));
        let mut one_by_one = record(api);
        assert_eq!(pass(&mut one_by_one, &with_ids), plain.concat(), "{name}");
        let known = one_by_one.rewind().unwrap();
        assert_eq!((known.prompt_tokens, known.emitted_tokens, known.is_finished), (expected.0, expected.1, true), "{name}");
        assert_eq!(pass(&mut record(api), &[with_ids.concat()]), plain.concat(), "{name} in one piece");
    }
}

#[test]
fn nearly_all_recorded_events_have_the_common_form() {
    for (name, api, expected) in [("chat_stop", StreamApi::Chat, 6), ("completions_stop", StreamApi::Completions, 11)] {
        let mut record = record(api);
        let is_common = |event: String| {
            let event = Bytes::from(event);
            let is_common = record.process_common(&event).is_some();
            if !is_common {
                record.process(event);
            }
            is_common
        };
        let common = recorded(&format!("sse_rust_{name}_ids.raw")).into_iter().map(is_common).filter(|is_common| *is_common).count();
        assert_eq!(common, expected, "{name}");
    }
}

const REQUESTS: [(&str, &str); 4] = [
    (CHAT, r#"{"messages":[],"stream":true}"#),
    (CHAT, r#"{"messages":[],"stream":true,"max_tokens":7,"stream_options":{"include_usage":true}}"#),
    (COMPLETIONS, r#"{"prompt":[1,2],"stream":true,"max_tokens":100}"#),
    (COMPLETIONS, r#"{"prompt":[1,2],"stream":true,"max_tokens":100,"stream_options":{"include_usage":true}}"#),
];

/// Calls `check` with each way to cut this stream once or twice.
fn for_all_cuts(front_end: Dialect, path: &str, body: &str, mut check: impl FnMut(&[usize])) {
    let asking = crate::resumption::ask_for_tokens(body.as_bytes());
    let events = answer(front_end, path, &asking, "cmpl-r1", &TEXTS).len();
    for cut in 1..events {
        check(&[cut]);
        (0..events - cut).for_each(|second| check(&[cut, second]));
    }
}

#[test]
fn a_stream_cut_anywhere_and_continued_equals_an_uncut_one() {
    for front_end in Dialect::ALL {
        for (path, body) in REQUESTS {
            let stream_cut_at = |cuts: &[usize]| stream_cut_at([front_end; 2], path, body, cuts);
            let uncut = stream_cut_at(&[]);
            assert_eq!(uncut, answer(front_end, path, body.as_bytes(), "cmpl-r1", &TEXTS).concat());
            // The engine that continues after the end of an answer would not know its fingerprint.
            let ends = |events: &str| events.replace(",\"system_fingerprint\":\"vllm-0.32.0-0ffacd72\"", "");
            for_all_cuts(front_end, path, body, |cuts| {
                assert_eq!(ends(&stream_cut_at(cuts)), ends(&uncut), "{front_end:?} {body} cut behind {cuts:?}");
            });
        }
    }
}

#[test]
fn a_stream_continued_by_another_front_end_keeps_its_form() {
    for front_ends in [[Dialect::Python, Dialect::Rust], [Dialect::Rust, Dialect::Python]] {
        for (path, body) in REQUESTS {
            let stream_cut_at = |cuts: &[usize]| stream_cut_at(front_ends, path, body, cuts);
            let uncut = StreamSummary::parse(front_ends[0], &stream_cut_at(&[]));
            for_all_cuts(front_ends[0], path, body, |cuts| {
                assert_eq!(StreamSummary::parse(front_ends[0], &stream_cut_at(cuts)), uncut, "{front_ends:?} {body} cut behind {cuts:?}");
            });
        }
    }
}

/// The content of a stream, however its texts are cut into events.
#[derive(Debug, PartialEq)]
struct StreamSummary {
    text: String,
    finish_reasons: Vec<Value>,
    usages: Vec<Value>,
    ends: usize,
}

impl StreamSummary {
    /// Parses a stream whose events all have the form of this front-end.
    fn parse(front_end: Dialect, stream: &str) -> Self {
        let mut summary = Self { text: String::new(), finish_reasons: Vec::new(), usages: Vec::new(), ends: 0 };
        for event in stream.split_terminator("\n\n") {
            let data = event.strip_prefix("data: ").unwrap();
            if data == "[DONE]" {
                summary.ends += 1;
                continue;
            }
            let event: Value = serde_json::from_str(data).unwrap();
            assert!(event["id"].as_str().unwrap().ends_with("-r1"), "{data}");
            summary.usages.extend(event.get("usage").cloned());
            let Some(choice) = event["choices"].get(0) else { continue };
            let is_python = front_end == Dialect::Python;
            assert_eq!(choice.get("logprobs").is_some(), is_python, "{data}");
            assert!(choice.get("token_ids").is_none_or(|ids| is_python && ids.is_null()), "{data}");
            summary.text += choice.pointer("/delta/content").or(choice.get("text")).and_then(Value::as_str).unwrap_or_default();
            summary.finish_reasons.extend(choice.get("finish_reason").filter(|reason| !reason.is_null()).cloned());
        }
        summary
    }
}
