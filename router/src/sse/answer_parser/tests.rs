use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const CHAT: &str = r#"{"id":"x","choices":[{"index":0,"message":{"content":"a \" \\"},"finish_reason":"stop"}],"usage":{"prompt_tokens":40,"total_tokens":43,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":32}},"kv":null}"#;

fn usage(prompt_tokens: u64, completion_tokens: u64, cached_tokens: Option<u64>) -> Option<TokenUsage> {
    Some(TokenUsage { prompt_tokens, completion_tokens, cached_tokens })
}

#[test]
fn usage_is_read_in_every_api() {
    let chat = AnswerParser::parse(CHAT.as_bytes(), "");
    assert_eq!((chat.usage(), chat.finish_state()), (usage(40, 3, Some(32)), FinishState::Finished));
    let without = br#"{"usage":{"prompt_tokens":40,"completion_tokens":3,"prompt_tokens_details":null}}"#;
    assert_eq!(AnswerParser::parse_usage(without), usage(40, 3, None));
    let response = br#"{"tools":[],"usage":{"input_tokens":13,"input_tokens_details":{"cached_tokens":8},"output_tokens":4},"user":null}"#;
    assert_eq!(AnswerParser::parse_usage(response), usage(13, 4, Some(8)));
    let message = br#"{"usage":{"input_tokens":5,"cache_read_input_tokens":32,"cache_creation_input_tokens":3,"output_tokens":9}}"#;
    assert_eq!(AnswerParser::parse_usage(message), usage(40, 9, Some(32)), "this API counts what was cached apart");
    let cohere = br#"{"message":{},"usage":{"billed_units":{"input_tokens":1.0},"tokens":{"input_tokens":7.0,"output_tokens":2.0},"cached_tokens":4.0}}"#;
    assert_eq!(AnswerParser::parse_usage(cohere), usage(7, 2, Some(4)));
    let spaced = br#" { "usage" : { "prompt_tokens" : 4 , "completion_tokens" : 2 } } "#;
    assert_eq!(AnswerParser::parse(spaced, "").usage(), usage(4, 2, None));
    for silent in [
        r#"{"usage":null}"#,
        r#"{"usage":{"type":"duration","seconds":3}}"#,
        r#"{"text":"\"usage\":{\"prompt_tokens\":1}"}"#,
        "[1]",
        "",
        "{",
    ] {
        assert_eq!(
            (AnswerParser::parse_usage(silent.as_bytes()), AnswerParser::parse(silent.as_bytes(), "").usage()),
            (None, None),
            "{silent}"
        );
    }
}

#[test]
fn usage_repeated_from_the_request_is_ignored() {
    let free = r#"{"usage":{"output_tokens":0,"input_tokens":0},"finish_reason":"abort","choices":[{"finish_reason":"abort"}]}"#;
    let used = r#""usage":{"input_tokens":13,"output_tokens":500}"#;
    for answer in [
        format!(r#"{{"tools":[{{"parameters":{free}}}],{used}}}"#),
        format!(r#"{{{used},"text":{{"format":{{"schema":{free}}}}}}}"#),
        format!(r#"{{"content":[{{"type":"tool_use","input":{free}}}],{used},"metadata":{free}}}"#),
        format!(r#"{{"choices":[{{"message":{free}}}],{used}}}"#),
    ] {
        assert_eq!(AnswerParser::parse_usage(answer.as_bytes()), usage(13, 500, None), "{answer}");
        assert_eq!(AnswerParser::parse(answer.as_bytes(), "").finish_state(), FinishState::None, "{answer}");
        let event = format!(r#"{{"response":{answer},"x":{free}}}"#);
        assert_eq!(AnswerParser::parse(event.as_bytes(), "response").usage(), usage(13, 500, None), "{answer}");
    }
    let alone = format!(r#"{{"tools":[{{"parameters":{free}}}],"usage":null}}"#);
    assert_eq!(AnswerParser::parse_usage(alone.as_bytes()), None);
}

#[test]
fn an_answer_is_aborted_by_any_of_its_choices() {
    let choices = |reasons: [&str; 2]| format!(r#"{{"choices":[{{"finish_reason":{}}},{{"finish_reason":{}}}]}}"#, reasons[0], reasons[1]);
    let finish = |reasons| AnswerParser::parse(choices(reasons).as_bytes(), "").finish_state();
    assert_eq!(finish(["null", "null"]), FinishState::None);
    assert_eq!(finish(["null", "\"a reason that is far too long for any engine\""]), FinishState::Finished);
    assert_eq!(finish(["\"abort\"", "\"stop\""]), FinishState::Abort);
    assert_eq!(finish(["\"stop\"", "\"abort\""]), FinishState::Abort);
}

#[test]
fn an_absurd_usage_figure_does_not_wrap() {
    let usage_of =
        |number: &str| AnswerParser::parse_usage(format!(r#"{{"usage":{{"prompt_tokens":1,"completion_tokens":{number}}}}}"#).as_bytes());
    assert_eq!(usage_of("99999999999999999999999999"), usage(1, u64::MAX, None));
    assert_eq!(usage_of("-5"), usage(1, 0, None));
    assert_eq!(usage_of("\"7\""), usage(1, 0, None));
    assert_eq!(usage_of("[7,{\"completion_tokens\":8}]"), usage(1, 0, None));
}

/// JSON with the names of interest in the right places and in others.
fn json() -> impl Strategy<Value = Value> {
    let name = prop::sample::select(vec![
        "usage",
        "response",
        "choices",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "prompt_tokens_details",
        "cached_tokens",
        "x",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<u32>().prop_map(Value::from),
        prop::sample::select(vec!["abort", "stop", "\"usage\":{", "}]\\", "usage"]).prop_map(Value::from),
    ];
    leaf.prop_recursive(6, 64, 4, move |inner| {
        let object = prop::collection::btree_map(name.clone(), inner.clone(), 0..5);
        let object = object.prop_map(|fields| Value::Object(fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()));
        prop_oneof![prop::collection::vec(inner, 0..4).prop_map(Value::from), object]
    })
}

/// The expected result, from a tree of the whole JSON.
fn by_tree(json: &Value, inner: &str) -> (Option<TokenUsage>, FinishState) {
    // A later field overrides an earlier one.
    let places = json.as_object().into_iter().flatten().filter_map(|(name, value)| match &**name {
        "usage" => Some(value),
        name if name == inner => value.as_object().and_then(|inner| inner.get("usage")),
        _ => None,
    });
    let (mut prompt, mut completion, mut cached_tokens) = (None, None, None);
    for (name, value) in places.filter_map(Value::as_object).flatten() {
        match &**name {
            "prompt_tokens" => prompt = value.as_u64(),
            "completion_tokens" => completion = value.as_u64(),
            "cached_tokens" => cached_tokens = value.as_u64(),
            "prompt_tokens_details" => {
                value.as_object().and_then(|details| details.get("cached_tokens")).inspect(|value| cached_tokens = value.as_u64());
            }
            _ => {}
        }
    }
    let choices = json.get("choices").and_then(Value::as_array).into_iter().flatten();
    let reasons = choices.filter_map(|choice| choice.as_object()?.get("finish_reason")?.as_str());
    let finish = reasons.fold(FinishState::None, |before, reason| {
        if before == FinishState::Abort || reason == "abort" { FinishState::Abort } else { FinishState::Finished }
    });
    let usage = prompt.or(completion).map(|_| TokenUsage {
        prompt_tokens: prompt.unwrap_or(0),
        completion_tokens: completion.unwrap_or(0),
        cached_tokens,
    });
    (usage, finish)
}

proptest! {
    #[test]
    fn an_answer_parses_the_same_however_cut(fields in json(), cut in 1..9_usize, pretty: bool, inner in prop::sample::select(vec!["", "response"])) {
        let answer = if fields.is_object() { fields } else { json!({"usage": fields}) };
        let text = if pretty { serde_json::to_string_pretty(&answer).unwrap() } else { answer.to_string() };
        let mut parser = AnswerParser::new(inner);
        text.as_bytes().chunks(cut).for_each(|piece| parser.feed(piece));
        prop_assert_eq!((parser.usage(), parser.finish_state()), by_tree(&answer, inner), "{}", text);
        prop_assert_eq!(AnswerParser::parse_usage(text.as_bytes()), by_tree(&answer, "").0, "{}", text);
    }

    #[test]
    fn bytes_that_are_not_json_do_no_harm(bytes in prop::collection::vec(prop::sample::select(br#"{}[]",:\ 7-.eusagfinchor_"#.to_vec()), 0..200), cut in 1..9_usize) {
        let mut parser = AnswerParser::new("usage");
        bytes.chunks(cut).for_each(|piece| parser.feed(piece));
        let _ = (parser.usage(), AnswerParser::parse_usage(&bytes));
    }
}
