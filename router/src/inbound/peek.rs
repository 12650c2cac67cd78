//! The few fields of a JSON body that the router needs, read in one pass without copying; the body travels on as it came.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The fields that the router looks at. A field of an unexpected type counts as absent: the engine
/// judges it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Peek<'a> {
    pub(super) model: Option<String>,
    pub(super) is_stream: bool,
    /// Most tokens that the answer may have: the larger number where it is said twice, none where
    /// it is in a form that only engines may read. Engines also differ in which of the names they
    /// use.
    pub(super) max_output: RequestedCount,
    /// Fewest tokens that the answer may have.
    pub(super) min_output: RequestedCount,
    /// Whether the answer goes on behind the model's end of text, up to the most that it may have.
    pub(super) ignores_end: bool,
    pub(super) choices: RequestedCount,
    /// Whether the answer is to be computed in the background, in any form that engines take for a
    /// yes.
    pub(super) background: bool,
    /// Its priority in the queue, as in vLLM: a lower one goes first.
    pub(super) priority: Option<i32>,
    /// Whether it has a priority that is not plainly 0 or more. Engines also read strings,
    /// fractions of zero and larger numbers.
    pub(super) is_urgent: bool,
    pub(super) user: Option<String>,
    /// The `cache_salt`, which separates cached blocks from those of other salts.
    pub(super) salt: Option<String>,
    /// Its salts as they stand in the body: nearly always none; the last one counts.
    pub(super) raw_salts: Vec<&'a str>,
    /// The client's own id for the response that is made.
    pub(super) response_id: Option<String>,
    /// The response that it continues.
    pub(super) previous_response_id: Option<String>,
    /// Whether the answer must follow a schema or a grammar.
    pub(super) is_guided: bool,
    /// Whether it has messages, as chats do.
    pub(super) is_chat: bool,
    /// Whether it has a prompt, also of embeddings, as completions do.
    pub(super) is_completion: bool,
    /// In a form: a field whose text may become part of a prompt.
    pub(super) prompt_field: Option<String>,
    /// What makes the prompt, in the order of the body.
    pub(super) prompt_parts: Vec<&'a str>,
}

#[derive(Debug, thiserror::Error)]
#[error("the body is not valid JSON: {0}")]
pub(super) struct JsonError(#[from] serde_json::Error);

/// Reads a body, which must be JSON of any kind.
pub(super) fn peek(body: &[u8]) -> Result<Peek<'_>, JsonError> {
    let first = body.iter().find(|byte| !byte.is_ascii_whitespace());
    if first == Some(&b'{') {
        return Ok(serde_json::from_slice::<Peek<'_>>(body)?);
    }
    serde_json::from_slice::<IgnoredAny>(body)?;
    Ok(Peek::default())
}

/// Whether a body that is not JSON is invalid for engines too. Python's parser accepts more: other
/// encodings, `NaN`, and lone surrogates.
pub(super) fn is_invalid_for_engines(body: &[u8]) -> bool {
    let has = |word: &[u8]| memchr::memmem::find(body, word).is_some();
    let is_plain = std::str::from_utf8(body).is_ok() && !body.contains(&0) && !body.starts_with(b"\xef\xbb\xbf");
    is_plain && ![&b"NaN"[..], b"Infinity", b"\\ud", b"\\uD"].into_iter().any(has)
}

impl<'de> Deserialize<'de> for Peek<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(PeekVisitor)
    }
}

struct PeekVisitor;

impl<'de> Visitor<'de> for PeekVisitor {
    type Value = Peek<'de>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    /// For a repeated name the last value wins, as in engines.
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Peek<'de>, A::Error> {
        let mut peek = Peek::default();
        while let Some(name) = map.next_key::<FieldName<'de>>()? {
            match &*name.0 {
                "model" => peek.model = typed_value(&mut map)?,
                "stream" => peek.is_stream = typed_value(&mut map)?.unwrap_or(false),
                "max_completion_tokens" | "max_tokens" | "max_output_tokens" => peek.max_output.merge(map.next_value::<&RawValue>()?),
                "min_tokens" => peek.min_output.merge(map.next_value::<&RawValue>()?),
                "ignore_eos" => peek.ignores_end = typed_value(&mut map)?.unwrap_or(false),
                "n" | "best_of" => peek.choices.merge(map.next_value::<&RawValue>()?),
                "sampling_params" => {
                    match serde_json::from_str::<Option<SamplingParams<'_>>>(map.next_value::<&RawValue>()?.get()) {
                        Ok(params) => {
                            let SamplingParams { max_tokens, min_tokens, ignore_eos, n } = params.unwrap_or_default();
                            max_tokens.inspect(|most| peek.max_output.merge(most));
                            min_tokens.inspect(|least| peek.min_output.merge(least));
                            peek.ignores_end = ignore_eos.is_some_and(|ignores| ignores.get() == "true");
                            n.inspect(|choices| peek.choices.merge(choices));
                        }
                        // As with a repeated name: engines take the last one.
                        Err(_) => (peek.max_output, peek.choices) = (RequestedCount::Unreadable, RequestedCount::Unreadable),
                    }
                }
                "background" => peek.background = !matches!(map.next_value::<&RawValue>()?.get(), "false" | "null"),
                "priority" => {
                    let priority = map.next_value::<&RawValue>()?.get();
                    peek.priority = serde_json::from_str(priority).ok();
                    peek.is_urgent |= priority != "null" && !is_plain_priority(priority.as_bytes());
                }
                "cache_salt" => {
                    let salt = map.next_value::<&RawValue>()?.get();
                    peek.salt = serde_json::from_str(salt).ok();
                    peek.raw_salts.push(salt);
                }
                "request_id" => peek.response_id = typed_value(&mut map)?,
                "previous_response_id" => peek.previous_response_id = typed_value(&mut map)?,
                "user" => peek.user = typed_value(&mut map)?,
                "response_format" => peek.is_guided |= typed_value::<ResponseFormat, _>(&mut map)?.is_some_and(|format| format.is_guided()),
                "text" => peek.is_guided |= typed_value::<ResponsesTextOptions, _>(&mut map)?.is_some_and(|text| text.format.is_guided()),
                // If a tool must be called, the engine makes a schema of the tools.
                "tool_choice" => peek.is_guided |= requires_tool(map.next_value::<&RawValue>()?.get()),
                "structured_outputs" | "guided_json" | "guided_regex" | "guided_choice" | "guided_grammar" => {
                    peek.is_guided |= map.next_value::<&RawValue>()?.get() != "null";
                }
                name @ ("system" | "instructions" | "messages" | "prompt" | "input" | "token_ids") => {
                    peek.is_chat |= name == "messages";
                    peek.is_completion |= name == "prompt";
                    peek.prompt_parts.push(map.next_value::<&RawValue>()?.get());
                }
                name => {
                    peek.is_completion |= name == "prompt_embeds";
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(peek)
    }
}

/// Whether a priority is plainly 0 or more: digits, and nothing that a reader could take for
/// something else.
pub(super) fn is_plain_priority(priority: &[u8]) -> bool {
    !priority.is_empty() && priority.iter().all(u8::is_ascii_digit)
}

/// How many of something a body asks for, at most.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum RequestedCount {
    #[default]
    Unset,
    Count(u64),
    /// In a form that the router does not read: to engines, a number in a string is a number.
    Unreadable,
}

impl RequestedCount {
    fn merge(&mut self, value: &RawValue) {
        *self = match (*self, serde_json::from_str::<Option<u64>>(value.get())) {
            (Self::Unreadable, _) | (_, Err(_)) => Self::Unreadable,
            (before, Ok(None)) => before,
            (Self::Count(before), Ok(Some(number))) => Self::Count(before.max(number)),
            (Self::Unset, Ok(Some(number))) => Self::Count(number),
        };
    }

    /// The number, if it is unambiguous.
    pub(super) fn count(self) -> Option<u64> {
        if let Self::Count(number) = self { Some(number) } else { None }
    }
}

/// The fields of `/inference/v1/generate` below `sampling_params`.
#[derive(Default, Deserialize)]
struct SamplingParams<'a> {
    #[serde(borrow)]
    max_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    min_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    ignore_eos: Option<&'a RawValue>,
    #[serde(borrow)]
    n: Option<&'a RawValue>,
}

/// A field's value, if it has the expected type.
fn typed_value<'de, T: Deserialize<'de>, A: MapAccess<'de>>(map: &mut A) -> Result<Option<T>, A::Error> {
    Ok(serde_json::from_str(map.next_value::<&RawValue>()?.get()).ok())
}

#[derive(Deserialize)]
struct ResponseFormat {
    r#type: String,
}

impl ResponseFormat {
    fn is_guided(&self) -> bool {
        self.r#type != "text"
    }
}

#[derive(Deserialize)]
struct ResponsesTextOptions {
    format: ResponseFormat,
}

/// A choice of tools that requires a call, as a word.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum RequiredToolWord {
    Required,
}

/// Or as the tool itself; in the Messages API also any tool.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum RequiredToolObject {
    Function,
    Tool,
    Any,
}

fn requires_tool(choice: &str) -> bool {
    serde_json::from_str::<RequiredToolWord>(choice).is_ok() || serde_json::from_str::<RequiredToolObject>(choice).is_ok()
}

/// A name, borrowed from the body unless it has escapes.
#[derive(Deserialize)]
struct FieldName<'a>(#[serde(borrow)] Cow<'a, str>);
