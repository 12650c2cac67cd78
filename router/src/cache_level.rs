//! How much of a replica's cache placement knows, from best to worst.

use serde::Serialize;
use strum::{EnumCount, IntoStaticStr, VariantNames};

/// How well a replica's cache is known for a request. Each level is used if the one above is
/// unavailable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, EnumCount, IntoStaticStr, VariantNames)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum CacheLevel {
    /// The prompt's tokens, and the blocks that the engine reports.
    Exact,
    /// The prompt's text, and what this router has sent to the replica.
    Text,
    /// Only how busy the replica is.
    Load,
}

impl CacheLevel {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}
