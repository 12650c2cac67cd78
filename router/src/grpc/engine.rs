//! Engines' answers on `/v1/chat/completions`, `/v1/completions` and `/v1/embeddings`, as far as
//! gRPC passes them on.
//!
//! One shape serves whole answers and events, chats and texts. Other fields are ignored, and null
//! or missing ones are absent.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::RawValue;

/// A whole answer, or one event of a stream.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct EngineAnswer {
    pub(super) id: Option<String>,
    pub(super) model: Option<String>,
    pub(super) choices: Option<Vec<EngineChoice>>,
    #[serde(deserialize_with = "lenient")]
    pub(super) usage: Option<EngineUsage>,
    #[serde(deserialize_with = "lenient")]
    pub(super) prompt_token_ids: Option<Vec<u32>>,
    pub(super) error: Option<EngineError>,
}

/// An answer to the prompt, or a piece of it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct EngineChoice {
    #[serde(deserialize_with = "lenient")]
    pub(super) index: Option<u32>,
    /// Set in a completion.
    pub(super) text: Option<String>,
    /// Set in a chat that is not streamed.
    pub(super) message: Option<EngineMessage>,
    /// Set in a chat that is streamed.
    pub(super) delta: Option<EngineMessage>,
    #[serde(deserialize_with = "lenient")]
    pub(super) logprobs: Option<EngineLogprobs>,
    pub(super) finish_reason: Option<String>,
    pub(super) stop_reason: Option<Value>,
    #[serde(deserialize_with = "lenient")]
    pub(super) token_ids: Option<Vec<u32>>,
    /// The tokens of a completion's prompt. Chats have them beside the choices.
    #[serde(deserialize_with = "lenient")]
    pub(super) prompt_token_ids: Option<Vec<u32>>,
}

/// An assistant's message.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct EngineMessage {
    pub(super) content: Option<String>,
    pub(super) reasoning: Option<String>,
    /// The name of `reasoning` before vLLM 0.12, and elsewhere.
    pub(super) reasoning_content: Option<String>,
    pub(super) refusal: Option<String>,
    pub(super) tool_calls: Option<Vec<EngineToolCall>>,
}

/// A tool call, or a piece of one.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct EngineToolCall {
    #[serde(deserialize_with = "lenient")]
    pub(super) index: Option<u32>,
    pub(super) id: Option<String>,
    pub(super) function: Option<EngineFunction>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct EngineFunction {
    pub(super) name: Option<String>,
    pub(super) arguments: Option<String>,
}

/// Log probabilities. Chats have `content`, completions the other three lists.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct EngineLogprobs {
    pub(super) content: Option<Vec<EngineLogprob>>,
    pub(super) tokens: Option<Vec<String>>,
    pub(super) token_logprobs: Option<Vec<Option<f64>>>,
    pub(super) top_logprobs: Option<Vec<Option<serde_json::Map<String, Value>>>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct EngineLogprob {
    pub(super) token: String,
    pub(super) logprob: Option<f64>,
    pub(super) bytes: Option<Vec<u8>>,
    pub(super) top_logprobs: Option<Vec<EngineLogprob>>,
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(super) struct EngineUsage {
    pub(super) prompt_tokens: Option<u64>,
    pub(super) completion_tokens: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    pub(super) prompt_tokens_details: Option<PromptDetails>,
    #[serde(deserialize_with = "lenient")]
    pub(super) completion_tokens_details: Option<CompletionDetails>,
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(super) struct PromptDetails {
    pub(super) cached_tokens: Option<u64>,
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(super) struct CompletionDetails {
    pub(super) reasoning_tokens: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct EngineEmbeddings {
    pub(super) id: Option<String>,
    pub(super) model: Option<String>,
    pub(super) data: Vec<EngineEmbedding>,
    #[serde(deserialize_with = "lenient")]
    pub(super) usage: Option<EngineUsage>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct EngineEmbedding {
    pub(super) index: Option<u32>,
    pub(super) embedding: Vec<f32>,
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(super) struct EngineError {
    pub(super) message: Option<String>,
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) param: Option<String>,
    code: Option<Value>,
}

impl EngineError {
    /// The HTTP status that the error would have as a separate answer.
    pub(super) fn http_status(&self) -> Option<u32> {
        let code = self.code.as_ref()?;
        let number = code.as_u64().or_else(|| code.as_str()?.parse().ok())?;
        u32::try_from(number).ok().filter(|code| (400..600).contains(code))
    }
}

/// The body of a refusal: an error in OpenAI's form, the same without a wrapper as in older
/// engines, or FastAPI's `detail`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct EngineRefusal {
    error: Option<EngineError>,
    #[serde(flatten)]
    bare: EngineError,
    detail: Option<Value>,
}

impl EngineRefusal {
    pub(super) fn into_error(self) -> Option<EngineError> {
        let detail = self.detail.map(|detail| detail.as_str().map_or_else(|| detail.to_string(), str::to_owned));
        let bare = Some(self.bare).filter(|bare| bare.message.is_some());
        self.error.or(bare).or_else(|| Some(EngineError { message: Some(detail?), ..EngineError::default() }))
    }
}

/// A value of the expected type; any other counts as absent.
fn lenient<'de, T: DeserializeOwned, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    let raw = Option::<&RawValue>::deserialize(deserializer)?;
    Ok(raw.and_then(|raw| serde_json::from_str(raw.get()).ok()))
}
