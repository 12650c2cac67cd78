//! Tests of a conversation as the template sees it.

use serde_json::json;

use super::*;

const TEXT: MessageRules =
    MessageRules { shape: ContentShape::Text, media: MediaMode::Marked, dialect: Dialect::Python, renames_reasoning: true };
const PARTS: MessageRules = MessageRules { shape: ContentShape::Parts, ..TEXT };

fn seen(messages: Value, rules: MessageRules) -> Value {
    Value::Array(conversation(messages.as_array().unwrap(), rules).unwrap().messages)
}

fn refused(messages: Value) -> String {
    conversation(messages.as_array().unwrap(), TEXT).unwrap_err().to_string()
}

#[test]
fn texts_of_parts_are_joined_by_newlines() {
    let messages = json!([{ "role": "user", "content": ["a", { "type": "text", "text": "b" }, { "type": "refusal", "refusal": "c" }, { "type": "text", "text": null }] }]);
    assert_eq!(seen(messages.clone(), TEXT), json!([{ "role": "user", "content": "a\nb\nc" }]));
    assert_eq!(
        seen(messages, PARTS),
        json!([{ "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }, { "type": "text", "text": "c" }] }])
    );
}

#[test]
fn absent_content_is_empty() {
    let messages = json!([{ "role": "assistant", "content": null }, { "role": "assistant" }]);
    assert_eq!(seen(messages.clone(), TEXT), json!([{ "role": "assistant", "content": "" }, { "role": "assistant", "content": "" }]));
    assert_eq!(seen(messages, PARTS), json!([{ "role": "assistant", "content": [] }, { "role": "assistant", "content": [] }]));
}

#[test]
fn unknown_fields_of_messages_are_dropped() {
    let messages = json!([{ "role": "user", "content": "a", "name": "n", "weight": 1, "tool_calls": [], "refusal": "r" }]);
    assert_eq!(seen(messages, TEXT), json!([{ "role": "user", "content": "a", "name": "n" }]));
    let part = json!([{ "role": "user", "content": [{ "type": "text", "text": "a", "cache_control": 1, "prompt_cache_breakpoint": {} }] }]);
    assert_eq!(seen(part, PARTS)[0]["content"], json!([{ "type": "text", "text": "a", "cache_control": 1 }]));
}

#[test]
fn call_arguments_become_objects_in_the_engines_order() {
    let call = |arguments: Value| json!([{ "role": "assistant", "content": null, "tool_calls": [{ "type": "function", "index": 0, "id": "c", "function": { "name": "f", "arguments": arguments } }] }]);
    let seen = seen(call(json!("{\"b\": 1, \"a\": 2}")), TEXT);
    assert_eq!(
        seen[0]["tool_calls"].to_string(),
        r#"[{"id":"c","function":{"arguments":{"b":1,"a":2},"name":"f"},"type":"function","index":0}]"#
    );
    for arguments in [json!(""), json!("not json"), json!("[1]")] {
        assert_eq!(super::tests::seen(call(arguments), TEXT)[0]["tool_calls"][0]["function"]["arguments"], json!({}));
    }
    for arguments in [json!(null), json!({ "a": 1 })] {
        assert!(refused(call(arguments)).contains("each as text"));
    }
    assert!(refused(json!([{ "role": "assistant", "tool_calls": [{ "type": "custom", "function": {} }] }])).contains("tool call"));
}

#[test]
fn tool_results_are_one_text_even_for_part_templates() {
    let messages =
        json!([{ "role": "tool", "tool_call_id": "c", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] }]);
    assert_eq!(seen(messages, PARTS), json!([{ "role": "tool", "content": "a\nb", "tool_call_id": "c" }]));
    let reference = json!([{ "role": "tool", "content": [{ "type": "tool_reference", "name": "f" }] }]);
    assert_eq!(seen(reference, PARTS)[0]["content"], json!([{ "type": "tool_reference", "name": "f" }]));
}

#[test]
fn reasoning_is_passed_under_both_names() {
    let message = |name: &str| json!([{ "role": "assistant", "content": "a", name: "why" }]);
    let both = json!([{ "role": "assistant", "content": "a", "reasoning": "why", "reasoning_content": "why" }]);
    assert_eq!(seen(message("reasoning"), TEXT), both);
    assert_eq!(seen(message("reasoning_content"), TEXT), both);
    assert_eq!(
        seen(message("reasoning_content"), MessageRules { renames_reasoning: false, ..TEXT }),
        json!([{ "role": "assistant", "content": "a" }])
    );
}

#[test]
fn media_are_marked_where_their_tokens_may_begin() {
    let image = json!({ "type": "image_url", "image_url": { "url": "data:" } });
    let messages = json!([{ "role": "user", "content": [{ "type": "text", "text": "a" }, image, { "type": "text", "text": "b" }] }]);
    let prepared = conversation(messages.as_array().unwrap(), TEXT).unwrap();
    assert!(prepared.has_media);
    assert_eq!(prepared.messages[0]["content"], format!("{MEDIA_MARKER}a\nb"));
    assert_eq!(seen(messages.clone(), PARTS)[0]["content"][1], json!({ "type": "text", "text": MEDIA_MARKER }));
    assert_eq!(seen(messages, MessageRules { media: MediaMode::Kept, ..PARTS })[0]["content"][1], json!({ "type": "image" }));
    for part in [
        json!({ "image_url": "x" }),
        json!({ "type": "text", "text": "t", "uuid": "u", "video_url": "x" }),
        json!({ "type": "input_audio", "input_audio": {} }),
    ] {
        assert!(conversation(&[json!({ "role": "user", "content": [part] })], TEXT).unwrap().has_media);
    }
}

#[test]
fn a_billing_line_of_a_system_prompt_is_dropped() {
    let system = |text: &str| json!([{ "role": "system", "content": text }]);
    assert_eq!(seen(system("x-anthropic-billing-header: cch=1\nYou help."), TEXT)[0]["content"], "You help.");
    assert_eq!(seen(system("x-anthropic-billing-header: cch=1"), TEXT)[0]["content"], "");
    let user = json!([{ "role": "user", "content": "x-anthropic-billing-header: cch=1\na" }]);
    assert_eq!(seen(user, TEXT)[0]["content"], "x-anthropic-billing-header: cch=1\na");
}

#[test]
fn developers_become_the_leading_system_message() {
    let messages = vec![
        json!({ "role": "system", "content": "a" }),
        json!({ "role": "user", "content": "b" }),
        json!({ "role": "developer", "content": [{ "type": "text", "text": "c" }, { "type": "text", "text": "d" }], "tools": null }),
    ];
    let expected = json!([{ "role": "system", "content": "a\n\nc\nd" }, { "role": "user", "content": "b" }]);
    assert_eq!(Value::Array(without_developers(messages)), expected);
    let first = vec![json!({ "role": "developer", "content": "a", "tools": null }), json!({ "role": "user", "content": "b" })];
    assert_eq!(Value::Array(without_developers(first)), json!([{ "role": "system", "content": "a" }, { "role": "user", "content": "b" }]));
    let two_systems = vec![json!({ "role": "system", "content": "a" }), json!({ "role": "system", "content": "b" })];
    assert_eq!(without_developers(two_systems.clone()), two_systems);
}

#[test]
fn tools_have_exactly_their_known_fields_or_null() {
    let given = json!({ "type": "function", "function": { "parameters": { "b": 1, "a": 2 }, "name": "f", "other": 1 }, "x": 1 });
    assert_eq!(
        prepare_tools(&[given]).unwrap()[0].to_string(),
        r#"{"type":"function","function":{"name":"f","description":null,"parameters":{"b":1,"a":2}}}"#
    );
    let strict = json!({ "function": { "name": "f", "description": "d", "strict": true }, "defer_loading": true });
    assert_eq!(
        prepare_tools(&[strict]).unwrap()[0].to_string(),
        r#"{"type":"function","function":{"name":"f","description":"d","parameters":null,"strict":true,"defer_loading":true},"defer_loading":true}"#
    );
    assert!(prepare_tools(&[json!({ "function": {} })]).is_err());
    assert!(prepare_tools(&[json!(1)]).is_err());
}

#[test]
fn conversations_that_every_engine_rejects_are_refused() {
    assert!(refused(json!([])).contains("needs a message"));
    assert!(refused(json!([1])).contains("is an object"));
    assert!(refused(json!([{ "content": "a" }])).contains("role"));
    assert!(refused(json!([{ "role": "user", "content": 1 }])).contains("content"));
    assert!(refused(json!([{ "role": "user", "content": [{ "type": "hologram" }] }])).contains("hologram"));
    assert!(refused(json!([{ "role": "user", "content": [{ "text": "a" }] }])).contains("type"));
}

const RUST_TEXT: MessageRules = MessageRules { dialect: Dialect::Rust, ..TEXT };
const RUST_PARTS: MessageRules = MessageRules { dialect: Dialect::Rust, ..PARTS };

#[test]
fn the_rust_front_end_joins_texts_without_a_newline() {
    let text = |text: &str| json!({ "type": "text", "text": text, "cache_control": 1 });
    let messages =
        json!([{ "role": "user", "content": [text("a"), text("b")] }, { "role": "assistant", "content": [text("c"), text("d")] }]);
    assert_eq!(seen(messages.clone(), RUST_TEXT), json!([{ "role": "user", "content": "ab" }, { "role": "assistant", "content": "cd" }]));
    // An assistant's message always has one part; others keep theirs, with only the text.
    let plain = |text: &str| json!({ "type": "text", "text": text });
    assert_eq!(
        seen(messages, RUST_PARTS),
        json!([{ "role": "user", "content": [plain("a"), plain("b")] }, { "role": "assistant", "content": [plain("cd")] }])
    );
    let result = json!([{ "role": "tool", "tool_call_id": "c", "content": [plain("a"), plain("b")] }]);
    assert_eq!(seen(result.clone(), RUST_TEXT)[0]["content"], json!("ab"));
    assert_eq!(seen(result, RUST_PARTS)[0]["content"], json!([plain("a"), plain("b")]));
}

#[test]
fn the_rust_front_end_orders_call_fields_its_own_way() {
    let call = |arguments: &str| json!([{ "role": "assistant", "reasoning": "r", "tool_calls": [{ "function": { "arguments": arguments, "name": "f" }, "index": 0, "id": "c", "type": "function" }] }]);
    let written = |arguments: &str| seen(call(arguments), RUST_PARTS)[0].to_string();
    assert_eq!(
        written("{\"b\": 1, \"a\": 2}"),
        r#"{"role":"assistant","content":[{"type":"text","text":""}],"reasoning":"r","reasoning_content":"r","tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":{"b":1,"a":2}}}]}"#
    );
    assert!(written("[1]").contains(r#""arguments":[1]"#));
    assert!(conversation(call("not json").as_array().unwrap(), RUST_TEXT).is_err());
}

#[test]
fn the_rust_front_end_passes_on_only_roles_and_contents() {
    let system = "x-anthropic-billing-header: 1\nbe brief";
    let messages = json!([{ "role": "system", "content": system }, { "role": "user", "content": "a", "name": "n" }]);
    assert_eq!(seen(messages, RUST_TEXT), json!([{ "role": "system", "content": system }, { "role": "user", "content": "a" }]));
}
