//! Translates an engine's whole answer to a message.

use hostler_api::{ChunkChoice, ChunkMessage, ChunkToolCall, ChunkUsage, CompletionChunk};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::edge::translation::{text_beside_calls, unreadable_answer};

/// A message as far as it has come.
#[derive(Debug, Serialize)]
pub(super) struct MessageHead<'a> {
    pub(super) id: &'a str,
    pub(super) r#type: &'static str,
    pub(super) role: &'static str,
    pub(super) content: Vec<Value>,
    pub(super) model: &'a str,
    pub(super) stop_reason: Option<&'static str>,
    pub(super) stop_sequence: Option<String>,
    pub(super) usage: Value,
}

impl<'a> MessageHead<'a> {
    pub(super) fn new(id: &'a str, model: &'a str, usage: ChunkUsage) -> Self {
        Self {
            id,
            r#type: "message",
            role: "assistant",
            content: Vec::new(),
            model,
            stop_reason: None,
            stop_sequence: None,
            usage: usage_of(usage),
        }
    }
}

/// The usage. Cached prompt tokens are counted apart from the others.
pub(super) fn usage_of(usage: ChunkUsage) -> Value {
    let cached = usage.cached_tokens();
    let mut told = json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(cached.unwrap_or(0)),
        "output_tokens": usage.completion_tokens,
    });
    if let Some(cached) = cached {
        told["cache_read_input_tokens"] = cached.into();
    }
    told
}

/// Why an answer ended, and at which of the client's stop sequences. A call cut short by a stop
/// sequence must not be run.
pub(super) fn stop_reason(finish: &str, stop: Option<Value>, has_call: bool, is_call_whole: bool) -> (&'static str, Option<String>) {
    match (finish, stop) {
        ("length", _) => ("max_tokens", None),
        _ if is_call_whole => ("tool_use", None),
        (_, Some(Value::String(stop))) => ("stop_sequence", Some(stop)),
        ("tool_calls", _) => ("tool_use", None),
        _ if has_call => ("tool_use", None),
        _ => ("end_turn", None),
    }
}

/// Translates an engine's whole answer to a chat into a message.
///
/// # Errors
/// If the body is no such answer, or calls a tool in a way that clients cannot read.
pub(in crate::edge) fn translate_answer(body: &[u8]) -> Result<Vec<u8>, String> {
    let CompletionChunk { id, model, choices, usage, .. } = serde_json::from_slice(body).map_err(unreadable_answer)?;
    let ChunkChoice { message, finish_reason, stop_reason: stop, .. } = choices.into_iter().next().ok_or("the engine's answer is empty")?;
    let ChunkMessage { content, reasoning, tool_calls, .. } = message.unwrap_or_default();
    let (id, model, calls) = (id.unwrap_or_default(), model.unwrap_or_default(), tool_calls.unwrap_or_default());
    let has_call = !calls.is_empty();
    let mut blocks = Vec::new();
    if let Some(thinking) = reasoning.filter(|thinking| !thinking.is_empty()) {
        blocks.push(json!({"type": "thinking", "thinking": thinking, "signature": id}));
    }
    if let Some(text) = text_beside_calls(content, !calls.is_empty()) {
        blocks.push(json!({"type": "text", "text": text}));
    }
    let is_cut = finish_reason.as_deref() == Some("length");
    for (index, call) in calls.into_iter().enumerate() {
        match tool_use(index, call) {
            Ok(block) => blocks.push(block),
            // A call that was cut short has no input to run it with. `max_tokens` explains why it
            // is absent.
            Err(_) if is_cut => {}
            Err(message) => return Err(message),
        }
    }
    // Clients read the first block of any answer.
    if blocks.is_empty() {
        blocks.push(json!({"type": "text", "text": ""}));
    }
    let (stop_reason, stop_sequence) = stop_reason(finish_reason.as_deref().unwrap_or_default(), stop, has_call, has_call);
    let head = MessageHead::new(&id, &model, usage.unwrap_or_default());
    let message = MessageHead { content: blocks, stop_reason: Some(stop_reason), stop_sequence, ..head };
    Ok(serde_json::to_vec(&message).expect("a message has only names for keys"))
}

fn tool_use(index: usize, call: ChunkToolCall) -> Result<Value, String> {
    let name = call.function.name.unwrap_or_default();
    let arguments = call.function.arguments.unwrap_or_default();
    let arguments = if arguments.trim().is_empty() { "{}" } else { &arguments };
    let input: Map<String, Value> = serde_json::from_str(arguments)
        .map_err(|_| format!("the model called `{name}` with arguments that are no JSON object, or was cut short while it did"))?;
    Ok(json!({"type": "tool_use", "id": call.id.unwrap_or_else(|| made_up_id(index)), "name": name, "input": input}))
}

/// The id for a call whose engine gave none.
pub(super) fn made_up_id(index: usize) -> String {
    format!("toolu_{index}")
}

/// Translates the answer of `/tokenize` to the requested count.
///
/// # Errors
/// If the body is no such answer.
pub(in crate::edge) fn translate_count(body: &[u8]) -> Result<Vec<u8>, String> {
    #[derive(Deserialize)]
    struct Tokenized {
        count: u64,
    }
    let Tokenized { count } = serde_json::from_slice(body).map_err(unreadable_answer)?;
    let told = json!({"input_tokens": count, "context_management": {"original_input_tokens": count}});
    Ok(told.to_string().into_bytes())
}
