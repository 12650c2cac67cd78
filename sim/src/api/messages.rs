//! Anthropic's `/v1/messages` and its `count_tokens`.
//!
//! As in vLLM a request becomes a chat, and the chat's answer a message.

use std::collections::VecDeque;
use std::io::Write;

use bytes::Bytes;
use http::StatusCode;
use serde_json::value::to_raw_value;
use serde_json::{Map, Value, json};

use super::Api;
use super::answer::{Answer, Usage, answer_id, collect};
use super::chat::{ChatAnswer, start_chat};
use super::errors::{ApiError, json_string};
use super::fields::Fields;
use super::options::check_model;
use super::prompt::chat_prompt;
use super::tool_call::{CallProgress, ToolCall};
use crate::mailbox::{Delta, Finish};
use crate::reply::{Reply, events, json as json_reply};
use crate::sse::{EventStream, WriteEvents};
use crate::tokens::{Detokenizer, push_escaped};

/// Fields that mean the same in a chat.
const SAME: [&str; 5] = ["model", "max_tokens", "stream", "temperature", "cache_salt"];

/// Line that Claude Code puts before its prompt, different each time. vLLM drops it to keep its
/// cache effective.
const BILLING: &str = "x-anthropic-billing-header";

/// Answers a request for a message.
pub(crate) async fn messages(api: &Api, body: &[u8], request_id: Option<&str>) -> Result<Reply, ApiError> {
    let chat = to_chat(body, &["model", "messages", "max_tokens"])?;
    let chat = start_chat(api, &Fields::parse(chat.as_bytes(), &api.args)?, answer_id("chatcmpl", request_id)).await;
    let ChatAnswer { answer, tool_call, generation } = match chat {
        Ok(chat) => chat,
        Err(error) => return Ok(translated(&error)),
    };
    if answer.options.stream {
        return Ok(events(EventStream::new(generation, MessageEvents::new(answer, tool_call))));
    }
    let choice = match collect(&generation).await {
        Ok(mut choices) => choices.pop().unwrap_or_default(),
        Err(error) => return Ok(translated(&error)),
    };
    let finish = choice.finish.unwrap_or(Finish::Stop);
    // An incomplete call has no input; vLLM fails on it.
    let input = tool_call.as_ref().filter(|_| finish == Finish::Stop).and_then(|call| Some((call, call.input(&choice.tokens)?)));
    let is_call = input.is_some();
    let content = match input {
        Some((call, input)) => {
            let (id, name) = (&call.id, json_string(&call.name));
            format!(r#"{{"type":"tool_use","id":"{id}","name":{name},"input":{input}}}"#)
        }
        None => {
            let mut text = Vec::new();
            if tool_call.is_none() {
                push_escaped(&choice.tokens, &mut text);
            }
            format!(r#"{{"type":"text","text":"{}"}}"#, String::from_utf8_lossy(&text))
        }
    };
    let reason = stop_reason(finish, is_call).map_or(String::new(), |reason| format!(r#","stop_reason":"{reason}""#));
    let (id, model) = (json_string(&answer.id), json_string(&answer.model));
    let usage = usage(answer.chat_usage(choice.tokens.len(), generation.mailbox.cached_tokens()));
    Ok(json_reply(
        StatusCode::OK,
        format!(r#"{{"id":{id},"type":"message","role":"assistant","content":[{content}],"model":{model}{reason},"usage":{usage}}}"#),
    ))
}

/// Counts the tokens of a message's prompt.
pub(crate) fn count_tokens(api: &Api, body: &[u8]) -> Result<Reply, ApiError> {
    let chat = to_chat(body, &["model", "messages"])?;
    let fields = Fields::parse(chat.as_bytes(), &api.args)?;
    let counted = check_model(&fields, api).and_then(|_| chat_prompt(&fields)).map(|tokens| tokens.len());
    Ok(counted.map_or_else(
        |error| translated(&error),
        |count| {
            let body = format!(r#"{{"input_tokens":{count},"context_management":{{"original_input_tokens":{count}}}}}"#);
            json_reply(StatusCode::OK, body)
        },
    ))
}

/// Converts an error to Anthropic's form.
///
/// Errors in the fields themselves stay in OpenAI's form, on every route.
fn translated(error: &ApiError) -> Reply {
    if error.kind == "Bad Request" {
        return error.reply();
    }
    let message = json_string(&error.message);
    json_reply(error.status, format!(r#"{{"type":"error","error":{{"type":"{}","message":{message}}}}}"#, error.kind))
}

/// Converts a request to a chat.
fn to_chat(body: &[u8], needed: &[&str]) -> Result<String, ApiError> {
    let mut request: Map<String, Value> = serde_json::from_slice(body).map_err(|error| ApiError::bad_json(body, &error))?;
    if let Some(missing) = needed.iter().find(|field| !request.contains_key(**field)) {
        return Err(ApiError::missing(missing));
    }
    let mut chat: Map<String, Value> = SAME.iter().filter_map(|field| request.remove_entry(*field)).collect();
    let mut messages = Vec::new();
    if let Some(text) = system_text(request.get("system").unwrap_or(&Value::Null)) {
        messages.push(json!({ "role": "system", "content": text }));
    }
    match request.remove("messages") {
        Some(Value::Array(list)) => list.iter().for_each(|message| push_message(message, &mut messages)),
        Some(other) => drop(chat.insert("messages".to_owned(), other)),
        None => {}
    }
    // The chat itself rejects values that are not lists.
    chat.entry("messages").or_insert(messages.into());
    if let Some(Value::Array(tools)) = request.remove("tools") {
        let tools = tools.into_iter().enumerate().map(|(at, tool)| to_function(at, tool)).collect::<Result<Vec<_>, _>>()?;
        chat.insert("tools".to_owned(), tools.into());
    }
    let choice = request.get("tool_choice").unwrap_or(&Value::Null);
    let choice = match choice["type"].as_str() {
        Some("any") => "required".into(),
        Some("tool") => json!({ "type": "function", "function": { "name": choice["name"] } }),
        _ => choice["type"].clone(),
    };
    chat.insert("tool_choice".to_owned(), choice);
    if let Some(schema) =
        request.get("output_config").and_then(|config| config.pointer("/format/schema")).filter(|schema| !schema.is_null())
    {
        let format = json!({ "type": "json_schema", "json_schema": { "name": "json_schema", "schema": schema } });
        chat.insert("response_format".to_owned(), format);
    }
    Ok(Value::Object(chat).to_string())
}

/// Text of a system prompt, which may be in several blocks.
fn system_text(system: &Value) -> Option<String> {
    let blocks = system.as_array().map_or(&[][..], Vec::as_slice).iter().filter_map(|block| block["text"].as_str());
    let texts: Vec<&str> = system.as_str().into_iter().chain(blocks.filter(|text| !text.starts_with(BILLING))).collect();
    (!texts.is_empty()).then(|| texts.concat())
}

fn to_function(at: usize, tool: Value) -> Result<Value, ApiError> {
    let Value::Object(mut tool) = tool else {
        let message = "Input should be a valid dictionary or object to extract fields from";
        let tool = to_raw_value(&tool).expect("a value is always valid JSON");
        return Err(ApiError::wrong_type(&format!("tools.{at}"), "model_attributes_type", message, &tool));
    };
    let Some(Value::Object(mut schema)) = tool.remove("input_schema") else { return Err(ApiError::missing("tools.input_schema")) };
    schema.entry("type").or_insert("object".into());
    Ok(json!({ "type": "function", "function": { "name": tool.remove("name"), "parameters": schema } }))
}

/// Converts a message to the chat's form. Results of tools become separate messages before it.
fn push_message(message: &Value, messages: &mut Vec<Value>) {
    let (role, content) = (&message["role"], &message["content"]);
    if role == "system" {
        messages.extend(system_text(content).map(|text| json!({ "role": role, "content": text })));
        return;
    }
    let Some(blocks) = content.as_array() else {
        messages.push(message.clone());
        return;
    };
    let (mut parts, mut calls) = (Vec::new(), Vec::new());
    for block in blocks {
        match block["type"].as_str() {
            Some("text") => parts.push(json!({ "type": "text", "text": block["text"] })),
            Some("image") => parts.push(json!({ "type": "image_url" })),
            Some("tool_use") => {
                let arguments = block["input"].to_string();
                calls.push(json!({ "id": block["id"], "type": "function", "function": { "name": block["name"], "arguments": arguments } }));
            }
            Some("tool_result") => {
                let texts = block["content"].as_array().map_or(&[][..], Vec::as_slice).iter().filter_map(|part| part["text"].as_str());
                let text: Vec<&str> = block["content"].as_str().into_iter().chain(texts).collect();
                messages.push(json!({ "role": "tool", "tool_call_id": block["tool_use_id"], "content": text.join("\n") }));
            }
            _ => {}
        }
    }
    if role == "user" && parts.is_empty() {
        return;
    }
    let mut written = json!({ "role": role, "content": parts });
    if !calls.is_empty() {
        written["tool_calls"] = calls.into();
    }
    messages.push(written);
}

fn stop_reason(finish: Finish, is_call: bool) -> Option<&'static str> {
    match finish {
        Finish::Length => Some("max_tokens"),
        Finish::Stop if is_call => Some("tool_use"),
        Finish::Stop => Some("end_turn"),
        Finish::Abort | Finish::Error => None,
    }
}

/// Usage in Anthropic's form, which counts the tokens of the cache separately.
fn usage(usage: Usage) -> String {
    let Usage { prompt, generated, cached, newly_cached } = usage;
    let others = prompt.saturating_sub(cached.unwrap_or(0)).saturating_sub(cached.and(newly_cached).unwrap_or(0));
    let mut json = format!(r#"{{"input_tokens":{others},"output_tokens":{generated}"#);
    if let Some(cached) = cached {
        let created = newly_cached.unwrap_or(0);
        json.push_str(&format!(r#","cache_creation_input_tokens":{created},"cache_read_input_tokens":{cached}"#));
    }
    json.push('}');
    json
}

/// Events of a streamed message, which has one content block.
#[derive(Debug)]
struct MessageEvents {
    answer: Answer,
    tool_call: Option<ToolCall>,
    call: CallProgress,
    text: Detokenizer,
    generated: usize,
    has_started: bool,
    block_is_open: bool,
}

impl MessageEvents {
    fn new(answer: Answer, tool_call: Option<ToolCall>) -> Self {
        let (call, text) = (CallProgress::default(), Detokenizer::default());
        Self { answer, tool_call, call, text, generated: 0, has_started: false, block_is_open: false }
    }

    fn start(&self) -> Bytes {
        let (id, model) = (json_string(&self.answer.id), json_string(&self.answer.model));
        let usage = usage(Usage { cached: None, ..self.answer.usage(0, 0) });
        let message = format!(
            r#""message":{{"id":{id},"type":"message","role":"assistant","content":[],"model":{model},"stop_reason":null,"stop_sequence":null,"usage":{usage}}}"#
        );
        event("message_start", message.as_bytes())
    }

    fn open(&mut self, block: &str, events: &mut VecDeque<Bytes>) {
        if !std::mem::replace(&mut self.block_is_open, true) {
            events.push_back(event("content_block_start", format!(r#""content_block":{block},"index":0"#).as_bytes()));
        }
    }

    fn write_text(&mut self, tokens: &[u32], events: &mut VecDeque<Bytes>) {
        let head = br#""delta":{"type":"text_delta","text":""#;
        let mut body = head.to_vec();
        self.text.push_escaped(tokens, &mut body);
        if body.len() > head.len() {
            self.open(r#"{"type":"text","text":""}"#, events);
            body.extend_from_slice(br#""},"index":0"#);
            events.push_back(event("content_block_delta", &body));
        }
    }

    fn write_call(&mut self, tokens: &[u32], events: &mut VecDeque<Bytes>) {
        let Some(call) = &self.tool_call else { return };
        let added = call.advance(&mut self.call, tokens);
        if added.opens {
            let (id, name) = (&call.id, json_string(&call.name));
            let block = format!(r#"{{"type":"tool_use","id":"{id}","name":{name},"input":{{}}}}"#);
            self.open(&block, events);
        }
        if !added.arguments.is_empty() {
            let body = format!(r#""delta":{{"type":"input_json_delta","partial_json":"{}"}},"index":0"#, added.arguments);
            events.push_back(event("content_block_delta", body.as_bytes()));
        }
    }

    fn close(&self, finish: Finish, cached: usize, events: &mut VecDeque<Bytes>) {
        if self.block_is_open {
            events.push_back(event("content_block_stop", br#""index":0"#));
        }
        let is_call = self.tool_call.is_some() && self.block_is_open;
        let reason = stop_reason(finish, is_call).map_or("null".to_owned(), json_string);
        let usage = usage(self.answer.chat_usage(self.generated, cached));
        let body = format!(r#""delta":{{"stop_reason":{reason},"stop_sequence":null}},"usage":{usage}"#);
        events.push_back(event("message_delta", body.as_bytes()));
        events.push_back(Bytes::from_static(b"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"));
    }
}

fn event(kind: &str, body: &[u8]) -> Bytes {
    let mut event = Vec::with_capacity(64 + 2 * kind.len() + body.len());
    let _ = write!(event, "event: {kind}\ndata: {{\"type\":\"{kind}\",");
    event.extend_from_slice(body);
    event.extend_from_slice(b"}\n\n");
    event.into()
}

impl WriteEvents for MessageEvents {
    fn write(&mut self, delta: &Delta, cached: usize, events: &mut VecDeque<Bytes>) {
        if !std::mem::replace(&mut self.has_started, true) {
            events.push_back(self.start());
        }
        self.generated += delta.tokens.len();
        if self.tool_call.is_some() {
            self.write_call(&delta.tokens, events);
        } else {
            self.write_text(&delta.tokens, events);
        }
        if let Some(finish) = delta.finish {
            self.close(finish, cached, events);
        }
    }

    fn fail(&mut self, events: &mut VecDeque<Bytes>) {
        let message = json_string(&ApiError::engine_failed().message);
        let body = format!(r#""error":{{"type":"internal_error","message":{message}}}"#);
        events.push_back(event("error", body.as_bytes()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The refusal matches vLLM 0.32.
    #[test]
    fn a_tool_that_is_no_object_is_refused() {
        let convert = |tool: Value| to_chat(json!({ "messages": [], "tools": [{ "input_schema": {} }, tool] }).to_string().as_bytes(), &[]);
        for tool in [json!([]), json!([["input_schema", {}]]), json!("x"), json!(0), json!(true), json!(null)] {
            let refused = convert(tool).unwrap_err();
            assert_eq!((refused.status, refused.param.as_deref()), (StatusCode::BAD_REQUEST, Some("body.tools.1")));
            assert!(refused.message.contains("'model_attributes_type'"), "{}", refused.message);
        }
        for tool in [json!({}), json!({ "input_schema": [] }), json!({ "input_schema": null })] {
            assert_eq!(convert(tool).unwrap_err().param.as_deref(), Some("body.tools.input_schema"));
        }
        assert!(convert(json!({ "name": "f", "input_schema": {} })).is_ok());
    }
}
