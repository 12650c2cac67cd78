//! Prefix affinity: the blocks that replicas hold, those that requests in flight are about to leave
//! there, the demand for each prefix, and an estimate for replicas whose engines report nothing.
//!
//! Data structures only; the router's fleet and dispatch, and the simulator, write and read them.

mod approx_prefix;
mod holders;
mod index;
mod overlay;
mod popularity;
mod prefix_search;

pub use approx_prefix::ApproxPrefixIndex;
pub use index::{CacheIndex, KeySetDigest};
pub use overlay::{InFlightBlocks, InFlightOverlay, PromptKeys, PromptToMatch};
pub use popularity::{Arrivals, Popularity};

/// One life of one replica's cache.
///
/// Slots are small numbers, so that a set of them is a bitmask. A number is reused when nothing is
/// left of its last life. The slots of a [`CacheIndex`] and those of an [`ApproxPrefixIndex`] are
/// unrelated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReplicaSlot(u32);

impl ReplicaSlot {
    fn index(self) -> usize {
        self.0 as usize
    }
}

/// Whether a replica's cache may hold a block without its predecessors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChainGaps {
    /// No gaps: engines free the ends of chains first. Bisection finds the match.
    None,
    /// Possible gaps: sliding windows free the beginning first.
    ///
    /// The chain is walked until the first missing block.
    Possible,
}
