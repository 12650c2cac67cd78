//! Engines' answers to chats and completions, whole or as chunks of a stream, as far as other APIs
//! use them.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use serde_json::value::RawValue;

/// A chunk of an engine's stream, or its whole answer.
#[derive(Debug, Default, Deserialize)]
pub(in crate::edge) struct CompletionChunk {
    pub(in crate::edge) id: Option<String>,
    pub(in crate::edge) model: Option<String>,
    #[serde(default)]
    pub(in crate::edge) choices: Vec<ChunkChoice>,
    pub(in crate::edge) usage: Option<ChunkUsage>,
    pub(in crate::edge) error: Option<IgnoredAny>,
}

#[derive(Debug, Default, Deserialize)]
pub(in crate::edge) struct ChunkChoice {
    /// The new part of a chat, or all of it.
    #[serde(alias = "delta")]
    pub(in crate::edge) message: Option<ChunkMessage>,
    /// The new part of a completion, or all of it.
    pub(in crate::edge) text: Option<String>,
    pub(in crate::edge) logprobs: Option<ChunkLogprobs>,
    pub(in crate::edge) finish_reason: Option<String>,
    /// The stop string at which the answer ended, or the number of a stop token.
    pub(in crate::edge) stop_reason: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
pub(in crate::edge) struct ChunkMessage {
    pub(in crate::edge) content: Option<String>,
    /// vLLM's name for reasoning. `reasoning_content` is a former name, which others used too.
    #[serde(alias = "reasoning_content")]
    pub(in crate::edge) reasoning: Option<String>,
    pub(in crate::edge) tool_calls: Option<Vec<ChunkToolCall>>,
}

/// A tool call, or the new part of one.
#[derive(Debug, Default, Deserialize)]
pub(in crate::edge) struct ChunkToolCall {
    #[serde(default)]
    pub(in crate::edge) index: usize,
    pub(in crate::edge) id: Option<String>,
    #[serde(default)]
    pub(in crate::edge) function: ChunkFunction,
}

#[derive(Debug, Default, Deserialize)]
pub(in crate::edge) struct ChunkFunction {
    pub(in crate::edge) name: Option<String>,
    pub(in crate::edge) arguments: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(in crate::edge) struct ChunkLogprobs {
    /// Entries have the same form in both APIs.
    pub(in crate::edge) content: Option<Box<RawValue>>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub(in crate::edge) struct ChunkUsage {
    #[serde(default)]
    pub(in crate::edge) prompt_tokens: u64,
    #[serde(default)]
    pub(in crate::edge) completion_tokens: u64,
    prompt_tokens_details: Option<PromptTokenDetails>,
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
    pub(in crate::edge) fn cached_tokens(&self) -> Option<u64> {
        self.prompt_tokens_details?.cached_tokens
    }

    /// Reasoning tokens of the answer, if the engine reports them.
    pub(in crate::edge) fn reasoning_tokens(&self) -> Option<u64> {
        self.completion_tokens_details?.reasoning_tokens
    }
}

/// The client's message for a whole answer that is no JSON.
pub(in crate::edge) fn unreadable_answer(error: serde_json::Error) -> String {
    format!("the engine's answer cannot be read: {error}")
}

/// The message of an error in OpenAI's form or Ollama's; a body in neither is its own message.
pub(in crate::edge) fn error_message(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Failed {
        error: Option<Value>,
        detail: Option<Value>,
    }
    let told = serde_json::from_slice::<Failed>(body).ok().and_then(|failed| {
        let error = failed.error.or(failed.detail)?;
        let message = error.get("message").unwrap_or(&error);
        Some(message.as_str().map_or_else(|| message.to_string(), str::to_owned))
    });
    told.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned())
}
