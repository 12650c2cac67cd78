//! One line of the input: its parts, if it is a request that a batch can send. Pure.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use thiserror::Error;

/// Longest body, equal to the router's default.
pub const MAX_BODY_BYTES: usize = 64 << 20;

/// Most characters of a text of the input that an error repeats.
const MAX_QUOTED_CHARS: usize = 200;

/// A request. Its body is sent unchanged.
#[derive(Debug)]
pub struct RequestLine<'a> {
    pub custom_id: Cow<'a, str>,
    /// Path of the URL after `/v1`, with a slash before it.
    pub route: String,
    pub body: &'a str,
    /// Model of the request; empty if its body names none.
    pub model: Cow<'a, str>,
    /// Whether the body sets a priority.
    pub has_priority: bool,
}

/// Why a line is not a request.
#[derive(Debug, PartialEq, Eq, Error)]
pub enum LineError {
    #[error("it is no JSON object ({0}); a line holds one request and no line breaks")]
    NotJson(String),
    #[error("it has no {0}: a request has custom_id, method, url and body")]
    Missing(&'static str),
    #[error("its custom_id is empty: give each request one of its own, by which you find its answer")]
    EmptyId,
    #[error("its method is {0}: only POST can be in a batch")]
    Method(String),
    #[error("its url is {0}: write the path of an API, such as /v1/chat/completions")]
    Url(String),
    #[error("its url is {url}: the batch is for {endpoint}")]
    OtherUrl { url: String, endpoint: String },
    #[error("its body cannot be read ({0}): write the JSON object that the API takes")]
    Body(String),
    #[error("its body has more than {} MiB: send images and audio in more requests, or by URL", .0 >> 20)]
    BodyTooLong(usize),
    #[error("its body asks for a stream: leave out \"stream\", a batch keeps whole answers")]
    Stream,
}

impl LineError {
    /// The problem in a word, as OpenAI's API has it where it has one.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotJson(_) => "invalid_json_line",
            Self::Missing(_) => "missing_required_parameter",
            Self::EmptyId => "invalid_custom_id",
            Self::Method(_) => "invalid_method",
            Self::Url(_) => "invalid_url",
            Self::OtherUrl { .. } => "mismatched_endpoint",
            Self::Body(_) => "invalid_body",
            Self::BodyTooLong(_) => "body_too_long",
            Self::Stream => "stream_not_supported",
        }
    }

    /// The part of the line that is wrong.
    #[must_use]
    pub fn param(&self) -> Option<&'static str> {
        match self {
            Self::NotJson(_) => None,
            Self::Missing(part) => Some(part),
            Self::EmptyId => Some("custom_id"),
            Self::Method(_) => Some("method"),
            Self::Url(_) | Self::OtherUrl { .. } => Some("url"),
            Self::Body(_) | Self::BodyTooLong(_) => Some("body"),
            Self::Stream => Some("body.stream"),
        }
    }
}

#[derive(Deserialize)]
struct WrittenLine<'a> {
    #[serde(borrow)]
    custom_id: Option<Cow<'a, str>>,
    method: Option<String>,
    url: Option<String>,
    #[serde(borrow)]
    body: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct BodyPeek<'a> {
    #[serde(borrow)]
    model: Option<Cow<'a, str>>,
    stream: Option<bool>,
    priority: Option<IgnoredAny>,
}

/// Parses a line of the input.
///
/// # Errors
/// When the line is not a request that can be sent.
pub fn parse(line: &[u8]) -> Result<RequestLine<'_>, LineError> {
    let line = str::from_utf8(line).map_err(|_| LineError::NotJson("it is not UTF-8".to_owned()))?;
    // A list would be parsed as the fields of an object in their order.
    if !line.trim_start().starts_with('{') {
        return Err(LineError::NotJson("it does not begin with {".to_owned()));
    }
    let written: WrittenLine<'_> = serde_json::from_str(line).map_err(|error| LineError::NotJson(describe(&error)))?;
    let custom_id = written.custom_id.ok_or(LineError::Missing("custom_id"))?;
    if custom_id.is_empty() {
        return Err(LineError::EmptyId);
    }
    let method = written.method.ok_or(LineError::Missing("method"))?;
    if method != "POST" {
        return Err(LineError::Method(cut(&method)));
    }
    let url = written.url.ok_or(LineError::Missing("url"))?;
    let route = url.strip_prefix("/v1").filter(|route| is_route(route)).map(str::to_owned).ok_or_else(|| LineError::Url(cut(&url)))?;
    let body = written.body.ok_or(LineError::Missing("body"))?.get();
    if body.len() > MAX_BODY_BYTES {
        return Err(LineError::BodyTooLong(MAX_BODY_BYTES));
    }
    if !body.starts_with('{') {
        return Err(LineError::Body("it is no object".to_owned()));
    }
    let peek: BodyPeek<'_> = serde_json::from_str(body).map_err(|error| LineError::Body(describe(&error)))?;
    if peek.stream == Some(true) {
        return Err(LineError::Stream);
    }
    let model = peek.model.unwrap_or_default();
    Ok(RequestLine { custom_id, route, body, model, has_priority: peek.priority.is_some() })
}

/// Whether this is the path of an API below `/v1`, and can stand in the head of a request.
fn is_route(route: &str) -> bool {
    let Some(path) = route.strip_prefix('/') else { return false };
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'/' | b'_' | b'-' | b'.' | b':' | b'~');
    path.bytes().all(is_plain) && path.split('/').all(|segment| !matches!(segment, "" | "." | ".."))
}

/// The beginning of a text that an error repeats: a line may be one long text.
pub(crate) fn cut(text: &str) -> String {
    text.chars().take(MAX_QUOTED_CHARS).collect()
}

/// Describes an error of the parser, without the number of the line, which is always the first.
fn describe(error: &serde_json::Error) -> String {
    let text = error.to_string();
    // The parser repeats a value of the wrong type.
    let what = text.rsplit_once(" at line ").map_or(text.as_str(), |(what, _)| what);
    format!("{} at column {}", cut(what), error.column())
}

#[cfg(test)]
mod tests;
