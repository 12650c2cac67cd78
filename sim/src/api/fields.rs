//! Fields of all request bodies that the engine examines, borrowed from the body and typed one by
//! one, so that a wrong type is reported with its field as in vLLM. Unknown fields are skipped.

use std::collections::HashMap;

use serde::Deserialize;
use serde::de::value::MapDeserializer;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::Value;
use serde_json::error::Category;
use serde_json::value::RawValue;

use super::errors::ApiError;
use crate::args::EngineArgs;

/// A request body before its fields are typed. `null` is the same as absent.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Fields<'a> {
    /// The body itself.
    #[serde(skip)]
    body: &'a [u8],
    #[serde(borrow)]
    pub(crate) model: Option<&'a RawValue>,
    pub(crate) prompt: Option<&'a RawValue>,
    pub(crate) messages: Option<&'a RawValue>,
    pub(crate) input: Option<&'a RawValue>,
    pub(crate) tokens: Option<&'a RawValue>,
    pub(crate) stream: Option<&'a RawValue>,
    pub(crate) stream_options: Option<&'a RawValue>,
    pub(crate) max_tokens: Option<&'a RawValue>,
    pub(crate) max_completion_tokens: Option<&'a RawValue>,
    pub(crate) max_output_tokens: Option<&'a RawValue>,
    pub(crate) n: Option<&'a RawValue>,
    pub(crate) echo: Option<&'a RawValue>,
    pub(crate) temperature: Option<&'a RawValue>,
    pub(crate) logprobs: Option<&'a RawValue>,
    pub(crate) top_logprobs: Option<&'a RawValue>,
    pub(crate) return_token_ids: Option<&'a RawValue>,
    pub(crate) add_generation_prompt: Option<&'a RawValue>,
    pub(crate) continue_final_message: Option<&'a RawValue>,
    pub(crate) tools: Option<&'a RawValue>,
    pub(crate) tool_choice: Option<&'a RawValue>,
    pub(crate) seed: Option<&'a RawValue>,
    pub(crate) ignore_eos: Option<&'a RawValue>,
    pub(crate) cache_salt: Option<&'a RawValue>,
    pub(crate) encoding_format: Option<&'a RawValue>,
    pub(crate) dimensions: Option<&'a RawValue>,
    pub(crate) instructions: Option<&'a RawValue>,
    pub(crate) text: Option<&'a RawValue>,
    pub(crate) response_format: Option<&'a RawValue>,
    pub(crate) structured_outputs: Option<&'a RawValue>,
    pub(crate) store: Option<&'a RawValue>,
    pub(crate) background: Option<&'a RawValue>,
    pub(crate) previous_response_id: Option<&'a RawValue>,
}

impl<'a> Fields<'a> {
    /// Splits a body into its fields.
    ///
    /// Of a field that is there twice, Python's reader takes the last one, and the Rust front-end
    /// refuses it.
    pub(crate) fn parse(body: &'a [u8], args: &EngineArgs) -> Result<Self, ApiError> {
        let fields: Self = if args.sim_rust_front_end {
            let is_json = |error: &serde_json::Error| error.classify() == Category::Data;
            serde_json::from_slice(body).map_err(|error| ApiError::unreadable_for_rust(is_json(&error), &error.to_string()))?
        } else {
            // Of a list, too, the first place is named where it is no JSON.
            let last = serde_json::from_slice::<IgnoredAny>(body).and_then(|_| serde_json::from_slice::<HashMap<String, &RawValue>>(body));
            last.and_then(|last| Self::deserialize(MapDeserializer::new(last.into_iter())))
                .map_err(|error| ApiError::bad_json(body, &error))?
        };
        Ok(Self { body, ..fields })
    }

    /// Reads a part of the body as strictly as the Rust front-end; `path` names it in the error.
    pub(crate) fn strictly<T: Deserialize<'a>>(&self, path: &str, part: &'a RawValue) -> Result<T, ApiError> {
        serde_json::from_str(part.get()).map_err(|error| {
            let lines = part.get().split_inclusive('\n').take(error.line().saturating_sub(1));
            let words = error.to_string();
            let words = words.rsplit_once(" at line ").map_or(words.as_str(), |(words, _)| words);
            self.unreadable_part(path, part, lines.map(str::len).sum::<usize>() + error.column(), words)
        })
    }

    /// The Rust front-end's error after `read` bytes of a part of the body.
    pub(crate) fn unreadable_part(&self, path: &str, part: &RawValue, read: usize, words: &str) -> ApiError {
        let offset = (part.get().as_ptr() as usize).saturating_sub(self.body.as_ptr() as usize) + read;
        let before = &self.body[..offset.min(self.body.len())];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        let column = before.iter().rev().take_while(|byte| **byte != b'\n').count();
        ApiError::unreadable_for_rust(true, &format!("{path}: {words} at line {line} column {column}"))
    }
}

/// Parses an integer. Whole numbers in strings and floats pass, as in pydantic.
pub(crate) fn integer(field: &str, raw: Option<&RawValue>) -> Result<Option<i64>, ApiError> {
    let Some(raw) = raw else { return Ok(None) };
    let text = raw.get().trim_matches('"');
    if let Ok(value) = text.parse() {
        return Ok(Some(value));
    }
    #[expect(clippy::cast_possible_truncation, reason = "saturates, and the limits refuse it then")]
    let whole = raw.get().parse::<f64>().ok().filter(|value| value.fract() == 0.0).map(|value| value as i64);
    if whole.is_some() {
        return Ok(whole);
    }
    let (error, message) = match raw.get().as_bytes().first() {
        Some(b'"') => ("int_parsing", "Input should be a valid integer, unable to parse string as an integer"),
        Some(b'-' | b'0'..=b'9') => ("int_from_float", "Input should be a valid integer, got a number with a fractional part"),
        _ => ("int_type", "Input should be a valid integer"),
    };
    Err(ApiError::wrong_type(field, error, message, raw))
}

pub(crate) fn number(field: &str, raw: Option<&RawValue>) -> Result<Option<f64>, ApiError> {
    let Some(raw) = raw else { return Ok(None) };
    match raw.get().trim_matches('"').parse() {
        Ok(value) => Ok(Some(value)),
        Err(_) => Err(ApiError::wrong_type(field, "float_type", "Input should be a valid number", raw)),
    }
}

/// Parses a truth value; absent is false.
pub(crate) fn boolean(field: &str, raw: Option<&RawValue>) -> Result<bool, ApiError> {
    let Some(raw) = raw else { return Ok(false) };
    match raw.get().trim_matches('"').to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "on" => Ok(true),
        "false" | "0" | "no" | "off" => Ok(false),
        _ => Err(ApiError::wrong_type(field, "bool_parsing", "Input should be a valid boolean, unable to interpret input", raw)),
    }
}

pub(crate) fn text(field: &str, raw: Option<&RawValue>) -> Result<Option<String>, ApiError> {
    typed(field, raw, "string_type", "Input should be a valid string")
}

/// Parses a value of any type; `error` and `message` are pydantic's for the wrong one.
pub(crate) fn typed<T: DeserializeOwned>(field: &str, raw: Option<&RawValue>, error: &str, message: &str) -> Result<Option<T>, ApiError> {
    let Some(raw) = raw else { return Ok(None) };
    // Only a value keeps the last one of a field that is there twice.
    let lenient = |_| serde_json::from_str::<Value>(raw.get()).and_then(T::deserialize);
    match serde_json::from_str(raw.get()).or_else(lenient) {
        Ok(value) => Ok(Some(value)),
        Err(_) => Err(ApiError::wrong_type(field, error, message, raw)),
    }
}
