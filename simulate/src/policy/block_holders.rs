//! Replicas, at most 64, that hold each block, as plain maps: the indexes of the compared policies.
//!
//! They share nothing with the router's own index, so that a mistake there would show.

use hostler_placement::block_keys::BlockKey;
use rustc_hash::FxHashMap;

use crate::blocks::CacheChanges;
use crate::fleet::ReplicaReport;

/// Blocks of both tiers, as the engines report them.
#[derive(Debug)]
pub(super) struct TieredHolders {
    gpu: BlockHolders,
    host: BlockHolders,
    /// What a block counts that only the host has, where one on the GPU counts 1.
    host_credit: f64,
}

impl TieredHolders {
    pub(super) fn new(host_credit: f64) -> Self {
        Self { gpu: BlockHolders::default(), host: BlockHolders::default(), host_credit }
    }

    pub(super) fn apply(&mut self, replica: usize, report: &ReplicaReport) {
        self.gpu.apply(replica, &report.changes);
        self.host.apply(replica, &report.copy_changes);
    }

    /// Credit for the leading blocks that each replica holds.
    pub(super) fn matched(&self, keys: &[BlockKey], replicas: usize) -> Vec<f64> {
        let [gpu, host] = [&self.gpu, &self.host].map(|tier| tier.matched(keys, replicas));
        let credit = |(gpu, host): (usize, usize)| gpu as f64 + self.host_credit * host.saturating_sub(gpu) as f64;
        gpu.into_iter().zip(host).map(credit).collect()
    }
}

#[derive(Debug, Default)]
pub(super) struct BlockHolders(FxHashMap<BlockKey, u64>);

impl BlockHolders {
    /// Applies changes of this replica's cache.
    fn apply(&mut self, replica: usize, changes: &CacheChanges) {
        for key in &changes.removed {
            if let Some(mask) = self.0.get_mut(key) {
                *mask &= !(1 << replica);
                if *mask == 0 {
                    self.0.remove(key);
                }
            }
        }
        self.store(replica, &changes.stored);
    }

    /// Records that this replica now holds these blocks.
    pub(super) fn store(&mut self, replica: usize, keys: &[BlockKey]) {
        keys.iter().for_each(|key| *self.0.entry(*key).or_default() |= 1 << replica);
    }

    /// Number of leading blocks that each replica holds.
    pub(super) fn matched(&self, keys: &[BlockKey], replicas: usize) -> Vec<usize> {
        let mut matched = vec![0; replicas];
        let mut left = u64::MAX >> (64 - replicas);
        for (position, key) in keys.iter().enumerate() {
            let mask = left & self.0.get(key).copied().unwrap_or(0);
            let mut gone = left & !mask;
            while gone != 0 {
                matched[gone.trailing_zeros() as usize] = position;
                gone &= gone - 1;
            }
            left = mask;
            if left == 0 {
                return matched;
            }
        }
        (0..replicas).filter(|replica| left >> replica & 1 == 1).for_each(|replica| matched[replica] = keys.len());
        matched
    }
}
