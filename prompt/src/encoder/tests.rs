//! Tests of requests from body to tokens.

use serde_json::json;

use super::*;
use crate::fixture::{self, CHATML};

fn request(path: &str, body: &Value) -> PromptRequest {
    PromptRequest::parse(path, body.to_string().as_bytes()).unwrap()
}

fn chat(encoder: &Encoder, body: &Value) -> Result<EncodedPrompt, EncodeError> {
    encoder.encode(&request("/v1/chat/completions", body))
}

fn completion(encoder: &Encoder, body: &Value) -> EncodedPrompt {
    encoder.encode(&request("/v1/completions", body)).unwrap()
}

/// Tokens of this text.
fn of(encoder: &Encoder, text: &str) -> Vec<u32> {
    completion(encoder, &json!({ "prompt": text, "add_special_tokens": false })).tokens
}

fn user(content: &str) -> Value {
    json!({ "role": "user", "content": content })
}

#[test]
fn a_chat_is_encoded_as_its_template_renders_it() {
    let encoder = fixture::encoder(CHATML);
    let encoded = chat(&encoder, &json!({ "messages": [user("hello")] })).unwrap();
    assert_eq!(encoded.tokens, of(&encoder, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"));
    assert!(encoded.is_whole);
    let open = chat(&encoder, &json!({ "messages": [user("hello")], "add_generation_prompt": false })).unwrap();
    assert_eq!(open.tokens, of(&encoder, "<|im_start|>user\nhello<|im_end|>\n"));
}

#[test]
fn a_growing_chat_costs_its_new_segments() {
    let encoder = fixture::encoder(CHATML);
    let mut messages = vec![json!({ "role": "system", "content": "You are the oracle of the world. ".repeat(40) })];
    for turn in 0..20 {
        let question = format!("user asks {turn} ").repeat(10);
        messages.push(user(&question));
        let before = encoder.stats();
        chat(&encoder, &json!({ "messages": messages })).unwrap();
        let encoded = encoder.stats().encoded_bytes - before.encoded_bytes;
        let answer = format!("the answer {turn} ").repeat(20);
        let last_answer = if turn == 0 { messages[0]["content"].as_str().unwrap().len() } else { answer.len() };
        let new = question.len() + "user\n".len() + last_answer + "assistant\n".len();
        assert!(encoded as f64 <= 1.1 * new as f64, "turn {turn}: {encoded} bytes encoded, {new} are new");
        messages.push(json!({ "role": "assistant", "content": answer }));
    }
    assert!(encoder.stats().hits > 300);
}

#[test]
fn a_final_message_is_continued() {
    let encoder = fixture::encoder(CHATML);
    let body = |text: &str| json!({ "messages": [user("hello"), { "role": "assistant", "content": text }], "add_generation_prompt": false, "continue_final_message": true });
    let expected = of(&encoder, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\none two ");
    assert_eq!(chat(&encoder, &body("one two ")).unwrap().tokens, expected);
    let trimming = fixture::encoder("{% for message in messages %}{{ message.content | trim }}|{% endfor %}");
    assert_eq!(chat(&trimming, &body("one two ")).unwrap().tokens, of(&trimming, "hello|one two"));
    let mut both = body("a");
    both["add_generation_prompt"] = json!(true);
    assert!(matches!(chat(&encoder, &both), Err(EncodeError::Invalid(_))));
    let dropping = fixture::encoder("{{ messages[0].content }}");
    assert!(matches!(chat(&dropping, &body("a")), Err(EncodeError::Invalid(_))));
}

#[test]
fn the_prompt_ends_before_the_first_image() {
    let image = json!({ "type": "image_url", "image_url": { "url": "data:image/png;base64,AAAA" } });
    let body = json!({ "messages": [user("one"), { "role": "user", "content": [{ "type": "text", "text": "two" }, image, { "type": "text", "text": "three" }] }] });
    let string = fixture::encoder(CHATML);
    let encoded = chat(&string, &body).unwrap();
    assert!(!encoded.is_whole);
    assert_eq!(encoded.tokens, of(&string, "<|im_start|>user\none<|im_end|>\n<|im_start|>user\n"));

    let head = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}";
    let tail = "{% endif %}<|im_end|>{% endfor %}";
    let parts = fixture::encoder(&format!(
        "{head}{{% for p in m.content %}}{{% if p.type == 'image' %}}<img>{{% else %}}{{{{ p.text }}}}{{% endif %}}{{% endfor %}}{tail}"
    ));
    assert_eq!(chat(&parts, &body).unwrap().tokens, of(&parts, "<|im_start|>user\none<|im_end|><|im_start|>user\ntwo"));

    // This template puts the placeholders for images before all text of the message.
    let first = fixture::encoder(&format!(
        "{head}{{% for p in m.content %}}{{% if p.type == 'image' %}}<img>{{% endif %}}{{% endfor %}}{{% for p in m.content %}}{{% if p.type == 'text' %}}{{{{ p.text }}}}{{% endif %}}{{% endfor %}}{tail}"
    ));
    assert_eq!(chat(&first, &body).unwrap().tokens, of(&first, "<|im_start|>user\none<|im_end|><|im_start|>user\n"));
}

#[test]
fn the_presence_of_tools_selects_the_template() {
    let config = json!({ "chat_template": [{ "name": "default", "template": "plain" }, { "name": "tool_use", "template": "{{ tools[0].function.name }}" }] });
    let files = ModelFiles { template: None, config: Some(config.to_string().into_bytes()), ..fixture::files(&fixture::byte_level(), "") };
    let encoder = Encoder::new(&files, 1 << 20).unwrap();
    let tools = json!([{ "type": "function", "function": { "name": "hello" } }]);
    assert_eq!(chat(&encoder, &json!({ "messages": [user("a")] })).unwrap().tokens, of(&encoder, "plain"));
    assert_eq!(chat(&encoder, &json!({ "messages": [user("a")], "tools": tools })).unwrap().tokens, of(&encoder, "hello"));
    // The file takes precedence over the config.
    let encoder = Encoder::new(&ModelFiles { template: Some("file".to_owned()), ..files }, 1 << 20).unwrap();
    assert_eq!(chat(&encoder, &json!({ "messages": [user("a")] })).unwrap().tokens, of(&encoder, "file"));
}

#[test]
fn special_tokens_and_variables_reach_the_template() {
    let config = json!({ "bos_token": { "content": "<|endoftext|>" }, "eos_token": "<|im_end|>" });
    let template = "{{ bos_token }}{{ unk_token }}{{ color }}{{ documents[0].title }}{{ eos_token }}{{ tools is none }}";
    let files = ModelFiles { config: Some(config.to_string().into_bytes()), ..fixture::files(&fixture::byte_level(), template) };
    let encoder = Encoder::new(&files, 1 << 20).unwrap();
    let body = json!({ "messages": [user("a")], "chat_template_kwargs": { "color": "red" }, "documents": [{ "title": "t" }] });
    assert_eq!(chat(&encoder, &body).unwrap().tokens, of(&encoder, "<|endoftext|>redt<|im_end|>True"));
}

#[test]
fn developers_keep_their_role_only_if_the_template_knows_it() {
    let body = json!({ "messages": [{ "role": "developer", "content": "a" }] });
    let knows = fixture::encoder("{% for m in messages %}{{ 'D' if m.role == 'developer' else m.role }}{% endfor %}");
    assert_eq!(chat(&knows, &body).unwrap().tokens, of(&knows, "D"));
    let other = fixture::encoder("{% for m in messages %}{{ m.role }}{% endfor %}");
    assert_eq!(chat(&other, &body).unwrap().tokens, of(&other, "system"));
}

#[test]
fn the_rust_front_end_keeps_developers_and_drops_uncallable_tools() {
    let encoder = fixture::encoder("{% for m in messages %}{{ m.role }}{% endfor %}{% if tools %}{{ tools[0].function.name }}{% endif %}");
    let rust = |body: &Value| encoder.encode_in(Dialect::Rust, &request("/v1/chat/completions", body)).unwrap().tokens;
    assert_eq!(rust(&json!({ "messages": [{ "role": "developer", "content": "a" }] })), of(&encoder, "developer"));
    let tools = json!([{ "type": "function", "function": { "name": "hello" } }]);
    let with_choice = |choice: &str| json!({ "messages": [user("a")], "tools": tools, "tool_choice": choice });
    assert_eq!(rust(&with_choice("auto")), of(&encoder, "userhello"));
    assert_eq!(rust(&with_choice("none")), of(&encoder, "user"));
    assert_eq!(chat(&encoder, &with_choice("none")).unwrap().tokens, of(&encoder, "userhello"));
    assert_eq!(rust(&json!({ "messages": [user("a")], "tools": [] })), of(&encoder, "user"));
}

#[test]
fn the_rust_front_end_writes_media_placeholders_in_place() {
    let image = json!({ "type": "image_url", "image_url": { "url": "data:image/png;base64,AAAA" } });
    let body = json!({ "messages": [{ "role": "user", "content": [{ "type": "text", "text": "two" }, image, { "type": "text", "text": "three" }] }] });
    let encoder = fixture::encoder(CHATML);
    let encoded = encoder.encode_in(Dialect::Rust, &request("/v1/chat/completions", &body)).unwrap();
    assert!(!encoded.is_whole);
    assert_eq!(encoded.tokens, of(&encoder, "<|im_start|>user\ntwo"));
}

#[test]
fn a_prompt_that_cannot_be_encoded_says_why() {
    let bare = Encoder::new(&ModelFiles { template: None, ..fixture::files(&fixture::byte_level(), "") }, 1 << 20).unwrap();
    assert_eq!(chat(&bare, &json!({ "messages": [user("a")] })), Err(EncodeError::NotChat));
    let refusing = fixture::encoder("{{ raise_exception('no system here') }}");
    let error = chat(&refusing, &json!({ "messages": [user("a")] })).unwrap_err();
    assert_eq!(error.to_string(), "the chat template refused: no system here (line 1)");
    let encoder = fixture::encoder(CHATML);
    assert!(matches!(chat(&encoder, &json!({ "messages": [user("a")], "chat_template": "x" })), Err(EncodeError::Unsupported(_))));
    assert!(matches!(chat(&encoder, &json!({ "messages": [] })), Err(EncodeError::Invalid(_))));
    let no_tools = json!({ "messages": [user("a")], "tools": [] });
    assert!(matches!(chat(&encoder, &no_tools), Err(EncodeError::Invalid(_))));
    assert!(encoder.encode(&request("/tokenize", &no_tools)).is_ok());
    let long = json!({ "messages": [user(&"a".repeat(MAX_TEXT_BYTES))] });
    assert!(matches!(chat(&encoder, &long), Err(EncodeError::TooLong { most: MAX_TEXT_BYTES, .. })));
}

#[test]
fn chats_without_a_template_are_left_to_the_engine() {
    let mut tokenizer = fixture::byte_level();
    for (number, token) in ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"].into_iter().enumerate() {
        tokenizer["added_tokens"].as_array_mut().unwrap().push(fixture::added_token(2000 + number, token));
    }
    let encoder = Encoder::new(&fixture::files(&tokenizer, CHATML), 1 << 20).unwrap();
    assert!(matches!(chat(&encoder, &json!({ "messages": [user("a")] })), Err(EncodeError::Unsupported(_))));
    assert!(!of(&encoder, "hello").is_empty());
}

#[test]
fn a_batch_counts_as_its_first_prompt_and_the_rest() {
    let encoder = fixture::encoder(CHATML);
    let encoded = completion(&encoder, &json!({ "prompt": ["hello", "12345678", "9"] }));
    assert_eq!((encoded.tokens, encoded.batch_tokens), (of(&encoder, "hello"), 3));
    let encoded = completion(&encoder, &json!({ "prompt": [[7, 8], [9]] }));
    assert_eq!((encoded.tokens, encoded.batch_tokens), (vec![7, 8], 1));
}

#[test]
fn a_truncated_prompt_keeps_what_its_side_says() {
    let encoder = Encoder::new(&fixture::files(&fixture::with_first_token(), CHATML), 1 << 20).unwrap();
    let first = of(&encoder, "<|endoftext|>")[0];
    let tokens = |extra: Value| {
        let mut body = json!({ "prompt": "qvxyzk", "truncate_prompt_tokens": 3 });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        completion(&encoder, &body).tokens
    };
    assert_eq!(tokens(json!({})), [vec![first], of(&encoder, "zk")].concat());
    assert_eq!(tokens(json!({ "truncation_side": "left" })), of(&encoder, "yzk"));
    assert_eq!(tokens(json!({ "truncation_side": "right" })), [vec![first], of(&encoder, "qv")].concat());
    assert_eq!(tokens(json!({ "add_special_tokens": false })), of(&encoder, "yzk"));
    assert_eq!(tokens(json!({ "truncate_prompt_tokens": 100 })), [vec![first], of(&encoder, "qvxyzk")].concat());
    let only_special = request("/v1/completions", &json!({ "prompt": "qvxyzk", "truncate_prompt_tokens": 1 }));
    assert!(matches!(encoder.encode(&only_special), Err(EncodeError::Unsupported(_))));
    assert_eq!(completion(&encoder, &json!({ "prompt": [1, 2, 3, 4], "truncate_prompt_tokens": 2 })).tokens, [3, 4]);
}

#[test]
fn a_template_that_does_not_compile_is_an_error() {
    let error = Encoder::new(&fixture::files(&fixture::byte_level(), "{% if %}"), 0).unwrap_err();
    assert!(matches!(error, FilesError::Template(_)), "{error}");
}

#[test]
fn an_encoder_is_shared_by_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Encoder>();
}
