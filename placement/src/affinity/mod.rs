//! Who has which prefix: the blocks that replicas hold, those that requests in flight are about to leave there, how much a prefix is asked
//! for, and a guess for replicas whose engines tell nothing. Data structures only; the router's fleet and dispatch, and the simulator,
//! write and ask them.

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

/// One life of one replica's cache. Slots are small numbers, so that a set of them is a bitmask; a
/// number is reused when nothing is left of its last life. The slots of a [`CacheIndex`] and those
/// of an [`ApproxPrefixIndex`] have nothing to do with each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReplicaSlot(u32);

impl ReplicaSlot {
    fn index(self) -> usize {
        self.0 as usize
    }
}

/// Whether a replica's cache may hold a block without holding those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChainGaps {
    /// No: engines free the ends of chains first. The match is found by bisection.
    None,
    /// Yes: sliding windows free the beginning first. The chain is walked until the first missing
    /// block.
    Possible,
}
