//! The content of a message, in the shape that the template expects. The tokens of images, sounds and videos are never guessed: a mark goes
//! where they would begin, and the prompt is cut there.

use serde_json::{Map, Value, json};

use super::{Rules, invalid};
use crate::template::Shape;
use crate::{Dialect, EncodeError};

/// Stands before the first token that media can have. Private characters, so that no template changes them; a user who writes them beside an
/// image loses affinity, nothing else.
pub(crate) const MARK: &str = "\u{f8ff}\u{e0a7}media\u{e0a7}\u{f8ff}";

/// What is done with a part that is not text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Media {
    /// The mark takes its place.
    Marked,
    /// It stays, as the template of the engine sees it.
    Kept,
}

/// Fields of parts that have a meaning; engines pass on the others.
const KNOWN: [&str; 18] = [
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

const MEDIA: [(&str, &str); 10] = [
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

/// A client for coding writes this line into its system prompt, with a value that changes with every request; engines drop it.
const BILLING_LINE: &str = "x-anthropic-billing-header";

/// What a part is.
enum Part {
    Text { text: String, others: Map<String, Value> },
    ToolReference(String),
    Media { kind: &'static str, others: Map<String, Value> },
    Nothing,
}

/// The content as the template sees it, and whether there are media in it.
pub(super) fn prepare(role: &str, content: Option<&Value>, rules: Rules) -> Result<(Value, bool), EncodeError> {
    let mut parts = match content {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::String(text)) => vec![Part::Text { text: text.clone(), others: Map::new() }],
        Some(Value::Array(parts)) => parts.iter().map(part).collect::<Result<_, _>>()?,
        Some(_) => return Err(invalid("the content of a message is a text or a list of parts")),
    };
    if role == "system" && rules.dialect == Dialect::Python {
        parts = parts.into_iter().map(without_billing).collect();
    }
    let has_media = parts.iter().any(|part| matches!(part, Part::Media { .. }));
    let content = match (rules.shape, rules.dialect) {
        (Shape::Text, Dialect::Python) => Value::from(joined(parts, has_media)),
        (Shape::Text, Dialect::Rust) => Value::from(strung(parts)),
        (Shape::Parts, Dialect::Rust) if role == "assistant" => json!([{ "type": "text", "text": strung(parts) }]),
        (Shape::Parts, _) => Value::Array(parts.into_iter().filter_map(|part| structured(part, rules)).collect()),
    };
    Ok((content, has_media))
}

/// Results of tools are one text for most templates, whatever they do with other messages; references to tools stay parts.
pub(super) fn flattened(content: Value) -> Value {
    let Value::Array(parts) = content else { return content };
    if parts.iter().any(|part| part.get("type").and_then(Value::as_str) != Some("text")) {
        return Value::Array(parts);
    }
    let texts: Vec<&str> = parts.iter().filter_map(|part| part.get("text")?.as_str()).collect();
    Value::from(texts.join("\n"))
}

/// Engines put the words for media at the front of a message's text, or between its parts if told so. The front is right for both: what
/// comes before it is certain.
fn joined(parts: Vec<Part>, has_media: bool) -> String {
    let texts: Vec<String> = parts
        .into_iter()
        .filter_map(|part| match part {
            Part::Text { text, .. } | Part::ToolReference(text) => Some(text),
            Part::Media { .. } | Part::Nothing => None,
        })
        .collect();
    let text = texts.join("\n");
    if has_media { format!("{MARK}{text}") } else { text }
}

/// The Rust front-end puts nothing between texts, and the words for media where they stand.
fn strung(parts: Vec<Part>) -> String {
    let texts = parts.into_iter().map(|part| match part {
        Part::Text { text, .. } | Part::ToolReference(text) => text,
        Part::Media { .. } => MARK.to_owned(),
        Part::Nothing => String::new(),
    });
    texts.collect()
}

fn structured(part: Part, rules: Rules) -> Option<Value> {
    let (kind, text, others) = match part {
        Part::Text { text, others } => ("text", Some(("text", text)), others),
        Part::ToolReference(name) => ("tool_reference", Some(("name", name)), Map::new()),
        Part::Media { .. } if rules.media == Media::Marked => ("text", Some(("text", MARK.to_owned())), Map::new()),
        Part::Media { kind, others } => (kind, None, others),
        Part::Nothing => return None,
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

fn part(value: &Value) -> Result<Part, EncodeError> {
    if let Value::String(text) = value {
        return Ok(Part::Text { text: text.clone(), others: Map::new() });
    }
    let fields = value.as_object().ok_or_else(|| invalid("a part of a message is an object or a text"))?;
    let others = || fields.iter().filter(|(name, _)| !KNOWN.contains(&name.as_str())).map(|(n, v)| (n.clone(), v.clone())).collect();
    let named = fields.get("type").and_then(Value::as_str);
    // A part without a type, or with an id of its own, is what its fields say.
    let implied = named.is_none() || fields.get("uuid").is_some_and(|uuid| !uuid.is_null());
    let media = MEDIA.iter().find(|(name, _)| named == Some(*name) || (implied && fields.contains_key(*name)));
    if let Some((_, kind)) = media {
        return Ok(Part::Media { kind, others: others() });
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
        ("name", Some(Value::String(name))) => Ok(Part::ToolReference(name.clone())),
        (_, Some(Value::String(text))) => Ok(Part::Text { text: text.clone(), others: others() }),
        ("text" | "refusal", None | Some(Value::Null)) => Ok(Part::Nothing),
        _ => Err(invalid(format!("`{field}` of a part is a text"))),
    }
}

fn without_billing(part: Part) -> Part {
    match part {
        Part::Text { text, others } if text.starts_with(BILLING_LINE) => match text.split_once('\n') {
            Some((_, rest)) if !rest.is_empty() => Part::Text { text: rest.to_owned(), others },
            _ => Part::Nothing,
        },
        other => other,
    }
}
