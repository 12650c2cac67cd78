//! Form that a request asks its answers to have: `response_format`, `text.format` and vLLM's own
//! `structured_outputs`.

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::errors::ApiError;
use super::fields::{Fields, typed};
use crate::structured::StructuredOutput;

/// Format in chats and completions. Responses have the fields of `json_schema` beside the type.
#[derive(Deserialize)]
struct Format {
    #[serde(rename = "type")]
    kind: String,
    json_schema: Option<NamedSchema>,
    schema: Option<Value>,
}

#[derive(Deserialize)]
struct NamedSchema {
    schema: Option<Value>,
}

#[derive(Deserialize)]
struct TextConfig {
    format: Option<Format>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Constraints {
    json: Option<Value>,
    regex: Option<String>,
    choice: Option<Vec<String>>,
    grammar: Option<String>,
    json_object: Option<bool>,
    structural_tag: Option<String>,
}

/// Form that the answers should have, if there is one.
pub(super) fn structured_output(fields: &Fields<'_>) -> Result<Option<StructuredOutput>, ApiError> {
    let dictionary = "Input should be a valid dictionary";
    let format: Option<Format> = typed("response_format", fields.response_format, "dict_type", dictionary)?;
    // Completions and chats may have a field of this name, too, which nobody reads.
    let text: Option<TextConfig> = if fields.input.is_some() { typed("text", fields.text, "dict_type", dictionary)? } else { None };
    let constraints: Option<Constraints> = typed("structured_outputs", fields.structured_outputs, "dict_type", dictionary)?;
    let text = text.and_then(|text| text.format);
    if text.is_some() && constraints.is_some() {
        return Err(ApiError::refused(Some("structured_outputs"), "Cannot specify both structured_outputs and text.format"));
    }
    let demanded = match format.or(text) {
        Some(format) => format.output(fields.response_format)?,
        None => None,
    };
    match (demanded, constraints) {
        (None, Some(constraints)) => constraints.output().map(Some),
        (demanded, _) => Ok(demanded),
    }
}

impl Format {
    fn output(self, raw: Option<&RawValue>) -> Result<Option<StructuredOutput>, ApiError> {
        match self.kind.as_str() {
            "text" => Ok(None),
            "json_object" => Ok(Some(StructuredOutput::JsonObject)),
            "json_schema" => {
                if raw.is_some() && self.json_schema.is_none() {
                    let message = "When response_format type is 'json_schema', the 'json_schema' field must be provided.";
                    return Err(ApiError::refused(Some("response_format"), message));
                }
                let schema = self.json_schema.and_then(|named| named.schema).or(self.schema);
                let none = "You must use one kind of structured outputs constraint but none are specified";
                Ok(Some(StructuredOutput::Json(schema.ok_or_else(|| ApiError::refused(None, none))?)))
            }
            "structural_tag" => Err(ApiError::refused(Some("response_format"), "The simulated engine has no structural tags.")),
            _ => {
                let message = "Input should be 'text', 'json_object' or 'json_schema'";
                Err(match raw {
                    Some(raw) => ApiError::wrong_type("response_format.type", "literal_error", message, raw),
                    None => ApiError::refused(Some("text.format"), message),
                })
            }
        }
    }
}

impl Constraints {
    fn output(self) -> Result<StructuredOutput, ApiError> {
        let refused = |message: &str| Err(ApiError::refused(None, message));
        match self {
            Self { json: Some(json), regex: None, choice: None, grammar: None, json_object: None, structural_tag: None } => {
                let schema = match json {
                    Value::String(text) if text.trim().is_empty() => return refused("structured_outputs.json cannot be an empty string"),
                    Value::String(text) => serde_json::from_str(&text),
                    schema => Ok(schema),
                };
                schema.map(StructuredOutput::Json).or_else(|_| refused("Invalid JSON grammar specification."))
            }
            Self { json: None, regex: Some(regex), choice: None, grammar: None, json_object: None, structural_tag: None } => {
                Ok(StructuredOutput::Regex(regex))
            }
            Self { json: None, regex: None, choice: Some(choices), grammar: None, json_object: None, structural_tag: None } => {
                if choices.is_empty() { refused("Choice '[]' cannot be an empty list") } else { Ok(StructuredOutput::Choice(choices)) }
            }
            Self { json: None, regex: None, choice: None, grammar: None, json_object: Some(requested), structural_tag: None } => {
                let message = "structured_outputs.json_object must be True if set; omit structured_outputs to disable structured outputs";
                if requested { Ok(StructuredOutput::JsonObject) } else { refused(message) }
            }
            Self { json: None, regex: None, choice: None, grammar: None, json_object: None, structural_tag: None } => {
                refused("You must use one kind of structured outputs constraint but none are specified")
            }
            Self { json: None, regex: None, choice: None, json_object: None, .. } => {
                refused("The simulated engine has no grammars and structural tags; it takes json, regex, choice and json_object.")
            }
            _ => refused("You can only use one kind of constraints for structured outputs ('json', 'regex' or 'choice')."),
        }
    }
}
