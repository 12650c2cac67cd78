//! Tests of the bodies that are sent.

use std::time::Duration;

use serde_json::json;

use super::*;
use crate::session::Turn;

fn sent(api: Api, system: Option<&str>, turn: usize) -> serde_json::Value {
    let ask = |says: &str, most_tokens| Turn { says: says.into(), most_tokens, pause: Duration::ZERO };
    let turns = vec![ask("first", 5), ask("a \"second\"\n", 6)];
    let session = Session { kind: "chat", begins: None, system: system.map(Into::into), turns };
    let form = RequestOptions { api, model: "m".to_owned(), stream: turn == 0, ignore_eos: turn > 0, response_formats: Vec::new() };
    let answers = ["answered".to_owned()];
    serde_json::from_slice(&body(&form, &session, turn, &answers[..turn])).expect("it is JSON")
}

#[test]
fn a_chat_has_a_message_for_each_turn_and_answer() {
    let first = json!({
        "model": "m", "messages": [{"role": "user", "content": "first"}], "max_tokens": 5,
        "stream": true, "stream_options": {"include_usage": true},
    });
    assert_eq!(sent(Api::Chat, None, 0), first);
    let messages = json!([
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "first"},
        {"role": "assistant", "content": "answered"}, {"role": "user", "content": "a \"second\"\n"},
    ]);
    assert_eq!(sent(Api::Chat, Some("be brief"), 1), json!({"model": "m", "messages": messages, "max_tokens": 6, "ignore_eos": true}));
}

#[test]
fn a_completion_sends_the_conversation_as_one_text() {
    assert_eq!(sent(Api::Completions, None, 0)["prompt"], "first");
    assert_eq!(sent(Api::Completions, Some("be brief"), 1)["prompt"], "be brief\n\nfirst\n\nanswered\n\na \"second\"\n");
}

#[test]
fn schemas_take_turns_by_question() {
    let response_formats = (0..2).map(|number| format!(",\"response_format\":{number}")).collect();
    let form = RequestOptions { api: Api::Chat, model: "m".to_owned(), stream: false, ignore_eos: false, response_formats };
    let format = |says: &str| {
        let turns = vec![Turn { says: says.into(), most_tokens: 5, pause: Duration::ZERO }];
        let session = Session { kind: "chat", begins: None, system: None, turns };
        let body: serde_json::Value = serde_json::from_slice(&body(&form, &session, 0, &[])).expect("it is JSON");
        body["response_format"].clone()
    };
    assert_eq!((format("a"), format("b")), (json!(1), json!(0)));
}
