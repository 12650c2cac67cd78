//! Reads the few fields of a JSON body that the router needs, in one pass without copying. The body
//! travels on as it came.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The fields that the router looks at. A field of an unexpected type counts as absent: the engine
/// judges it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Peek {
    pub(super) model: Option<String>,
    pub(super) is_stream: bool,
    /// Most tokens that the answer may have. If several fields say so, the larger number counts,
    /// because engines differ in which name they use.
    pub(super) max_output: RequestedCount,
    /// Where the body has `max_tokens`, if it has it once.
    pub(super) max_tokens_at: Option<Range<usize>>,
    /// Fewest tokens that the answer may have.
    pub(super) min_output: RequestedCount,
    /// Whether the answer continues beyond the model's end of text, up to its limit.
    pub(super) ignores_end: bool,
    pub(super) choices: RequestedCount,
    /// Whether the answer must be computed in the background, in any form that engines take for a
    /// yes.
    pub(super) background: bool,
    /// Priority in the queue, as in vLLM: lower goes first.
    pub(super) priority: Option<i32>,
    /// Whether the request has a priority that is not plainly 0 or more. Engines also read strings,
    /// fractions of zero and larger numbers.
    pub(super) is_urgent: bool,
    pub(super) user: Option<String>,
    /// The `cache_salt`, which separates cached blocks from those of other salts.
    pub(super) salt: Option<String>,
    /// Where the body has salts. There is nearly always none; the last one counts.
    pub(super) raw_salts: Vec<Range<usize>>,
    /// The client's own id for the new response.
    pub(super) response_id: Option<String>,
    /// The response that this request continues.
    pub(super) previous_response_id: Option<String>,
    /// Whether the answer must follow a schema or a grammar.
    pub(super) is_guided: bool,
    /// Whether the body has tools.
    pub(super) has_tools: bool,
    /// Whether the body says that no tool may be called.
    pub(super) forbids_tools: bool,
    /// Whether the body has messages, as chats do.
    pub(super) is_chat: bool,
    /// Whether the body has a prompt, even as embeddings, as completions do.
    pub(super) is_completion: bool,
    /// Most prompts that come as embeddings.
    pub(super) embedded_prompts: u64,
    /// A form's field whose text may become part of a prompt.
    pub(super) prompt_field: Option<String>,
    /// Where the body has parts of the prompt, in its order.
    pub(super) prompt_parts: Vec<Range<usize>>,
}

#[derive(Debug, thiserror::Error)]
#[error("the body is not valid JSON: {0}")]
pub(super) struct JsonError(#[from] serde_json::Error);

/// Reads a body, which must be JSON of any kind.
pub(super) fn peek(body: &[u8]) -> Result<Peek, JsonError> {
    let first = body.iter().find(|byte| !byte.is_ascii_whitespace());
    if first == Some(&b'{') {
        let mut reader = serde_json::Deserializer::from_slice(body);
        let peek = reader.deserialize_map(PeekVisitor { body })?;
        reader.end()?;
        return Ok(peek);
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

struct PeekVisitor<'a> {
    body: &'a [u8],
}

impl PeekVisitor<'_> {
    /// Where a value that was borrowed from the body stands in it.
    fn place(&self, value: &RawValue) -> Range<usize> {
        let begin = value.get().as_ptr().addr() - self.body.as_ptr().addr();
        begin..begin + value.get().len()
    }
}

impl<'de> Visitor<'de> for PeekVisitor<'_> {
    type Value = Peek;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    /// The last value of a repeated name wins, as in engines.
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Peek, A::Error> {
        let (mut peek, mut has_max_tokens) = (Peek::default(), false);
        while let Some(name) = map.next_key::<TextValue<'de>>()? {
            match &*name.0 {
                "model" => peek.model = typed_value(&mut map)?,
                "stream" => peek.is_stream = typed_value(&mut map)?.unwrap_or(false),
                name @ ("max_completion_tokens" | "max_tokens" | "max_output_tokens") => {
                    let limit = map.next_value::<&RawValue>()?;
                    peek.max_output.merge(limit);
                    if name == "max_tokens" {
                        let is_first = !std::mem::replace(&mut has_max_tokens, true);
                        peek.max_tokens_at = is_first.then(|| self.place(limit));
                    }
                }
                "min_tokens" => peek.min_output.merge(map.next_value::<&RawValue>()?),
                "ignore_eos" => peek.ignores_end = typed_value(&mut map)?.unwrap_or(false),
                "n" | "best_of" => peek.choices.merge(map.next_value::<&RawValue>()?),
                "sampling_params" => peek.read_sampling_params(map.next_value::<&RawValue>()?.get()),
                "background" => peek.background = !matches!(map.next_value::<&RawValue>()?.get(), "false" | "null"),
                "priority" => {
                    let priority = map.next_value::<&RawValue>()?.get();
                    peek.priority = serde_json::from_str(priority).ok();
                    peek.is_urgent |= priority != "null" && !is_plain_priority(priority.as_bytes());
                }
                "cache_salt" => {
                    let salt = map.next_value::<&RawValue>()?;
                    peek.salt = serde_json::from_str(salt.get()).ok();
                    peek.raw_salts.push(self.place(salt));
                }
                "request_id" => peek.response_id = typed_value(&mut map)?,
                "previous_response_id" => peek.previous_response_id = typed_value(&mut map)?,
                "user" => peek.user = typed_value(&mut map)?,
                "response_format" => peek.is_guided |= typed_value::<ResponseFormat, _>(&mut map)?.is_some_and(|format| format.is_guided()),
                "text" => peek.is_guided |= typed_value::<ResponsesTextOptions, _>(&mut map)?.is_some_and(|text| text.format.is_guided()),
                // If a tool must be called, the engine makes a schema of the tools.
                "tool_choice" => {
                    let choice = map.next_value::<&RawValue>()?.get();
                    peek.is_guided |= requires_tool(choice);
                    peek.forbids_tools = choice == r#""none""# || (choice.starts_with('{') && choice.contains(r#""none""#));
                }
                "tools" => peek.has_tools = !matches!(map.next_value::<&RawValue>()?.get(), "null" | "[]"),
                "structured_outputs" | "guided_json" | "guided_regex" | "guided_choice" | "guided_grammar" => {
                    peek.is_guided |= map.next_value::<&RawValue>()?.get() != "null";
                }
                name @ ("system" | "instructions" | "messages" | "prompt" | "input" | "token_ids") => {
                    peek.is_chat |= name == "messages";
                    peek.is_completion |= name == "prompt";
                    peek.prompt_parts.push(self.place(map.next_value()?));
                }
                "prompt_embeds" => {
                    peek.is_completion = true;
                    peek.embedded_prompts = peek.embedded_prompts.max(count_items(map.next_value::<&RawValue>()?.get()));
                }
                _ => {
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

impl Peek {
    /// The parts of the prompt in the body that was read, which is UTF-8.
    pub(super) fn texts<'a>(&self, body: &'a [u8]) -> impl Iterator<Item = &'a str> {
        self.prompt_parts.iter().map(|part| std::str::from_utf8(&body[part.clone()]).unwrap_or_default())
    }

    fn read_sampling_params(&mut self, value: &str) {
        let (max_output, min_output, choices) = match serde_json::from_str::<Option<SamplingParams>>(value) {
            Ok(params) => {
                let SamplingParams { max_output, min_output, ignores_end, choices } = params.unwrap_or_default();
                self.ignores_end = ignores_end;
                (max_output, min_output, choices)
            }
            Err(_) => (RequestedCount::Unreadable, RequestedCount::Unset, RequestedCount::Unreadable),
        };
        self.max_output = self.max_output.or_larger(max_output);
        self.min_output = self.min_output.or_larger(min_output);
        self.choices = self.choices.or_larger(choices);
    }
}

/// The largest count that a body asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum RequestedCount {
    #[default]
    Unset,
    Count(u64),
    /// The count has a form that no engine reads.
    Unreadable,
}

impl RequestedCount {
    fn merge(&mut self, value: &RawValue) {
        *self = self.or_larger(Self::read(value.get()));
    }

    fn read(value: &str) -> Self {
        match value {
            "null" => Self::Unset,
            "true" => Self::Count(1),
            "false" => Self::Count(0),
            text if text.starts_with('"') => serde_json::from_str(text).ok().and_then(|TextValue(text)| count_in_text(&text)).into(),
            number => whole_number(number).into(),
        }
    }

    fn or_larger(self, other: Self) -> Self {
        match (self, other) {
            (Self::Unreadable, _) | (_, Self::Unreadable) => Self::Unreadable,
            (Self::Count(count), Self::Count(other)) => Self::Count(count.max(other)),
            (Self::Unset, count) | (count, Self::Unset) => count,
        }
    }

    /// The number, if it is unambiguous.
    pub(super) fn count(self) -> Option<u64> {
        if let Self::Count(number) = self { Some(number) } else { None }
    }
}

impl From<Option<u64>> for RequestedCount {
    fn from(read: Option<u64>) -> Self {
        read.map_or(Self::Unreadable, Self::Count)
    }
}

/// A number in a string. vLLM 0.32 reads it with pydantic, which accepts blanks around it, a plus
/// sign, and underscores between its digits. Forms that only other readers might accept count too.
fn count_in_text(text: &str) -> Option<u64> {
    let text = text.trim();
    let text = text.strip_prefix('+').unwrap_or(text);
    if text.contains('_') { whole_number(&text.replace('_', "")) } else { whole_number(text) }
}

/// A number that is whole and not negative, even as `60.0` or `6e1`. A number too large to count is
/// as large as possible: engines cut it to the room in their context.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is whole and not negative, and `as` saturates")]
fn whole_number(text: &str) -> Option<u64> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(text.parse().unwrap_or(u64::MAX));
    }
    let number: f64 = text.parse().ok()?;
    (number >= 0.0 && number.fract() == 0.0).then_some(number as u64)
}

/// How many items a list has; 1 for any other value.
pub(super) fn count_items(value: &str) -> u64 {
    // An error of serde_json would contain all of a text.
    if !value.trim_start().starts_with('[') {
        return 1;
    }
    // Ignored items have no size, so the list takes no memory.
    serde_json::from_str::<Vec<IgnoredAny>>(value).map_or(1, |items| items.len() as u64)
}

/// The fields of `/inference/v1/generate` below `sampling_params`. Engines take the last value of a
/// repeated field; here the largest counts.
#[derive(Default)]
struct SamplingParams {
    max_output: RequestedCount,
    min_output: RequestedCount,
    ignores_end: bool,
    choices: RequestedCount,
}

impl<'de> Deserialize<'de> for SamplingParams {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(SamplingParamsVisitor)
    }
}

struct SamplingParamsVisitor;

impl<'de> Visitor<'de> for SamplingParamsVisitor {
    type Value = SamplingParams;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<SamplingParams, A::Error> {
        let mut params = SamplingParams::default();
        while let Some(TextValue(name)) = map.next_key::<TextValue<'de>>()? {
            match &*name {
                "max_tokens" => params.max_output.merge(map.next_value()?),
                "min_tokens" => params.min_output.merge(map.next_value()?),
                "ignore_eos" => params.ignores_end = map.next_value::<&RawValue>()?.get() == "true",
                "n" => params.choices.merge(map.next_value()?),
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(params)
    }
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

/// A choice of tools that requires a call, as an object. In the Messages API this may be any tool.
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

/// A name or a text, borrowed from the body unless it has escapes.
#[derive(Deserialize)]
struct TextValue<'a>(#[serde(borrow)] Cow<'a, str>);
