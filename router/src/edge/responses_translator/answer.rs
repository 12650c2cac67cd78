//! Translates an engine's whole answer to a response, and keeps the request fields that responses
//! repeat.

use std::time::SystemTime;

use bytes::Bytes;
use hostler_api::{ChunkChoice, ChunkLogprobs, ChunkMessage, ChunkUsage, CompletionChunk};
use serde_json::{Map, Value, json};

use super::tools::{NamedTool, RenamedTools, custom_input, is_cut};
use crate::edge::translation::{text_beside_calls, unreadable_answer};

/// Most bytes of repeated fields. Each stream keeps them, and sends them three times.
const MAX_REPEATED_BYTES: usize = 4 * 1024 * 1024;

/// Request fields that a response repeats, with their values if the request lacks them.
fn repeated_fields() -> [(&'static str, Value); 16] {
    [
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("max_tool_calls", Value::Null),
        ("metadata", Value::Null),
        ("model", "".into()),
        ("parallel_tool_calls", true.into()),
        ("reasoning", Value::Null),
        ("service_tier", "auto".into()),
        ("temperature", 1.0.into()),
        ("text", json!({"format": {"type": "text"}})),
        ("tool_choice", "auto".into()),
        ("tools", json!([])),
        ("top_logprobs", Value::Null),
        ("top_p", 1.0.into()),
        ("truncation", "disabled".into()),
        ("user", Value::Null),
    ]
}

/// The fields of a request that its response repeats.
#[derive(Debug, Clone)]
pub(in crate::edge) struct ResponseFields {
    /// The text of an object: parsed values take many times the memory, and a stream may last long.
    repeated: Bytes,
    /// The name that the client gives the response.
    id: Option<String>,
    /// Tools with other names in the chat.
    pub(super) tools: RenamedTools,
}

impl ResponseFields {
    /// # Errors
    /// If the fields take more than the limit.
    pub(super) fn new(request: &Map<String, Value>) -> Result<Self, String> {
        let given = |name: &str| request.get(name).filter(|value| !value.is_null()).cloned();
        let mut fields: Map<String, Value> =
            repeated_fields().into_iter().map(|(name, default)| (name.to_owned(), given(name).unwrap_or(default))).collect();
        for (name, value) in [("background", false), ("store", false)] {
            fields.insert(name.to_owned(), value.into());
        }
        fields.insert("previous_response_id".to_owned(), Value::Null);
        let repeated = Value::Object(fields).to_string();
        if repeated.len() > MAX_REPEATED_BYTES {
            let most = MAX_REPEATED_BYTES / 1024 / 1024;
            return Err(format!("what a response repeats (instructions, tools, metadata and the like) is longer than {most} MiB"));
        }
        let id = given("request_id").and_then(|id| id.as_str().map(str::to_owned));
        Ok(Self { repeated: repeated.into(), id, tools: RenamedTools::default() })
    }

    /// Counts the memory of the repeated fields.
    pub(in crate::edge) fn keep_in<E>(&mut self, count: impl FnOnce(Bytes) -> Result<Bytes, E>) -> Result<(), E> {
        self.repeated = count(std::mem::take(&mut self.repeated))?;
        Ok(())
    }

    /// A response with these items, ended as the engine says. Without an `end` it is in progress.
    pub(super) fn response(&self, head: &ResponseHead, output: &[Value], end: Option<(&str, ChunkUsage)>) -> Value {
        let is_cut = end.is_some_and(|(finish, _)| finish == "length");
        let status = match end {
            None => "in_progress",
            Some(_) if is_cut => "incomplete",
            Some(_) => "completed",
        };
        let mut response: Map<String, Value> = serde_json::from_slice(&self.repeated).expect("it was written as an object");
        let own = [
            ("id", self.id.clone().unwrap_or_else(|| format!("resp_{}", head.id)).into()),
            ("object", json!("response")),
            ("created_at", json!(head.created_at)),
            ("status", json!(status)),
            ("error", Value::Null),
            ("incomplete_details", if is_cut { json!({"reason": "max_output_tokens"}) } else { Value::Null }),
            ("output", output.into()),
            ("usage", end.map_or(Value::Null, |(_, usage)| usage_of(usage))),
        ];
        response.extend(own.map(|(name, value)| (name.to_owned(), value)));
        if !head.model.is_empty() {
            response.insert("model".to_owned(), head.model.clone().into());
        }
        response.into()
    }
}

/// The engine's statements about an answer as a whole.
#[derive(Debug, Clone, Default)]
pub(super) struct ResponseHead {
    /// The engine's own id, without the prefix that marks chats.
    pub(super) id: String,
    pub(super) model: String,
    /// Seconds since 1970.
    pub(super) created_at: u64,
}

impl ResponseHead {
    pub(super) fn new(id: Option<String>, model: Option<String>, now: SystemTime) -> Self {
        let id = id.unwrap_or_default();
        Self {
            id: id.strip_prefix("chatcmpl-").unwrap_or(&id).to_owned(),
            model: model.unwrap_or_default(),
            created_at: now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs(),
        }
    }

    /// The id of the answer's `index`th item, of this kind.
    pub(super) fn item_id(&self, kind: &str, index: usize) -> String {
        format!("{kind}_{}_{index}", self.id)
    }
}

fn usage_of(usage: ChunkUsage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens().unwrap_or(0)},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens().unwrap_or(0)},
        "total_tokens": usage.prompt_tokens.saturating_add(usage.completion_tokens),
    })
}

/// An item with the model's reasoning.
pub(super) fn reasoning_item(id: &str, text: &str, status: &str) -> Value {
    let content = if text.is_empty() { json!([]) } else { json!([{"type": "reasoning_text", "text": text}]) };
    json!({"id": id, "type": "reasoning", "summary": [], "content": content, "status": status})
}

/// An item with the model's message, which has one part or none yet.
pub(super) fn message_item(id: &str, part: Option<Value>, status: &str) -> Value {
    let content: Vec<Value> = part.into_iter().collect();
    json!({"id": id, "type": "message", "role": "assistant", "status": status, "content": content})
}

/// The message's text, with the log probabilities of its tokens if they were asked for.
pub(super) fn output_text(text: &str, logprobs: &[Value]) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
}

/// Log probabilities of tokens, which have the same form in both APIs.
///
/// # Errors
/// If they are no list.
pub(super) fn token_logprobs(logprobs: Option<ChunkLogprobs>) -> Result<Vec<Value>, String> {
    let content = logprobs.and_then(|logprobs| logprobs.content);
    content.map_or_else(|| Ok(Vec::new()), |content| serde_json::from_str(content.get()).map_err(unreadable_answer))
}

/// An item with a call of this tool.
pub(super) fn call_item(id: &str, call_id: &str, tool: &NamedTool, arguments: &str, status: &str) -> Value {
    let mut item = json!({"id": id, "call_id": call_id, "name": tool.name, "status": status});
    if tool.is_custom {
        item["type"] = "custom_tool_call".into();
        item["input"] = arguments.into();
    } else {
        item["type"] = "function_call".into();
        item["arguments"] = arguments.into();
    }
    if let Some(namespace) = &tool.namespace {
        item["namespace"] = namespace.as_str().into();
    }
    item
}

/// Translates an engine's whole answer to a chat into a response.
///
/// # Errors
/// If the body is no such answer.
pub(in crate::edge) fn translate_answer(fields: &ResponseFields, body: &[u8], now: SystemTime) -> Result<Vec<u8>, String> {
    let CompletionChunk { id, model, choices, usage, .. } = serde_json::from_slice(body).map_err(unreadable_answer)?;
    let ChunkChoice { message, logprobs, finish_reason, .. } = choices.into_iter().next().ok_or("the engine's answer is empty")?;
    let ChunkMessage { content, reasoning, tool_calls, .. } = message.unwrap_or_default();
    let head = ResponseHead::new(id, model, now);
    let mut output = Vec::new();
    if let Some(thinking) = reasoning.filter(|thinking| !thinking.is_empty()) {
        output.push(reasoning_item(&head.item_id("rs", 0), &thinking, "completed"));
    }
    let has_calls = tool_calls.as_ref().is_some_and(|calls| !calls.is_empty());
    if let Some(text) = text_beside_calls(content, has_calls) {
        let part = output_text(&text, &token_logprobs(logprobs)?);
        output.push(message_item(&head.item_id("msg", output.len()), Some(part), "completed"));
    }
    for call in tool_calls.unwrap_or_default() {
        let tool = fields.tools.client_tool(&call.function.name.unwrap_or_default());
        let item = head.item_id(tool.id_prefix(), output.len());
        let call_id = call.id.unwrap_or_else(|| head.item_id("call", output.len()));
        let arguments = call.function.arguments.unwrap_or_default();
        let finish = finish_reason.as_deref();
        let status = if is_cut(&arguments, finish) { "incomplete" } else { "completed" };
        let arguments = if tool.is_custom { custom_input(&arguments, finish) } else { arguments };
        output.push(call_item(&item, &call_id, &tool, &arguments, status));
    }
    let end = (finish_reason.as_deref().unwrap_or_default(), usage.unwrap_or_default());
    Ok(fields.response(&head, &output, Some(end)).to_string().into_bytes())
}
