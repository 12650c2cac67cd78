//! Changes of an engine to a conversation before the chat template sees it: only known fields,
//! content in the shape that the template expects, arguments of tool calls as objects.
//!
//! The rules are those of both front-ends of vLLM 0.32.

mod content;
mod roles;
mod tools;

use serde_json::{Map, Value};

pub(crate) use content::{MEDIA_MARKER, MediaMode};
pub(crate) use roles::without_developers;
pub(crate) use tools::prepare_tools;

use crate::template::ContentShape;
use crate::{Dialect, EncodeError};

/// Creates the error for a conversation that no engine accepts.
pub(crate) fn invalid(reason: impl Into<String>) -> EncodeError {
    EncodeError::Invalid(reason.into())
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct MessageRules {
    pub(crate) shape: ContentShape,
    pub(crate) media: MediaMode,
    pub(crate) dialect: Dialect,
    /// Whether `reasoning_content` is renamed to `reasoning`.
    pub(crate) renames_reasoning: bool,
}

/// Messages in the form that a template gets.
#[derive(Debug, PartialEq)]
pub(crate) struct Conversation {
    pub(crate) messages: Vec<Value>,
    /// Whether the conversation has an image, sound or video.
    pub(crate) has_media: bool,
}

pub(crate) fn conversation(messages: &[Value], rules: MessageRules) -> Result<Conversation, EncodeError> {
    if messages.is_empty() {
        return Err(invalid("a conversation needs a message"));
    }
    let mut prepared = Conversation { messages: Vec::with_capacity(messages.len()), has_media: false };
    for message in messages {
        let message = message.as_object().ok_or_else(|| invalid("a message is an object"))?;
        let (message, has_media) = prepare(message, rules)?;
        prepared.messages.push(Value::Object(message));
        prepared.has_media |= has_media;
    }
    Ok(prepared)
}

fn prepare(message: &Map<String, Value>, rules: MessageRules) -> Result<(Map<String, Value>, bool), EncodeError> {
    let role = message.get("role").and_then(Value::as_str).ok_or_else(|| invalid("a message has a role"))?;
    let (mut content, has_media) = content::prepare_content(role, message.get("content"), rules)?;
    let mut prepared = Map::new();
    prepared.insert("role".to_owned(), Value::from(role));
    if role == "tool" && rules.dialect == Dialect::Python {
        content = content::flatten(content);
    }
    prepared.insert("content".to_owned(), content);
    if role == "assistant" {
        let calls = tools::prepare_calls(message.get("tool_calls"), rules.dialect)?;
        let (before, after) = match rules.dialect {
            Dialect::Python => (calls, None),
            Dialect::Rust => (None, calls),
        };
        prepared.extend(before.map(|calls| ("tool_calls".to_owned(), calls)));
        let renamed = message.get("reasoning_content").filter(|_| rules.renames_reasoning);
        let reasoning = message.get("reasoning").filter(|reasoning| !reasoning.is_null()).or(renamed);
        if let Some(reasoning) = reasoning.filter(|reasoning| !reasoning.is_null()) {
            prepared.insert("reasoning".to_owned(), reasoning.clone());
            prepared.insert("reasoning_content".to_owned(), reasoning.clone());
        }
        prepared.extend(after.map(|calls| ("tool_calls".to_owned(), calls)));
    }
    if let Some(id) = message.get("tool_call_id").filter(|_| role == "tool") {
        prepared.insert("tool_call_id".to_owned(), id.clone());
    }
    match rules.dialect {
        Dialect::Python => {
            for name in ["name", "task"] {
                if let Some(value @ Value::String(_)) = message.get(name) {
                    prepared.insert(name.to_owned(), value.clone());
                }
            }
            if role == "developer" {
                prepared.insert("tools".to_owned(), message.get("tools").cloned().unwrap_or_default());
            }
        }
        Dialect::Rust if role == "developer" && message.get("tools").is_some_and(|tools| !tools.is_null()) => {
            return Err(EncodeError::Unsupported("tools of a developer's message"));
        }
        Dialect::Rust => {}
    }
    Ok((prepared, has_media))
}

#[cfg(test)]
mod tests;
