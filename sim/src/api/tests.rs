//! Prompts of chats against a router's tokens for the same requests.

use hostler_prompt::{Encoder, ModelFiles, PromptRequest};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::fields::Fields;
use super::prompt::chat_prompt;
use crate::EngineArgs;
use crate::tokens::{tokenizer_config_json, tokenizer_json};

fn encoder() -> Encoder {
    let files =
        ModelFiles { tokenizer: tokenizer_json().to_vec(), config: Some(tokenizer_config_json().to_vec()), ..ModelFiles::default() };
    Encoder::new(&files, 1 << 20).unwrap()
}

fn text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        3 => prop::sample::select(&[" the", "water", ".", "\n", "<|im_end|>", "<|im_start|>", "<|im_", " 🚂"][..]).prop_map(str::to_owned),
        1 => any::<String>(),
    ];
    prop::collection::vec(part, 0..6).prop_map(|parts| parts.concat())
}

fn message() -> impl Strategy<Value = Value> {
    let content = prop_oneof![
        4 => text().prop_map(Value::from),
        1 => prop::collection::vec(text(), 1..3)
            .prop_map(|texts| texts.iter().map(|text| json!({ "type": "text", "text": text })).collect()),
    ];
    let plain = (prop::sample::select(&["system", "user", "assistant"][..]), content)
        .prop_map(|(role, content)| json!({ "role": role, "content": content }));
    let call = (text(), text()).prop_map(|(name, argument)| {
        let arguments = json!({ "n": [1, null, true, 1.5], "text": argument, "none": {} }).to_string();
        let call = json!({ "id": "1", "type": "function", "function": { "name": name, "arguments": arguments } });
        json!({ "role": "assistant", "content": null, "tool_calls": [call] })
    });
    prop_oneof![4 => plain, 1 => call]
}

fn chat() -> impl Strategy<Value = Value> {
    let tool = text().prop_map(|text| {
        let parameters = json!({ "type": "object", "properties": { "a": { "type": "string", "description": text } } });
        json!([{ "type": "function", "function": { "name": "find", "parameters": parameters } }])
    });
    (prop::collection::vec(message(), 1..5), prop::option::of(tool), any::<bool>()).prop_map(|(messages, tools, opens)| {
        let mut chat = json!({ "messages": messages, "add_generation_prompt": opens });
        if let Some(tools) = tools {
            chat["tools"] = tools;
        }
        chat
    })
}

#[test]
fn a_router_encodes_every_chat_as_the_engine_does() {
    let encoder = encoder();
    proptest!(|(chat in chat())| {
        let body = chat.to_string();
        let request = PromptRequest::parse("/v1/chat/completions", body.as_bytes()).expect("it is a chat");
        let ours = chat_prompt(&Fields::parse(body.as_bytes(), &EngineArgs::default()).unwrap()).unwrap();
        prop_assert_eq!(encoder.encode(&request).unwrap().tokens, ours);
    });
}
