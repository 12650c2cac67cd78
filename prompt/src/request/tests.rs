//! Tests of the values read from a request.

use serde_json::json;

use super::*;

fn parse(path: &str, body: &Value) -> Option<PromptRequest> {
    PromptRequest::parse(path, body.to_string().as_bytes())
}

fn chat(body: &Value) -> Chat {
    match parse("/v1/chat/completions", body).unwrap().prompt {
        Prompt::Chat(chat) => *chat,
        other => panic!("not a chat: {other:?}"),
    }
}

fn completion(prompt: Value) -> Prompt {
    parse("/v1/completions", &json!({ "prompt": prompt })).unwrap().prompt
}

#[test]
fn bodies_without_a_prompt_are_no_prompt_requests() {
    assert!(parse("/v1/embeddings", &json!({ "prompt": "a" })).is_none());
    assert!(parse("/v1/completions", &json!({ "messages": [] })).is_none());
    assert!(parse("/v1/completions", &json!({ "prompt": "a", "prompt_embeds": "AAAA" })).is_none());
    assert!(parse("/v1/completions", &json!({ "prompt": "" })).is_none());
    assert!(parse("/v1/completions", &json!({ "prompt": [1, -2] })).is_none());
    assert!(parse("/v1/completions", &json!({ "prompt": ["a", 1] })).is_none());
    assert!(parse("/v1/chat/completions", &json!({ "prompt": "a" })).is_none());
    assert!(parse("/v1/chat/completions", &json!({ "messages": "a" })).is_none());
    assert!(parse("/tokenize", &json!({ "prompt": ["a"] })).is_none());
    assert!(PromptRequest::parse("/v1/chat/completions", b"{").is_none());
}

#[test]
fn a_chat_has_everything_that_its_template_reads() {
    let chat = chat(&json!({
        "messages": [{ "role": "user", "content": "a" }],
        "documents": [{ "title": "t", "text": "x" }],
        "reasoning_effort": "low",
        "chat_template_kwargs": { "reasoning_effort": "high", "color": "red", "empty": null, "mode": "auto", "tools": [1], "add_generation_prompt": false },
    }));
    assert_eq!(Value::Object(chat.variables), json!({ "reasoning_effort": "low", "color": "red", "enable_thinking": true }));
    assert_eq!((chat.add_generation_prompt, chat.continue_final_message, chat.special_tokens), (true, false, false));
    assert_eq!(chat.tools, Some(vec![json!(1)]));
    assert_eq!(chat.documents, Some(json!([{ "title": "t", "text": "x" }])));
}

#[test]
fn a_requests_own_thinking_setting_is_kept() {
    let body = json!({ "messages": [], "reasoning_effort": "none", "chat_template_kwargs": { "enable_thinking": true } });
    assert_eq!(chat(&body).variables["enable_thinking"], true);
    assert_eq!(chat(&json!({ "messages": [], "reasoning_effort": "none" })).variables["enable_thinking"], false);
}

#[test]
fn prompts_of_every_kind_are_read() {
    let is_text = |prompt: &Prompt, expected: &str, more: usize| matches!(prompt, Prompt::Text { text, special_tokens: true, more_bytes } if text == expected && *more_bytes == more);
    assert!(is_text(&completion(json!("abc")), "abc", 0));
    assert!(is_text(&completion(json!(["abc", "defgh", "i"])), "abc", 6));
    assert!(matches!(completion(json!([1, 2])), Prompt::Tokens { tokens, more: 0 } if tokens == [1, 2]));
    assert!(matches!(completion(json!([[1, 2], [3], [4, 5]])), Prompt::Tokens { tokens, more: 3 } if tokens == [1, 2]));
}

#[test]
fn a_prompt_keeps_no_more_than_it_needs() {
    let ids = |count: usize| format!("[{}0]", "0,".repeat(count));
    let too_long = format!(r#"{{"prompt":{}}}"#, ids(MAX_TOKENS));
    assert!(PromptRequest::parse("/v1/completions", too_long.as_bytes()).is_none());
    let many_values = format!(r#"{{"messages":[{{"role":"user","content":{}}}]}}"#, ids(200_000));
    assert!(PromptRequest::parse("/v1/chat/completions", many_values.as_bytes()).is_none());
    let long_text = json!({ "messages": [{ "role": "user", "content": "a,".repeat(200_000) }] });
    assert!(parse("/v1/chat/completions", &long_text).is_some());
}

#[test]
fn a_field_that_only_engines_can_encode_is_named() {
    let messages = json!([]);
    for body in [
        json!({ "messages": messages, "chat_template": "x" }),
        json!({ "messages": messages, "chat_template_kwargs": { "chat_template": "x" } }),
        json!({ "messages": messages, "chat_template_kwargs": { "tokenize": true } }),
        json!({ "messages": messages, "truncate_prompt_tokens": -1 }),
        json!({ "messages": messages, "kv_transfer_params": { "prompt_token_ids": [1] } }),
    ] {
        assert!(parse("/v1/chat/completions", &body).unwrap().unsupported.is_some(), "{body}");
    }
    assert!(parse("/v1/completions", &json!({ "prompt": "a", "suffix": "b" })).unwrap().unsupported.is_some());
    assert!(parse("/v1/completions", &json!({ "prompt": "a", "suffix": null })).unwrap().unsupported.is_none());
}

#[test]
fn a_truncation_keeps_the_end_unless_asked_otherwise() {
    let side = |body: Value| parse("/v1/completions", &body).unwrap().truncation;
    let truncation = |side| Some(Truncation { tokens: 5, side });
    assert_eq!(side(json!({ "prompt": "a", "truncate_prompt_tokens": 5 })), truncation(TruncationSide::Inner));
    assert_eq!(side(json!({ "prompt": "a", "truncate_prompt_tokens": 5, "truncation_side": "left" })), truncation(TruncationSide::Last));
    assert_eq!(side(json!({ "prompt": "a", "truncate_prompt_tokens": 5, "truncation_side": "right" })), truncation(TruncationSide::First));
    assert_eq!(side(json!({ "prompt": "a", "truncate_prompt_tokens": null })), None);
}
