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
        Self { raw: hostler_api::announced_card(&id).into(), id }
    }

    /// Longest context that the engine takes, as the card says it.
    pub(crate) fn max_model_len(&self) -> Option<u64> {
        serde_json::from_slice::<serde_json::Value>(&self.raw).ok()?.get("max_model_len")?.as_u64()
    }
}
