//! What gRPC passes on of engines' answers beside `hostler_api::CompletionChunk`: log
//! probabilities, embeddings and errors.

use hostler_api::{ChunkUsage, lenient};
use serde::Deserialize;
use serde_json::Value;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct EngineLogprob {
    pub(super) token: String,
    pub(super) logprob: Option<f64>,
    pub(super) bytes: Option<Vec<u8>>,
    pub(super) top_logprobs: Option<Vec<EngineLogprob>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct EngineEmbeddings {
    pub(super) id: Option<String>,
    pub(super) model: Option<String>,
    pub(super) data: Vec<EngineEmbedding>,
    #[serde(deserialize_with = "lenient")]
    pub(super) usage: Option<ChunkUsage>,
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
