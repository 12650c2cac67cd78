//! The idea of `SGLang`'s cache-aware policy: a prefix tree of the prompts sent to each replica.
//!
//! A prompt whose longest match is long enough goes to the match, any other to the replica with the
//! smallest tree. But if the numbers of requests are too far apart, the replica with the fewest
//! gets it. SGLang's tree holds text and forgets after minutes; here it holds block keys, and a run
//! is too short to forget.

use super::block_holders::BlockHolders;
use super::{Policy, index_of_least};
use crate::fleet::FleetState;
use crate::request::Request;

/// When the match decides, and when the load does.
#[derive(Debug, Clone, Copy)]
pub(super) struct Thresholds {
    /// Share of the prompt that must match.
    cache: f64,
    /// Number of requests by which the replicas may differ.
    absolute: u32,
    /// Factor by which the replicas may differ.
    relative: f64,
}

/// Defaults of the command line.
pub(super) const WIDE_THRESHOLDS: Thresholds = Thresholds { cache: 0.3, absolute: 64, relative: 1.5 };
/// Defaults of the library.
pub(super) const TIGHT_THRESHOLDS: Thresholds = Thresholds { cache: 0.5, absolute: 32, relative: 1.0001 };

#[derive(Debug)]
pub(super) struct Radix {
    thresholds: Thresholds,
    tree: BlockHolders,
    /// Blocks in each replica's tree.
    sizes: Vec<usize>,
    random: fastrand::Rng,
}

impl Radix {
    pub(super) fn new(thresholds: Thresholds) -> Self {
        Self { thresholds, tree: BlockHolders::default(), sizes: Vec::new(), random: fastrand::Rng::with_seed(0) }
    }

    fn choose(&mut self, matched: &[usize], blocks: usize, in_flight: &[u32]) -> usize {
        let most = in_flight.iter().copied().max().unwrap_or(0);
        let fewest = in_flight.iter().copied().min().unwrap_or(0);
        if most - fewest > self.thresholds.absolute && f64::from(most) > self.thresholds.relative * f64::from(fewest) {
            return index_of_least(in_flight.iter().map(|count| f64::from(*count)), &mut self.random);
        }
        let best = index_of_least(matched.iter().map(|blocks| -(*blocks as f64)), &mut self.random);
        if matched[best] as f64 > self.thresholds.cache * blocks as f64 {
            best
        } else {
            index_of_least(self.sizes.iter().map(|size| *size as f64), &mut self.random)
        }
    }
}

impl Policy for Radix {
    fn place(&mut self, _id: usize, request: &Request, seen: &FleetState, _now: f64) -> Option<usize> {
        let replicas = seen.in_flight.len();
        self.sizes.resize(replicas, 0);
        let keys = request.prompt_keys();
        let matched = self.tree.matched(keys, replicas);
        let replica = self.choose(&matched, keys.len(), &seen.in_flight);
        self.tree.store(replica, &keys[matched[replica]..]);
        self.sizes[replica] += keys.len() - matched[replica];
        Some(replica)
    }
}
