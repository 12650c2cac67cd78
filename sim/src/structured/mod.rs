//! Answers that a request binds to a form: a JSON schema, a regular expression, some choices, or
//! the call of a tool.
//!
//! The tokens of such an answer are written when the request arrives, and the engine delivers them
//! step by step like any others.

mod document;
mod merge;
mod pattern;
mod range;
#[cfg(test)]
mod tests;

use serde_json::{Value, json};

use crate::tokens::{Continuation, decode, encode_ordinary, end_token, spaced_json};

/// Most places of a prompt at which a schema is searched.
const MOST_BRACES: usize = 256;

/// Form of an answer.
#[derive(Clone, Debug)]
pub(crate) enum StructuredOutput {
    /// A JSON document that fits this schema.
    Json(Value),
    /// Any JSON object. If the prompt shows a schema, the object fits it, as a model's would.
    JsonObject,
    /// A text that this regular expression matches as a whole.
    Regex(String),
    /// A choice of these texts.
    Choice(Vec<String>),
    /// A function's name and arguments that fit the schema of its parameters, as the chat template
    /// writes calls.
    Call { name: String, parameters: Value },
}

impl StructuredOutput {
    /// Tokens of an answer to `prompt`, or the error in the form. `words` decides the open choices.
    pub(crate) fn tokens(&self, prompt: &[u32], words: &mut Continuation) -> Result<Vec<u32>, String> {
        let mut tokens = match self {
            Self::Json(schema) => encode_ordinary(&document(schema, words)?),
            Self::JsonObject => {
                let shown = shown_schema(&decode(prompt)).and_then(|schema| document(&schema, words).ok());
                encode_ordinary(&shown.map_or_else(|| document(&any_object(), words), Ok)?)
            }
            Self::Regex(regex) => encode_ordinary(&pattern::write(regex, words).map_err(|error| error.message)?),
            Self::Choice(choices) => encode_ordinary(&choices[words.pick(choices.len())]),
            Self::Call { name, parameters } => [call_head(name), encode_ordinary(&document(parameters, words)?)].concat(),
        };
        if tokens.is_empty() {
            // An empty text is an answer, too, and an answer has a token.
            tokens.push(end_token());
        }
        Ok(tokens)
    }
}

/// Tokens of a call before its arguments.
pub(crate) fn call_head(name: &str) -> Vec<u32> {
    [encode_ordinary(name), encode_ordinary(" ")].concat()
}

/// Last schema of an object in a text.
///
/// Clients that ask for any JSON object describe the desired one in words.
fn shown_schema(text: &str) -> Option<Value> {
    let (mut found, mut rest) = (None, text);
    for _ in 0..MOST_BRACES {
        let Some(start) = rest.find('{') else { break };
        let mut values = serde_json::Deserializer::from_str(&rest[start..]).into_iter::<Value>();
        let object = values.next().and_then(Result::ok);
        rest = &rest[start + values.byte_offset().max(1)..];
        found = object.filter(|object| object["properties"].is_object()).or(found);
    }
    found
}

fn any_object() -> Value {
    json!({ "type": "object", "additionalProperties": { "type": "string" }, "minProperties": 2 })
}

fn document(schema: &Value, words: &mut Continuation) -> Result<String, String> {
    document::write(schema, words).map(|document| spaced_json(&document)).map_err(|error| error.message)
}

/// Why there is no document. The messages are llguidance's, which vLLM asks last.
#[derive(Clone, Debug, PartialEq)]
struct SchemaError {
    message: String,
    /// Whether the whole schema is refused, not only the branch of it that was tried.
    fatal: bool,
}

impl SchemaError {
    fn invalid(message: impl Into<String>) -> Self {
        Self { message: message.into(), fatal: true }
    }

    fn unsatisfiable(why: &str) -> Self {
        Self { message: format!("Unsatisfiable schema: {why}"), fatal: false }
    }
}
