//! Content of a message, in the shape that the template expects.
//!
//! The tokens of images, sounds and videos are never guessed: a marker stands where they would
//! begin, and the prompt is cut there.

use serde_json::{Map, Value, json};

use super::{MessageRules, invalid};
use crate::template::ContentShape;
use crate::{Dialect, EncodeError};

/// Marker before the first token that media can have.
///
/// Its private characters prevent templates from changing it. A user who writes them beside an
/// image loses only affinity.
pub(crate) const MEDIA_MARKER: &str = "\u{f8ff}\u{e0a7}media\u{e0a7}\u{f8ff}";

/// Treatment of a part that is not text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MediaMode {
    /// The marker replaces the part.
    Marked,
    /// The part stays, as the engine's template gets it.
    Kept,
}

/// Fields of parts with a meaning; engines pass on the others.
const KNOWN_PARTS: [&str; 18] = [
    "type",
    "text",
    "prompt_cache_breakpoint",
    "image_url",
    "input_audio",
    "file",
    "refusal",
    "audio_url",
    "video_url",
    "image_pil",
    "uuid",
    "image_embeds",
    "audio_embeds",
    "video_embeds",
    "data",
    "thinking",
    "closed",
    "name",
];

const MEDIA_PARTS: [(&str, &str); 10] = [
    ("image_url", "image"),
    ("input_image", "image"),
    ("image_pil", "image"),
    ("image_embeds", "image"),
    ("audio_url", "audio"),
    ("input_audio", "audio"),
    ("audio_embeds", "audio"),
    ("video_url", "video"),
    ("video_embeds", "video"),
    ("prompt_embeds", "image"),
];

/// Line that a coding client writes into its system prompt, with a value that changes with every
/// request.
///
/// Engines drop it.
const BILLING_LINE: &str = "x-anthropic-billing-header";

enum ContentPart {
    Text { text: String, others: Map<String, Value> },
    ToolReference(String),
    Media { kind: &'static str, others: Map<String, Value> },
    Empty,
}

/// Content in the form that the template gets, and whether it has media.
pub(super) fn prepare_content(role: &str, content: Option<&Value>, rules: MessageRules) -> Result<(Value, bool), EncodeError> {
    let mut parts = match content {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::String(text)) => vec![ContentPart::Text { text: text.clone(), others: Map::new() }],
        Some(Value::Array(parts)) => parts.iter().map(parse_part).collect::<Result<_, _>>()?,
        Some(_) => return Err(invalid("the content of a message is a text or a list of parts")),
    };
    if role == "system" && rules.dialect == Dialect::Python {
        parts = parts.into_iter().map(without_billing).collect();
    }
    let has_media = parts.iter().any(|part| matches!(part, ContentPart::Media { .. }));
    let content = match (rules.shape, rules.dialect) {
        (ContentShape::Text, Dialect::Python) => Value::from(join_with_media(parts, has_media)),
        (ContentShape::Text, Dialect::Rust) => Value::from(join_texts(parts)),
        (ContentShape::Parts, Dialect::Rust) if role == "assistant" => json!([{ "type": "text", "text": join_texts(parts) }]),
        (ContentShape::Parts, _) => Value::Array(parts.into_iter().filter_map(|part| build_part(part, rules)).collect()),
    };
    Ok((content, has_media))
}

/// Flattens a tool's result.
///
/// Most templates get it as one text, whatever they get for other messages; references to tools
/// stay parts.
pub(super) fn flatten(content: Value) -> Value {
    let Value::Array(parts) = content else { return content };
    if parts.iter().any(|part| part.get("type").and_then(Value::as_str) != Some("text")) {
        return Value::Array(parts);
    }
    let texts: Vec<&str> = parts.iter().filter_map(|part| part.get("text")?.as_str()).collect();
    Value::from(texts.join("\n"))
}

/// Joins the texts of a message with media.
///
/// Engines put the placeholders of media at the front of a message's text, or between its parts if
/// configured so. The front is right for both: only text before it is certain.
fn join_with_media(parts: Vec<ContentPart>, has_media: bool) -> String {
    let texts: Vec<String> = parts
        .into_iter()
        .filter_map(|part| match part {
            ContentPart::Text { text, .. } | ContentPart::ToolReference(text) => Some(text),
            ContentPart::Media { .. } | ContentPart::Empty => None,
        })
        .collect();
    let text = texts.join("\n");
    if has_media { format!("{MEDIA_MARKER}{text}") } else { text }
}

/// Joins texts like the Rust front-end: without a separator, and with the placeholders in the
/// places of the media.
fn join_texts(parts: Vec<ContentPart>) -> String {
    let texts = parts.into_iter().map(|part| match part {
        ContentPart::Text { text, .. } | ContentPart::ToolReference(text) => text,
        ContentPart::Media { .. } => MEDIA_MARKER.to_owned(),
        ContentPart::Empty => String::new(),
    });
    texts.collect()
}

fn build_part(part: ContentPart, rules: MessageRules) -> Option<Value> {
    let (kind, text, others) = match part {
        ContentPart::Text { text, others } => ("text", Some(("text", text)), others),
        ContentPart::ToolReference(name) => ("tool_reference", Some(("name", name)), Map::new()),
        ContentPart::Media { .. } if rules.media == MediaMode::Marked => ("text", Some(("text", MEDIA_MARKER.to_owned())), Map::new()),
        ContentPart::Media { kind, others } => (kind, None, others),
        ContentPart::Empty => return None,
    };
    let mut object = Map::new();
    object.insert("type".to_owned(), Value::from(kind));
    if let Some((name, text)) = text {
        object.insert(name.to_owned(), Value::from(text));
    }
    if rules.dialect == Dialect::Python {
        object.extend(others);
    }
    Some(Value::Object(object))
}

fn parse_part(value: &Value) -> Result<ContentPart, EncodeError> {
    if let Value::String(text) = value {
        return Ok(ContentPart::Text { text: text.clone(), others: Map::new() });
    }
    let fields = value.as_object().ok_or_else(|| invalid("a part of a message is an object or a text"))?;
    let others = || fields.iter().filter(|(name, _)| !KNOWN_PARTS.contains(&name.as_str())).map(|(n, v)| (n.clone(), v.clone())).collect();
    let named = fields.get("type").and_then(Value::as_str);
    // A part without a type, or with a `uuid`, is identified by its fields.
    let implied = named.is_none() || fields.get("uuid").is_some_and(|uuid| !uuid.is_null());
    let media = MEDIA_PARTS.iter().find(|(name, _)| named == Some(*name) || (implied && fields.contains_key(*name)));
    if let Some((_, kind)) = media {
        return Ok(ContentPart::Media { kind, others: others() });
    }
    let field = match named {
        Some("text" | "input_text" | "output_text") => "text",
        Some("refusal") => "refusal",
        Some("thinking") => "thinking",
        Some("tool_reference") => "name",
        Some(other) => return Err(invalid(format!("there is no part of type {other:?}"))),
        None => return Err(invalid("a part of a message has a type")),
    };
    match (field, fields.get(field)) {
        ("name", Some(Value::String(name))) => Ok(ContentPart::ToolReference(name.clone())),
        (_, Some(Value::String(text))) => Ok(ContentPart::Text { text: text.clone(), others: others() }),
        ("text" | "refusal", None | Some(Value::Null)) => Ok(ContentPart::Empty),
        _ => Err(invalid(format!("`{field}` of a part is a text"))),
    }
}

fn without_billing(part: ContentPart) -> ContentPart {
    match part {
        ContentPart::Text { text, others } if text.starts_with(BILLING_LINE) => match text.split_once('\n') {
            Some((_, rest)) if !rest.is_empty() => ContentPart::Text { text: rest.to_owned(), others },
            _ => ContentPart::Empty,
        },
        other => other,
    }
}
