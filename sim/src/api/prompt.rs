//! Prompts as tokens: text, token ids, lists of either, and chat messages.

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::errors::ApiError;
use super::fields::{Fields, boolean, typed};
use crate::tokens::{ChatText, ToolUse, encode};

/// Prompts of a completion: one string, some strings, token ids, or lists of them.
pub(crate) fn prompts(field: &str, raw: Option<&RawValue>) -> Result<Vec<Vec<u32>>, ApiError> {
    let raw = raw.ok_or_else(|| ApiError::missing(field))?;
    let json = raw.get();
    let inner = json.strip_prefix('[').map(str::trim_start).and_then(|rest| rest.bytes().next());
    let parsed = match (json.bytes().next(), inner) {
        (Some(b'"'), _) => serde_json::from_str::<String>(json).map(|text| vec![encode(&text)]),
        (_, Some(b'"')) => serde_json::from_str::<Vec<String>>(json).map(|texts| texts.iter().map(|text| encode(text)).collect()),
        (_, Some(b'[')) => serde_json::from_str(json),
        _ => serde_json::from_str(json).map(|tokens| vec![tokens]),
    };
    let prompts = parsed.map_err(|_| ApiError::wrong_type(field, "string_type", "Input should be a valid string", raw))?;
    if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
        return Err(ApiError::bad_value(field, "", "Either prompt or prompt_embeds must be provided and non-empty."));
    }
    Ok(prompts)
}

/// Whether a prompt is a list of prompts.
pub(crate) fn is_prompt_list(raw: &RawValue) -> bool {
    raw.get().strip_prefix('[').is_some_and(|inner| inner.trim_start().starts_with(['"', '[']))
}

#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    role: String,
    #[serde(default)]
    content: Content,
    #[serde(default)]
    tool_calls: Option<Vec<ToolEntry>>,
}

#[derive(Default, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
    #[default]
    Null,
}

/// Part of a message. A part without text, such as an image, adds no tokens.
#[derive(Deserialize)]
struct Part {
    text: Option<String>,
}

/// A tool that may be called, or a call that was made.
#[derive(Deserialize)]
struct ToolEntry {
    function: ToolFunction,
}

#[derive(Deserialize)]
struct ToolFunction {
    #[serde(default)]
    name: String,
    #[serde(default)]
    parameters: Option<Map<String, Value>>,
    #[serde(default)]
    arguments: Value,
}

impl Content {
    /// Joins the texts of several parts as vLLM does for such a template.
    fn text(self) -> String {
        match self {
            Self::Text(text) => text,
            Self::Parts(parts) => parts.into_iter().filter_map(|part| part.text).collect::<Vec<_>>().join("\n"),
            Self::Null => String::new(),
        }
    }
}

impl ToolFunction {
    fn tool(self) -> ToolUse {
        ToolUse { name: self.name, object: self.parameters.unwrap_or_default() }
    }

    /// Converts a call.
    ///
    /// As in vLLM, arguments come as an object or as its JSON; anything else counts as none.
    fn call(self) -> ToolUse {
        let object = match self.arguments {
            Value::Object(object) => object,
            Value::String(json) => serde_json::from_str(&json).unwrap_or_default(),
            _ => Map::new(),
        };
        ToolUse { name: self.name, object }
    }
}

/// End of a chat's prompt after its messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The prompt ends with the opening of an answer.
    AnswerStart,
    /// The prompt ends with the last message, which the answer continues.
    OpenMessage,
    Closed,
}

/// Prompt of a chat request: its messages in the engine's template, tools first.
pub(crate) fn chat_prompt(fields: &Fields<'_>) -> Result<Vec<u32>, ApiError> {
    let opens = fields.add_generation_prompt.is_none() || boolean("add_generation_prompt", fields.add_generation_prompt)?;
    let ending = match (opens, boolean("continue_final_message", fields.continue_final_message)?) {
        (true, true) => return Err(ApiError::contradictory_ending()),
        (true, false) => Ending::AnswerStart,
        (false, true) => Ending::OpenMessage,
        (false, false) => Ending::Closed,
    };
    messages_prompt("messages", fields.messages, fields.tools, ending)
}

/// Prompt of messages that come from `field`.
pub(crate) fn messages_prompt(
    field: &str,
    messages: Option<&RawValue>,
    tools: Option<&RawValue>,
    ending: Ending,
) -> Result<Vec<u32>, ApiError> {
    let messages: Option<Vec<Message>> = typed(field, messages, "list_type", "Input should be a valid list")?;
    let messages = messages.ok_or_else(|| ApiError::missing(field))?;
    let tools: Option<Vec<ToolEntry>> = typed("tools", tools, "list_type", "Input should be a valid list")?;
    let tools: Vec<ToolUse> = tools.unwrap_or_default().into_iter().map(|tool| tool.function.tool()).collect();
    let mut text = ChatText::default();
    text.push_tools(&tools);
    let mut last = String::new();
    for message in messages {
        let calls = message.tool_calls.filter(|_| message.role == "assistant").unwrap_or_default();
        let calls: Vec<ToolUse> = calls.into_iter().map(|call| call.function.call()).collect();
        last = message.content.text();
        text.push_message(&message.role, &last, &calls);
    }
    match ending {
        Ending::AnswerStart => text.push_answer_start(),
        Ending::OpenMessage => text.reopen(&last),
        Ending::Closed => {}
    }
    Ok(encode(text.as_str()))
}
