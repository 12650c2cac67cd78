//! Translates chat messages from Ollama's form to the engine's. Images become parts of the content,
//! and tool calls get ids, which Ollama's lack.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::{Map, Value, json};

/// A message as Ollama's clients write it.
#[derive(Debug, Deserialize)]
pub(super) struct ChatMessage {
    role: String,
    content: Option<String>,
    thinking: Option<String>,
    images: Option<Vec<String>>,
    tool_calls: Option<Vec<ChatToolCall>>,
    tool_name: Option<String>,
    tool_call_id: Option<String>,
}

#[derive(Debug, Deserialize)]
struct ChatToolCall {
    id: Option<String>,
    function: ChatFunction,
}

#[derive(Debug, Deserialize)]
struct ChatFunction {
    name: String,
    #[serde(default)]
    arguments: Value,
}

/// A call whose result has not come yet.
struct PendingToolCall {
    id: String,
    name: String,
}

/// The calls of a turn whose results have not come yet, by position. A turn may have as many as a
/// body has room for, so lookups must not be linear.
#[derive(Default)]
struct PendingToolCalls {
    calls: BTreeMap<usize, PendingToolCall>,
    by_id: BTreeSet<(String, usize)>,
    by_name: BTreeSet<(String, usize)>,
}

impl PendingToolCalls {
    fn add(&mut self, place: usize, call: PendingToolCall) {
        self.by_id.insert((call.id.clone(), place));
        self.by_name.insert((call.name.clone(), place));
        self.calls.insert(place, call);
    }

    /// Removes the call that a result answers: the first with its id, else the first with its name,
    /// else the first.
    fn take_answered(&mut self, id: Option<&str>, name: Option<&str>) -> Option<PendingToolCall> {
        let of_id = id.and_then(|id| first_place(&self.by_id, id));
        let of_name = || name.and_then(|name| first_place(&self.by_name, name));
        let place = of_id.or_else(of_name).or_else(|| self.calls.first_key_value().map(|(place, _)| *place))?;
        let PendingToolCall { id, name } = self.calls.remove(&place)?;
        let (id, name) = ((id, place), (name, place));
        self.by_id.remove(&id);
        self.by_name.remove(&name);
        Some(PendingToolCall { id: id.0, name: name.0 })
    }
}

fn first_place(calls: &BTreeSet<(String, usize)>, text: &str) -> Option<usize> {
    let (found, place) = calls.range((text.to_owned(), 0)..).next()?;
    (found == text).then_some(*place)
}

/// Generates ids of calls.
///
/// Ids depend on the position alone, so each turn of a chat repeats the prompt of the previous one
/// and finds it cached. The strictest templates, Mistral's, accept nine letters and digits.
#[derive(Default)]
struct ToolCallIds(usize);

impl ToolCallIds {
    fn next(&mut self) -> String {
        self.0 += 1;
        format!("call{:05}", self.0)
    }
}

/// The messages in the engine's form.
///
/// # Errors
/// If an image is not base64.
pub(super) fn to_openai_messages(messages: Vec<ChatMessage>) -> Result<Vec<Value>, String> {
    let mut ids = ToolCallIds::default();
    let mut open = PendingToolCalls::default();
    messages.into_iter().map(|message| to_openai_message(message, &mut ids, &mut open)).collect()
}

fn to_openai_message(message: ChatMessage, ids: &mut ToolCallIds, open: &mut PendingToolCalls) -> Result<Value, String> {
    let ChatMessage { role, content, thinking, images, tool_calls, tool_name, tool_call_id } = message;
    let mut told = Map::new();
    if role == "tool" {
        let answered = open.take_answered(tool_call_id.as_deref(), tool_name.as_deref());
        let id = tool_call_id.or(answered.map(|call| call.id)).unwrap_or_else(|| ids.next());
        told.insert("tool_call_id".to_owned(), id.into());
        if let Some(name) = tool_name {
            told.insert("name".to_owned(), name.into());
        }
    }
    told.insert("role".to_owned(), role.into());
    told.insert("content".to_owned(), content_with_images(content.unwrap_or_default(), images.unwrap_or_default())?);
    if let Some(thinking) = thinking.filter(|thinking| !thinking.is_empty()) {
        told.insert("reasoning".to_owned(), thinking.into());
    }
    if let Some(calls) = tool_calls.filter(|calls| !calls.is_empty()) {
        *open = PendingToolCalls::default();
        let calls = calls.into_iter().enumerate().map(|(place, call)| {
            let ChatToolCall { id, function: ChatFunction { name, arguments } } = call;
            let id = id.filter(|id| !id.is_empty()).unwrap_or_else(|| ids.next());
            let arguments = match arguments {
                Value::String(json) => json,
                Value::Null => "{}".to_owned(),
                object => object.to_string(),
            };
            let told = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
            open.add(place, PendingToolCall { id, name });
            told
        });
        told.insert("tool_calls".to_owned(), calls.collect());
    }
    Ok(told.into())
}

/// The content of a message: a text alone, or images and their text.
///
/// # Errors
/// If an image is not base64.
pub(super) fn content_with_images(text: String, images: Vec<String>) -> Result<Value, String> {
    if images.is_empty() {
        return Ok(text.into());
    }
    let mut parts = images.iter().map(|image| image_part(image)).collect::<Result<Vec<Value>, String>>()?;
    parts.push(json!({"type": "text", "text": text}));
    Ok(parts.into())
}

/// An image as a `data:` URL, the only form for which no engine fetches anything.
fn image_part(image: &str) -> Result<Value, String> {
    let base64 = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+/=\r\n".contains(&byte));
    let is_data = image.strip_prefix("data:image/").and_then(|rest| rest.split_once(";base64,")).is_some_and(|(_, text)| base64(text));
    let url = match image {
        _ if is_data => image.to_owned(),
        _ if base64(image) => format!("data:{};base64,{image}", media_type(image)),
        _ => return Err("images are the base64 text of a file, as JPEG, PNG, GIF or WebP".to_owned()),
    };
    Ok(json!({"type": "image_url", "image_url": {"url": url}}))
}

/// The media type from the first bytes of a file, read through its base64.
fn media_type(base64: &str) -> &'static str {
    match base64 {
        _ if base64.starts_with("/9j/") => "image/jpeg",
        _ if base64.starts_with("iVBORw0KGgo") => "image/png",
        _ if base64.starts_with("R0lGOD") => "image/gif",
        _ if base64.starts_with("UklGR") => "image/webp",
        _ if base64.starts_with("Qk") => "image/bmp",
        // The engine detects the type itself.
        _ => "application/octet-stream",
    }
}
