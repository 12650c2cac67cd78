//! A model that an engine serves, as the engine describes it.

use bytes::Bytes;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelCard {
    /// Name that requests use.
    pub id: String,
    /// The engine's own JSON object, unchanged.
    pub raw: Bytes,
}
