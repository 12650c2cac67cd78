//! A model that an engine serves, as the engine describes it.

use bytes::Bytes;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelCard {
    /// Name that requests use.
    pub id: String,
    /// The engine's own JSON object, unchanged.
    pub raw: Bytes,
}

impl ModelCard {
    /// The card of a model before an engine has described it.
    pub(crate) fn announced(id: String) -> Self {
        let card = serde_json::json!({"id": id, "object": "model", "created": 0, "owned_by": "hostler"});
        Self { id, raw: card.to_string().into() }
    }

    /// Longest context that the engine takes, as the card says it.
    pub(crate) fn max_model_len(&self) -> Option<u64> {
        serde_json::from_slice::<serde_json::Value>(&self.raw).ok()?.get("max_model_len")?.as_u64()
    }
}
