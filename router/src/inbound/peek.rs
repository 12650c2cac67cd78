//! The few fields of a JSON body that the router needs, read in one pass without copying; the body travels on as it came.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// What the router looks at. Fields of another type than expected count as absent: it is the engine that judges them.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Peek<'a> {
    /// The model that the request names.
    pub(super) model: Option<String>,
    /// Whether the answer is to be a stream.
    pub(super) stream: bool,
    /// Most tokens that the answer may have. The larger one where it is said twice, and none where it is said in a form that only engines
    /// may know: they also differ in which of the names they go by.
    pub(super) most_output: Most,
    /// Answers that are wanted to each prompt.
    pub(super) choices: Most,
    /// Whether the answer is to be computed while nobody waits for it, in whatever form engines take for a yes.
    pub(super) background: bool,
    /// Its turn among those that wait, as vLLM has it: a lower one goes first.
    pub(super) priority: Option<i32>,
    /// Whether it has a priority that is not plainly 0 or more. Engines read texts, fractions of zero and larger numbers too.
    pub(super) is_urgent: bool,
    /// The client's own user.
    pub(super) user: Option<String>,
    /// Keeps the cached blocks of those who share it apart from others'.
    pub(super) salt: Option<String>,
    /// Its salts as they stand in the body: nearly always none, and the last one counts.
    pub(super) salts: Vec<&'a str>,
    /// What the client calls the response that is made.
    pub(super) chosen: Option<String>,
    /// The response that it continues.
    pub(super) previous: Option<String>,
    /// Whether the answer has to follow a schema or a grammar.
    pub(super) guided: bool,
    /// Whether it has messages, as chats do.
    pub(super) is_chat: bool,
    /// Whether it has a prompt, be it one of embeddings, as completions do.
    pub(super) is_completion: bool,
    /// Of a form: a field whose words may become part of a prompt.
    pub(super) words: Option<String>,
    /// What makes the prompt, in the order in which it stands in the body.
    pub(super) text: Vec<&'a str>,
}

/// Why a body is not JSON.
#[derive(Debug, thiserror::Error)]
#[error("the body is not valid JSON: {0}")]
pub(super) struct NotJson(#[from] serde_json::Error);

/// Reads a body, which must be JSON of any kind.
pub(super) fn peek(body: &[u8]) -> Result<Peek<'_>, NotJson> {
    let first = body.iter().find(|byte| !byte.is_ascii_whitespace());
    if first == Some(&b'{') {
        return Ok(serde_json::from_slice::<Peek<'_>>(body)?);
    }
    serde_json::from_slice::<IgnoredAny>(body)?;
    Ok(Peek::default())
}

/// Whether a body that is not JSON is none to engines either. Python's reader takes more: other encodings, numbers that are none, and halves
/// of characters.
pub(super) fn is_nobodys_json(body: &[u8]) -> bool {
    let has = |word: &[u8]| memchr::memmem::find(body, word).is_some();
    let is_plain = std::str::from_utf8(body).is_ok() && !body.contains(&0) && !body.starts_with(b"\xef\xbb\xbf");
    is_plain && ![&b"NaN"[..], b"Infinity", b"\\ud", b"\\uD"].into_iter().any(has)
}

impl<'de> Deserialize<'de> for Peek<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Fields)
    }
}

struct Fields;

impl<'de> Visitor<'de> for Fields {
    type Value = Peek<'de>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    /// A name that stands twice counts as the engine counts it: the last one wins.
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Peek<'de>, A::Error> {
        let mut peek = Peek::default();
        while let Some(name) = map.next_key::<Name<'de>>()? {
            match &*name.0 {
                "model" => peek.model = value(&mut map)?,
                "stream" => peek.stream = value(&mut map)?.unwrap_or(false),
                "max_completion_tokens" | "max_tokens" | "max_output_tokens" => peek.most_output.see(map.next_value::<&RawValue>()?),
                "n" | "best_of" => peek.choices.see(map.next_value::<&RawValue>()?),
                "sampling_params" => {
                    match serde_json::from_str::<Option<Sampling<'_>>>(map.next_value::<&RawValue>()?.get()) {
                        Ok(params) => {
                            let Sampling { max_tokens, n } = params.unwrap_or_default();
                            max_tokens.inspect(|most| peek.most_output.see(most));
                            n.inspect(|choices| peek.choices.see(choices));
                        }
                        // As where a name is said twice: engines take the last one.
                        Err(_) => (peek.most_output, peek.choices) = (Most::Unclear, Most::Unclear),
                    }
                }
                "background" => peek.background = !matches!(map.next_value::<&RawValue>()?.get(), "false" | "null"),
                "priority" => {
                    let priority = map.next_value::<&RawValue>()?.get();
                    peek.priority = serde_json::from_str(priority).ok();
                    peek.is_urgent |= priority != "null" && !is_patient(priority.as_bytes());
                }
                "cache_salt" => {
                    let salt = map.next_value::<&RawValue>()?.get();
                    peek.salt = serde_json::from_str(salt).ok();
                    peek.salts.push(salt);
                }
                "request_id" => peek.chosen = value(&mut map)?,
                "previous_response_id" => peek.previous = value(&mut map)?,
                "user" => peek.user = value(&mut map)?,
                "response_format" => peek.guided |= value::<Format, _>(&mut map)?.is_some_and(|format| format.guides()),
                "text" => peek.guided |= value::<Text, _>(&mut map)?.is_some_and(|text| text.format.guides()),
                // One tool has to be called: the engine makes a schema of the tools.
                "tool_choice" => peek.guided |= requires_tool(map.next_value::<&RawValue>()?.get()),
                "structured_outputs" | "guided_json" | "guided_regex" | "guided_choice" | "guided_grammar" => {
                    peek.guided |= map.next_value::<&RawValue>()?.get() != "null";
                }
                name @ ("system" | "instructions" | "messages" | "prompt" | "input" | "token_ids") => {
                    peek.is_chat |= name == "messages";
                    peek.is_completion |= name == "prompt";
                    peek.text.push(map.next_value::<&RawValue>()?.get());
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

/// Whether a priority is plainly 0 or more: digits, and nothing that a reader could take for something else.
pub(super) fn is_patient(priority: &[u8]) -> bool {
    !priority.is_empty() && priority.iter().all(u8::is_ascii_digit)
}

/// The most of something that a body asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Most {
    /// It does not say.
    #[default]
    Unsaid,
    /// So many.
    Of(u64),
    /// It says so in a form that the router does not read: a number in a string is one to engines.
    Unclear,
}

impl Most {
    fn see(&mut self, value: &RawValue) {
        *self = match (*self, serde_json::from_str::<Option<u64>>(value.get())) {
            (Self::Unclear, _) | (_, Err(_)) => Self::Unclear,
            (before, Ok(None)) => before,
            (Self::Of(before), Ok(Some(number))) => Self::Of(before.max(number)),
            (Self::Unsaid, Ok(Some(number))) => Self::Of(number),
        };
    }

    /// The number, if there is a clear one.
    pub(super) fn number(self) -> Option<u64> {
        if let Self::Of(number) = self { Some(number) } else { None }
    }
}

/// What `/inference/v1/generate` has below `sampling_params`.
#[derive(Default, Deserialize)]
struct Sampling<'a> {
    #[serde(borrow)]
    max_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    n: Option<&'a RawValue>,
}

/// A field's value, if it has the expected type.
fn value<'de, T: Deserialize<'de>, A: MapAccess<'de>>(map: &mut A) -> Result<Option<T>, A::Error> {
    Ok(serde_json::from_str(map.next_value::<&RawValue>()?.get()).ok())
}

/// What an answer has to be.
#[derive(Deserialize)]
struct Format {
    r#type: String,
}

impl Format {
    fn guides(&self) -> bool {
        self.r#type != "text"
    }
}

/// The same in the Responses API.
#[derive(Deserialize)]
struct Text {
    format: Format,
}

/// A choice of tools that leaves none, as a word.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Required {
    Required,
}

/// Or as the tool itself; in the Messages API any tool may be it.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Named {
    Function,
    Tool,
    Any,
}

/// Whether a choice of tools leaves none.
fn requires_tool(choice: &str) -> bool {
    serde_json::from_str::<Required>(choice).is_ok() || serde_json::from_str::<Named>(choice).is_ok()
}

/// A name, borrowed from the body unless it has escapes.
#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);
