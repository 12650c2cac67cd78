//! Engines' answers to chats and completions, whole or as events of a stream, as far as other APIs
//! are told in their place.
//!
//! One shape serves whole answers and events, chats and texts. Other fields are ignored, null or
//! missing ones are absent, and so are those of another type where an answer is whole without them.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// An event of an engine's stream, or its whole answer.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct CompletionChunk {
    pub id: Option<String>,
    pub model: Option<String>,
    #[serde(deserialize_with = "null_as_default")]
    pub choices: Vec<ChunkChoice>,
    #[serde(deserialize_with = "lenient")]
    pub usage: Option<ChunkUsage>,
    /// The tokens of a chat's prompt. Completions have them in their choices.
    #[serde(deserialize_with = "lenient")]
    pub prompt_token_ids: Option<Vec<u32>>,
    pub error: Option<Value>,
}

/// An answer to the prompt, or a piece of it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ChunkChoice {
    #[serde(deserialize_with = "lenient")]
    pub index: Option<u32>,
    /// The new part of a chat, or all of it.
    #[serde(alias = "delta")]
    pub message: Option<ChunkMessage>,
    /// The new part of a completion, or all of it.
    pub text: Option<String>,
    #[serde(deserialize_with = "lenient")]
    pub logprobs: Option<ChunkLogprobs>,
    pub finish_reason: Option<String>,
    /// The stop string at which the answer ended, or the number of a stop token.
    pub stop_reason: Option<Value>,
    #[serde(deserialize_with = "lenient")]
    pub token_ids: Option<Vec<u32>>,
    #[serde(deserialize_with = "lenient")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// An assistant's message.
#[derive(Debug, Default, Deserialize)]
#[serde(from = "MessageFields")]
pub struct ChunkMessage {
    pub content: Option<String>,
    pub reasoning: Option<String>,
    pub refusal: Option<String>,
    pub tool_calls: Option<Vec<ChunkToolCall>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct MessageFields {
    content: Option<String>,
    reasoning: Option<String>,
    /// The name of `reasoning` before vLLM 0.12, and elsewhere.
    reasoning_content: Option<String>,
    refusal: Option<String>,
    tool_calls: Option<Vec<ChunkToolCall>>,
}

impl From<MessageFields> for ChunkMessage {
    fn from(fields: MessageFields) -> Self {
        let MessageFields { content, reasoning, reasoning_content, refusal, tool_calls } = fields;
        Self { content, reasoning: reasoning.or(reasoning_content), refusal, tool_calls }
    }
}

/// A tool call, or the new part of one.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ChunkToolCall {
    #[serde(deserialize_with = "lenient")]
    pub index: Option<u32>,
    pub id: Option<String>,
    #[serde(deserialize_with = "null_as_default")]
    pub function: ChunkFunction,
}

impl ChunkToolCall {
    /// Its number among the answer's calls.
    #[must_use]
    pub fn number(&self) -> usize {
        self.index.unwrap_or_default() as usize
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ChunkFunction {
    pub name: Option<String>,
    pub arguments: Option<String>,
}

/// Log probabilities. Chats have `content`, completions the other three lists.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ChunkLogprobs {
    /// A list of entries with their alternatives.
    pub content: Option<Box<RawValue>>,
    pub tokens: Option<Vec<String>>,
    pub token_logprobs: Option<Vec<Option<f64>>>,
    pub top_logprobs: Option<Vec<Option<Map<String, Value>>>>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ChunkUsage {
    #[serde(deserialize_with = "null_as_default")]
    pub prompt_tokens: u64,
    #[serde(deserialize_with = "null_as_default")]
    pub completion_tokens: u64,
    #[serde(deserialize_with = "lenient")]
    prompt_tokens_details: Option<PromptTokenDetails>,
    #[serde(deserialize_with = "lenient")]
    completion_tokens_details: Option<CompletionTokenDetails>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
struct PromptTokenDetails {
    cached_tokens: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
struct CompletionTokenDetails {
    reasoning_tokens: Option<u64>,
}

impl ChunkUsage {
    /// Cached tokens of the prompt, if the engine reports them.
    #[must_use]
    pub fn cached_tokens(&self) -> Option<u64> {
        self.prompt_tokens_details?.cached_tokens
    }

    /// Reasoning tokens of the answer, if the engine reports them.
    #[must_use]
    pub fn reasoning_tokens(&self) -> Option<u64> {
        self.completion_tokens_details?.reasoning_tokens
    }
}

/// A value of the expected type; any other counts as absent.
///
/// # Errors
/// When the document is no JSON.
pub fn lenient<'de, T: DeserializeOwned, D: Deserializer<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    let raw = Option::<&RawValue>::deserialize(deserializer)?;
    Ok(raw.and_then(|raw| serde_json::from_str(raw.get()).ok()))
}

fn null_as_default<'de, T: Deserialize<'de> + Default, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_fields_of_an_answer_count_as_absent() {
        let odd = r#"{"choices":[{"index":"0","delta":{"reasoning":"a","reasoning_content":"b","tool_calls":[{"function":null}]},
            "logprobs":7,"token_ids":"x"}],"usage":"x","error":null}"#;
        let chunk: CompletionChunk = serde_json::from_str(odd).unwrap();
        let choice = &chunk.choices[0];
        assert_eq!((choice.index, choice.token_ids.as_ref(), chunk.usage, chunk.error.as_ref()), (None, None, None, None));
        assert!(choice.logprobs.is_none());
        let message = choice.message.as_ref().unwrap();
        assert_eq!((message.reasoning.as_deref(), message.tool_calls.as_ref().map(Vec::len)), (Some("a"), Some(1)));
        assert!(serde_json::from_str::<CompletionChunk>(r#"{"choices":null,"usage":null}"#).unwrap().choices.is_empty());
    }
}
