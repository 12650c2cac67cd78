use std::time::{Duration, SystemTime};

use hostler_prompt::Dialect;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::edge::translation::StreamTranslation;
use crate::edge::translation::samples::pieces;
use crate::resumption::replay_samples::{event_count, resumed_stream};

fn noon() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::new(1_700_000_000, 5)
}

const STREAM: &str = concat!(
    ": keep-alive\n\n",
    r#"data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}"#,
    "\n\n",
    r#"data: {"choices":[{"index":0,"delta":{"reasoning":"hm"},"finish_reason":null}]}"#,
    "\n\n",
    r#"data: {"choices":[{"index":0,"delta":{"content":"Hé\n"},"logprobs":{"content":[{"token":"H","logprob":-0.10}]},"finish_reason":null}],"usage":null}"#,
    "\n\n",
    r#"data: {"choices":[{"index":0,"delta":{"content":null,"tool_calls":[{"id":"t1","type":"function","index":0,"function":{"name":"look"}}]},"finish_reason":null}]}"#,
    "\n\n",
    r#"data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"at\""}}]},"finish_reason":null}]}"#,
    "\n\n",
    r#"data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":": 1}"}},{"index":1,"id":"t2","function":{"name":"rest","arguments":""}}]},"finish_reason":null}]}"#,
    "\n\n",
    r#"data: {"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}"#,
    "\n\n",
    r#"data: {"choices":[],"usage":{"prompt_tokens":7,"total_tokens":12,"completion_tokens":5}}"#,
    "\n\ndata: [DONE]\n\n",
);

/// Translates a stream whose pieces come 100 ms apart, after half a second.
fn told_of(form: OllamaRoute, pieces: &[&[u8]]) -> (String, Option<TranslationError>) {
    let begun = Instant::now();
    let mut teller = StreamTranslation::new(OllamaTranslator::new(form, "m".into(), begun));
    let mut instant = begun + Duration::from_millis(500);
    let mut lines = Vec::new();
    let mut cut = None;
    for piece in pieces {
        match teller.push(piece, ArrivalTime { instant, time: noon() }) {
            Ok(more) => lines.extend(more),
            Err(why) => {
                cut = Some(why);
                lines.extend(teller.take_output());
                break;
            }
        }
        instant += Duration::from_millis(100);
    }
    if cut.is_none() {
        match teller.finish(ArrivalTime { instant, time: noon() }) {
            Ok(more) => lines.extend(more),
            Err(why) => cut = Some(why),
        }
    }
    (String::from_utf8(lines).unwrap(), cut)
}

/// Splits a stream into its events, each with the blank line behind it.
fn events(stream: &str) -> Vec<&[u8]> {
    stream.split_inclusive("\n\n").map(str::as_bytes).collect()
}

#[tokio::test(start_paused = true)]
async fn every_event_becomes_a_line_with_only_whole_calls() {
    let (lines, cut) = told_of(OllamaRoute::Chat, &events(STREAM));
    assert_eq!(cut, None);
    // The first token comes with the third piece, after 700 ms; the end after 1500 ms.
    insta::assert_snapshot!(lines, @r#"
    {"model":"m","created_at":"2023-11-14T22:13:20.000000005Z","message":{"role":"assistant","content":"","thinking":"hm"},"done":false}
    {"model":"m","created_at":"2023-11-14T22:13:20.000000005Z","message":{"role":"assistant","content":"Hé\n"},"logprobs":[{"token":"H","logprob":-0.10}],"done":false}
    {"model":"m","created_at":"2023-11-14T22:13:20.000000005Z","message":{"role":"assistant","content":"","tool_calls":[{"id":"t1","function":{"index":0,"name":"look","arguments":{"at":1}}},{"id":"t2","function":{"index":1,"name":"rest","arguments":{}}}]},"done":false}
    {"model":"m","created_at":"2023-11-14T22:13:20.000000005Z","message":{"role":"assistant","content":""},"done":true,"done_reason":"stop","total_duration":1500000000,"load_duration":0,"prompt_eval_count":7,"prompt_eval_duration":700000000,"eval_count":5,"eval_duration":800000000}
    "#);
}

#[tokio::test(start_paused = true)]
async fn a_completion_is_streamed_as_text_lines() {
    let stream = "data: {\"choices\":[{\"index\":0,\"text\":\"One\",\"finish_reason\":null}]}\n\ndata: {\"choices\":[{\"index\":0,\"text\":\" more\",\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n";
    let (lines, cut) = told_of(OllamaRoute::Generate, &events(stream));
    assert_eq!(cut, None);
    insta::assert_snapshot!(lines, @r#"
    {"model":"m","created_at":"2023-11-14T22:13:20.000000005Z","response":"One","done":false}
    {"model":"m","created_at":"2023-11-14T22:13:20.000000005Z","response":" more","done":false}
    {"model":"m","created_at":"2023-11-14T22:13:20.000000005Z","response":"","done":true,"done_reason":"length","total_duration":800000000,"load_duration":0,"prompt_eval_count":0,"prompt_eval_duration":500000000,"eval_count":0,"eval_duration":300000000}
    "#);
}

#[tokio::test(start_paused = true)]
async fn an_engines_error_ends_the_lines_with_its_message() {
    let failing = format!(
        "{}data: {{\"error\":{{\"message\":\"the core died\",\"code\":500}}}}\n\ndata: [DONE]\n\n",
        &STREAM[..STREAM.find("\"Hé").unwrap()].rsplit_once("data: ").unwrap().0
    );
    let (lines, cut) = told_of(OllamaRoute::Chat, &[failing.as_bytes()]);
    assert_eq!(cut, Some(TranslationError("the core died".into())));
    assert_eq!(lines.lines().count(), 1, "what came before is told: {lines}");
    assert!(!lines.contains("\"done\":true"));
}

#[tokio::test(start_paused = true)]
async fn an_incomplete_stream_never_says_done() {
    for (stream, why) in [
        ("", "the engine ended the answer before it was complete"),
        ("data: [DONE]\n\n", "the engine ended the answer before it was complete"),
        ("data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n", "the engine ended the answer before it was complete"),
    ] {
        let (lines, cut) = told_of(OllamaRoute::Chat, &[stream.as_bytes()]);
        assert_eq!((cut, lines.contains("\"done\":true")), (Some(TranslationError(why.into())), false), "{stream}");
    }
    let (_, cut) = told_of(OllamaRoute::Chat, &[b"data: {\"choices\"\n\n"]);
    assert!(cut.unwrap().0.starts_with("an event of the engine cannot be read: "));
    let cut_short = STREAM.replace(": 1}", ": 1");
    assert!(told_of(OllamaRoute::Chat, &events(&cut_short)).1.unwrap().0.starts_with("the model called `look` with arguments"));
}

#[tokio::test(start_paused = true)]
async fn the_line_translator_buffers_within_bounds() {
    let mut teller = StreamTranslation::new(OllamaTranslator::new(OllamaRoute::Chat, "m".into(), Instant::now()));
    let now = ArrivalTime { instant: Instant::now(), time: noon() };
    let endless = vec![b'x'; 64 * 1024];
    let taken = (0..1000).take_while(|_| teller.push(&endless, now).is_ok()).count();
    assert!((1..100).contains(&taken), "{taken} pieces were buffered");

    let mut teller = StreamTranslation::new(OllamaTranslator::new(OllamaRoute::Chat, "m".into(), Instant::now()));
    let call = format!(
        "data: {{\"choices\":[{{\"delta\":{{\"tool_calls\":[{{\"index\":0,\"function\":{{\"arguments\":\"{}\"}}}}]}}}}]}}\n\n",
        "x".repeat(500_000)
    );
    let taken = (0..1000).take_while(|_| teller.push(call.as_bytes(), now).is_ok()).count();
    assert!((1..100).contains(&taken), "{taken} pieces were buffered");
}

/// Lines without their times, which depend on when pieces come.
fn timeless(lines: &str) -> Vec<Value> {
    let timeless = |line: &str| {
        let mut line: Value = serde_json::from_str(line).unwrap();
        line.as_object_mut().unwrap().retain(|name, _| !name.ends_with("_duration"));
        line
    };
    lines.lines().map(timeless).collect()
}

proptest! {
    #[test]
    fn the_lines_do_not_depend_on_how_bytes_are_cut(cuts in prop::collection::vec(any::<usize>(), 0..40), crlf: bool, ends: bool) {
        let mut stream = STREAM.to_owned();
        if !ends {
            stream.truncate(stream.trim_end().len());
        }
        if crlf {
            stream = stream.replace('\n', "\r\n");
        }
        let (whole, _) = told_of(OllamaRoute::Chat, &[stream.as_bytes()]);
        let (lines, cut) = told_of(OllamaRoute::Chat, &pieces(stream.as_bytes(), &cuts));
        prop_assert_eq!(cut, None);
        prop_assert_eq!(timeless(&lines).len(), 4);
        prop_assert_eq!(timeless(&lines), timeless(&whole));
    }

    #[test]
    fn any_text_arrives_as_generated(texts in prop::collection::vec(any::<String>(), 1..8), cuts in prop::collection::vec(any::<usize>(), 0..20)) {
        let mut stream: String = texts.iter().map(|text| format!("data: {}\n\n", json!({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": null}]}))).collect();
        stream.push_str("data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n");
        let (lines, cut) = told_of(OllamaRoute::Chat, &pieces(stream.as_bytes(), &cuts));
        prop_assert_eq!(cut, None);
        let text: String = timeless(&lines).iter().map(|line| line["message"]["content"].as_str().unwrap().to_owned()).collect();
        prop_assert_eq!(text, texts.concat());
    }

    #[test]
    fn no_bytes_make_the_line_translator_panic(bytes: Vec<u8>) {
        let _ = told_of(OllamaRoute::Chat, &[b"data:", &bytes, b"\n"]);
    }
}

/// A client's view of lines: each text in one piece, the calls without their ids, and the end.
fn understood(lines: &str) -> Value {
    let mut told = json!({"content": "", "thinking": "", "tokens": [], "calls": []});
    for line in timeless(lines) {
        for text in ["content", "thinking"] {
            told[text] = format!("{}{}", told[text].as_str().unwrap(), line["message"][text].as_str().unwrap_or_default()).into();
        }
        for (list, items) in [("tokens", &line["logprobs"]), ("calls", &line["message"]["tool_calls"])] {
            for item in items.as_array().into_iter().flatten() {
                let kept = if list == "tokens" { &item["token"] } else { &item["function"] };
                told[list].as_array_mut().unwrap().push(kept.clone());
            }
        }
        assert_eq!(told["end"], Value::Null, "{lines}");
        if line["done"] == true {
            told["end"] = json!([line["done_reason"], line["prompt_eval_count"], line["eval_count"]]);
        }
    }
    told
}

#[tokio::test(start_paused = true)]
async fn a_replayed_stream_gives_the_lines_of_an_uncut_one() {
    const CHAT: &str = "/v1/chat/completions";
    let bodies =
        [r#"{"tools":[],"logprobs":true,"stream_options":{"include_usage":true}}"#, r#"{"stream_options":{"include_usage":true}}"#];
    for (front_end, body) in Dialect::ALL.into_iter().flat_map(|front_end| bodies.map(|body| (front_end, body))) {
        let lines = |engines: &[(usize, usize)]| {
            let (lines, cut) = told_of(OllamaRoute::Chat, &events(&resumed_stream(front_end, CHAT, body, engines).unwrap()));
            assert_eq!(cut, None);
            understood(&lines)
        };
        let uncut = lines(&[(1, 0)]);
        assert!(uncut["end"].is_array(), "{uncut}");
        for (group, other) in [(1, 1), (1, 3), (3, 1), (2, 5)] {
            for cut in 1..event_count(front_end, CHAT, body, group) {
                assert_eq!(lines(&[(group, cut), (other, 0)]), uncut, "{front_end:?} {body} in {group} behind {cut}, then in {other}");
            }
        }
    }
}
