//! Identifies one run of one engine.

use std::sync::Arc;

/// A life of an engine. A replica keeps its id when its engine is started again, and gets another
/// epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EngineLife {
    /// The replica's id.
    pub replica: Arc<str>,
    /// The number of the engine's life.
    pub epoch: u64,
}

impl EngineLife {
    /// The node whose agent reports this life.
    #[must_use]
    pub(crate) fn node(&self) -> &str {
        self.replica.rsplit_once('/').map_or(&*self.replica, |(node, _)| node)
    }
}
