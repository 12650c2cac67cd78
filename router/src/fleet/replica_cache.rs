//! The known cached blocks of one engine, as the view shows them, one set for each tier.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use hostler_placement::affinity::ReplicaSlot;

/// Where an engine caches blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum CacheTier {
    #[default]
    Gpu,
    /// The host's memory, from which blocks are loaded into the GPU's.
    Host,
    /// Files, which all engines of a node share. Blocks are read into the host's memory first.
    Files,
}

impl CacheTier {
    /// The highest number of a tier that this release knows.
    pub(crate) const HIGHEST: u32 = 2;

    /// The tier of this number in cache reports.
    pub(crate) fn from_number(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Gpu),
            1 => Some(Self::Host),
            Self::HIGHEST => Some(Self::Files),
            _ => None,
        }
    }
}

/// A router's knowledge of the blocks in one tier: those of one life of an engine, or the files of
/// one attachment of a node.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReplicaCache {
    /// The tier's slot in the cache index; `None` while its blocks are not completely known.
    pub slot: Option<ReplicaSlot>,
    pub stats: Arc<CacheStats>,
}

impl ReplicaCache {
    /// Blocks that placement counts with.
    pub(crate) fn usable_blocks(&self) -> u64 {
        if self.slot.is_some() { self.stats.blocks.load(Ordering::Relaxed) } else { 0 }
    }
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
