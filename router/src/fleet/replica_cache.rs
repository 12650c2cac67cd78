//! What is known of one engine's cached blocks, as the view shows it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use hostler_placement::affinity::ReplicaSlot;

/// What a router knows of the blocks that one life of an engine has cached.
#[derive(Debug, Clone, Default)]
pub struct ReplicaCache {
    /// Where they stand in the index; `None` while they are not known whole.
    pub slot: Option<ReplicaSlot>,
    /// Figures for operators.
    pub stats: Arc<CacheStats>,
}

/// How the index and an agent's reports agree.
#[derive(Debug, Default)]
pub struct CacheStats {
    /// Blocks that the index holds.
    pub blocks: AtomicU64,
    /// Whether their number and digest were those of the last report.
    pub matches: AtomicBool,
    /// How often the whole cache was asked for because they were not.
    pub resyncs: AtomicU64,
    /// The reports contradict themselves: they are not used until the engine starts anew.
    pub distrusted: AtomicBool,
}
