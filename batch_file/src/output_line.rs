//! One line of the output, in the format of OpenAI's batches: the outcome of a request. Pure.

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

/// Headers in which a target names its answer: Hostler's, for `hostler explain`, and others'.
const ID_HEADERS: [&str; 2] = ["x-hostler-id", "x-request-id"];

/// An answer that is whole.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// How a request ended.
#[derive(Debug)]
pub enum Outcome {
    Answered(Answer),
    /// There is no answer, and no further attempt will be made.
    Failed {
        code: &'static str,
        message: String,
    },
}

/// A line, and its counts.
#[derive(Debug)]
pub struct OutputLine {
    pub json: Vec<u8>,
    pub is_failed: bool,
    /// Number of generated tokens.
    pub tokens: u64,
}

#[derive(Serialize)]
struct WrittenOutput<'a> {
    id: &'a str,
    custom_id: &'a str,
    response: Option<WrittenResponse>,
    error: Option<WrittenError>,
}

#[derive(Serialize)]
struct WrittenResponse {
    status_code: u16,
    request_id: Option<String>,
    body: Box<RawValue>,
}

#[derive(Serialize)]
struct WrittenError {
    code: &'static str,
    message: String,
}

/// Parts of an answer that are read.
#[derive(Debug, Default, Deserialize)]
struct AnswerPeek {
    #[serde(default)]
    choices: Vec<ChoicePeek>,
    usage: Option<UsagePeek>,
}

#[derive(Debug, Deserialize)]
struct ChoicePeek {
    finish_reason: Option<String>,
}

/// Usage, by the names of chats and of `/v1/responses`.
#[derive(Debug, Deserialize)]
struct UsagePeek {
    completion_tokens: Option<u64>,
    output_tokens: Option<u64>,
}

/// Writes the line of a request. `id` identifies it within the batch.
#[must_use]
pub fn write(id: &str, custom_id: &str, outcome: Outcome) -> OutputLine {
    let (response, error, tokens) = match outcome {
        Outcome::Failed { code, message } => (None, Some(WrittenError { code, message }), 0),
        Outcome::Answered(Answer { status, headers, body }) => {
            let tokens = peek(&body).usage.map_or(0, |usage| usage.completion_tokens.or(usage.output_tokens).unwrap_or(0));
            match to_json(&body) {
                Some(body) => {
                    (Some(WrittenResponse { status_code: status.as_u16(), request_id: request_id(&headers), body }), None, tokens)
                }
                None if status.is_success() => (None, Some(not_json(&body)), 0),
                // The body is a proxy's page.
                None => {
                    let body = to_raw_value(&String::from_utf8_lossy(&body)).expect("a text is JSON");
                    (Some(WrittenResponse { status_code: status.as_u16(), request_id: request_id(&headers), body }), None, 0)
                }
            }
        }
    };
    let is_failed = response.as_ref().is_none_or(|response| !(200..300).contains(&response.status_code));
    let json = serde_json::to_vec(&WrittenOutput { id, custom_id, response, error }).expect("texts and numbers are JSON");
    OutputLine { json, is_failed, tokens }
}

/// Whether an engine gave an answer up. It does so with status 200 if it is stopped or breaks.
pub(crate) fn is_aborted(answer: &Answer) -> bool {
    answer.status.is_success()
        && peek(&answer.body).choices.iter().any(|choice| matches!(choice.finish_reason.as_deref(), Some("abort" | "error")))
}

/// Whether the target does not know the model, in the words of vLLM and of Hostler.
///
/// It may know the model later: the jobs of its replicas may be over, and the next ones on their
/// way.
pub(crate) fn is_unknown_model(answer: &Answer) -> bool {
    let message = error_message(&answer.body);
    answer.status == StatusCode::NOT_FOUND && message.starts_with("The model ") && message.contains("does not exist")
}

/// Sentence of an error, or the beginning of a body that is none.
#[must_use]
pub fn error_message(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Body {
        error: Inner,
    }
    #[derive(Deserialize)]
    struct Inner {
        message: String,
    }
    let text = match serde_json::from_slice::<Body>(body) {
        Ok(body) => body.error.message,
        Err(_) => String::from_utf8_lossy(&body[..body.len().min(400)]).into_owned(),
    };
    text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(200).collect()
}

fn peek(body: &[u8]) -> AnswerPeek {
    serde_json::from_slice(body).unwrap_or_default()
}

/// The JSON on one line: line breaks stand only between its parts.
fn to_json(body: &[u8]) -> Option<Box<RawValue>> {
    let text = str::from_utf8(body).ok()?;
    RawValue::from_string(text.replace(['\n', '\r'], " ")).ok()
}

fn not_json(body: &Bytes) -> WrittenError {
    let message = format!("the answer is {} bytes that are no JSON: ask this API outside of a batch", body.len());
    WrittenError { code: "answer_not_json", message }
}

fn request_id(headers: &HeaderMap) -> Option<String> {
    let values = ID_HEADERS.iter().filter_map(|name| headers.get(*name)?.to_str().ok());
    values.map(str::to_owned).next()
}

#[cfg(test)]
mod tests;
