//! Translating a body takes no more memory than the body's length.

use serde_json::Value;

use super::messages_translator;
use super::ollama_translator::{OllamaRequest, OllamaRoute};
use super::responses_translator;
use crate::growth::assert_linear;

#[test]
fn translating_messages_takes_no_more_than_a_bodys_length() {
    let needed = [("model", r#""m""#), ("max_tokens", "9"), ("messages", r#"[{"role":"user","content":"x"}]"#)];
    assert_linear("/v1/messages", &needed, |body| {
        let _ = messages_translator::chat_request(body).map(|(chat, _)| chat.to_string());
    });
    assert_linear("/v1/messages/count_tokens", &needed, |body| {
        let _ = messages_translator::count_request(body).map(|chat| chat.to_string());
    });
}

#[test]
fn translating_a_response_takes_no_more_than_a_bodys_length() {
    assert_linear("/v1/responses", &[("model", r#""m""#), ("input", r#""x""#)], |body| {
        let _ = responses_translator::needs_kept_responses(body);
        let _ = responses_translator::chat_request(body).map(|(chat, ..)| chat.to_string());
    });
}

#[test]
fn translating_for_ollama_takes_no_more_than_a_bodys_length() {
    let chat = [("model", r#""m""#), ("messages", r#"[{"role":"user","content":"x"}]"#)];
    let generate = [("model", r#""m""#), ("prompt", r#""x""#)];
    let embed = [("model", r#""m""#), ("input", r#""x""#)];
    for (form, needed) in
        [(OllamaRoute::Chat, &chat), (OllamaRoute::Generate, &generate), (OllamaRoute::Embed, &embed), (OllamaRoute::Embedding, &generate)]
    {
        assert_linear(&format!("{form:?}"), needed, |body| {
            let asked = OllamaRequest::parse(form, body).ok().and_then(|request| request.engine_request);
            let _ = asked.map(|asked| Value::Object(asked.fields).to_string());
        });
    }
}
