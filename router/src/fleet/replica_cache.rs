//! The known cached blocks of one engine, as the view shows them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use hostler_placement::affinity::ReplicaSlot;

/// A router's knowledge of the blocks that one life of an engine has cached.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReplicaCache {
    /// The replica's slot in the cache index; `None` while its cache is not completely known.
    pub slot: Option<ReplicaSlot>,
    pub stats: Arc<CacheStats>,
}

/// How well the index agrees with an agent's reports.
#[derive(Debug, Default)]
pub(crate) struct CacheStats {
    pub blocks: AtomicU64,
    /// Whether count and digest matched at the last report.
    pub matches: AtomicBool,
    /// How often the whole cache was requested because count and digest did not match.
    pub resyncs: AtomicU64,
    /// The reports contradict themselves and are not used until the engine starts anew.
    pub distrusted: AtomicBool,
}
