//! Which run of which engine something is about.

use std::sync::Arc;

/// One life of one engine: a replica keeps its id when its engine is started again, and gets
/// another epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EngineLife {
    /// The replica's id.
    pub replica: Arc<str>,
    /// Which of its engine's lives.
    pub epoch: u64,
}

impl EngineLife {
    /// The node whose agent tells of it.
    #[must_use]
    pub(crate) fn node(&self) -> &str {
        self.replica.rsplit_once('/').map_or(&*self.replica, |(node, _)| node)
    }
}
