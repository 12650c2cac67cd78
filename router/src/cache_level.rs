//! How much of a replica's cache placement knows, from best to worst.

use serde::Serialize;

/// How well a replica's cache is known for a request. Each level is used if the one above is
/// unavailable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheLevel {
    /// The prompt's tokens, and the blocks that the engine reports.
    Exact,
    /// The prompt's text, and what this router has sent to the replica.
    Text,
    /// Only how busy the replica is.
    Load,
}

impl CacheLevel {
    /// All levels, each at its own index.
    pub(crate) const ALL: [Self; 3] = [Self::Exact, Self::Text, Self::Load];

    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Text => "text",
            Self::Load => "load",
        }
    }
}
