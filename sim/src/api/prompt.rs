//! Prompts as tokens: text, token ids, lists of either, and chat messages.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::errors::ApiError;
use crate::tokens::{encode, encode_answer_start, encode_message};

/// The prompts of a completion: one string, some strings, token ids, or lists of them.
pub(crate) fn prompts(field: &str, raw: Option<&RawValue>) -> Result<Vec<Vec<u32>>, ApiError> {
    let raw = raw.ok_or_else(|| ApiError::missing(field))?;
    let json = raw.get();
    let inner = json.strip_prefix('[').map(str::trim_start).and_then(|rest| rest.bytes().next());
    let parsed = match (json.bytes().next(), inner) {
        (Some(b'"'), _) => serde_json::from_str::<String>(json).map(|text| vec![tokens_of(&text)]),
        (_, Some(b'"')) => serde_json::from_str::<Vec<String>>(json).map(|texts| texts.iter().map(|text| tokens_of(text)).collect()),
        (_, Some(b'[')) => serde_json::from_str(json),
        _ => serde_json::from_str(json).map(|tokens| vec![tokens]),
    };
    let prompts = parsed.map_err(|_| ApiError::wrong_type(field, "string_type", "Input should be a valid string", raw))?;
    if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
        return Err(ApiError::bad_value(field, "", "Either prompt or prompt_embeds must be provided and non-empty."));
    }
    Ok(prompts)
}

fn tokens_of(text: &str) -> Vec<u32> {
    let mut tokens = Vec::with_capacity(text.len() / 3 + 1);
    encode(text, &mut tokens);
    tokens
}

#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    role: String,
    #[serde(default)]
    content: Content,
    /// Calls that the assistant made; the template shows them as their JSON.
    #[serde(default)]
    tool_calls: Option<Box<RawValue>>,
}

#[derive(Default, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
    #[default]
    Null,
}

/// A part without text, such as an image, counts for nothing.
#[derive(Deserialize)]
struct Part {
    #[serde(default)]
    text: String,
}

/// The prompt of a chat: its messages in the engine's template, tools first.
pub(crate) fn chat_prompt(field: &str, messages: Option<&RawValue>, tools: Option<&RawValue>) -> Result<Vec<u32>, ApiError> {
    let raw = messages.ok_or_else(|| ApiError::missing(field))?;
    let messages: Vec<Message> =
        serde_json::from_str(raw.get()).map_err(|_| ApiError::wrong_type(field, "list_type", "Input should be a valid list", raw))?;
    let mut tokens = Vec::with_capacity(raw.get().len() / 3);
    if let Some(tools) = tools {
        encode_message("tools", tools.get(), &mut tokens);
    }
    for message in &messages {
        let mut content = match &message.content {
            Content::Text(text) => text.clone(),
            Content::Parts(parts) => parts.iter().map(|part| part.text.as_str()).collect(),
            Content::Null => String::new(),
        };
        if let Some(calls) = &message.tool_calls {
            content.push_str(calls.get());
        }
        encode_message(&message.role, &content, &mut tokens);
    }
    encode_answer_start(&mut tokens);
    Ok(tokens)
}
