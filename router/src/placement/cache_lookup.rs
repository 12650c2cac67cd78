//! Looks up how much of a prompt each replica has cached: exactly, in the cache index, or by the
//! text that was sent there.

use hostler_placement::affinity::{ChainGaps, PromptToMatch, ReplicaSlot};
use hostler_placement::block_keys::{BlockKey, TEXT_BLOCK_TOKENS};

use super::{PlacementScratch, Placer, Prompt, block_tokens, kv_capacity_tokens};
use crate::fleet::{FleetView, Replica};

/// Text blocks that a replica of unknown cache size is assumed to hold.
const DEFAULT_TEXT_BLOCKS: u64 = 8192;

#[derive(Debug, Clone, Copy)]
pub(super) enum CacheKnowledge {
    /// The cache index has the cache.
    Exact(KnownCache),
    /// The approximate prefix records what this router has sent to the replica.
    Approximate(ReplicaSlot),
    /// Nothing is known, because the prompt is not understood.
    Unknown,
}

/// A cache in the index.
#[derive(Debug, Clone, Copy)]
pub(super) struct KnownCache {
    pub(super) slot: ReplicaSlot,
    /// Slot of the host tier, if the engine has one.
    host: Option<ReplicaSlot>,
    gaps: ChainGaps,
    pub(super) block_tokens: u32,
}

impl CacheKnowledge {
    fn block_tokens(&self) -> Option<u32> {
        if let Self::Exact(known) = self { Some(known.block_tokens) } else { None }
    }
}

impl Placer {
    pub(super) fn cache_knowledge(&self, prompt: &Prompt, replica: &Replica) -> CacheKnowledge {
        if let (Some(gaps), Some(slot)) = (replica.state.exact_cache, replica.cache.slot)
            && prompt.is_exact_for(replica.state.token_rules())
            && let Some(block_tokens) = block_tokens(replica)
        {
            return CacheKnowledge::Exact(KnownCache { slot, host: replica.host_cache.slot, gaps, block_tokens });
        }
        if prompt.text_keys().is_empty() {
            return CacheKnowledge::Unknown;
        }
        let blocks = || match kv_capacity_tokens(replica) / u64::from(TEXT_BLOCK_TOKENS) {
            0 => DEFAULT_TEXT_BLOCKS,
            blocks => blocks,
        };
        CacheKnowledge::Approximate(replica.local_load.approx_prefix_slot(replica.epoch, &self.approx_prefix, blocks))
    }

    /// Looks up how many prompt tokens each candidate has cached or will have.
    pub(super) fn look_up_caches(&self, view: &FleetView, prompt: &Prompt, tables: &mut PlacementScratch) {
        let PlacementScratch { candidates, cache_knowledge, rows, exact_slots, host_rows, host_slots, approx_prefix_slots, .. } = tables;
        let mut size = 0;
        // Handle one block size after another. Usually there is only one.
        while let Some(larger) = cache_knowledge.iter().filter_map(CacheKnowledge::block_tokens).filter(|of| *of > size).min() {
            size = larger;
            rows.clear();
            exact_slots.clear();
            host_rows.clear();
            host_slots.clear();
            for (row, cache_knowledge) in cache_knowledge.iter().enumerate() {
                if let CacheKnowledge::Exact(known) = *cache_knowledge
                    && known.block_tokens == size
                {
                    rows.push(row);
                    exact_slots.push((known.slot, known.gaps));
                    if let Some(host) = known.host {
                        host_rows.push(row);
                        host_slots.push((host, known.gaps));
                    }
                }
            }
            let keys = prompt.token_keys(size);
            let mut blocks = self.index.matched_blocks(&keys, exact_slots);
            let text: &[BlockKey] = if self.overlay.has_partly_read() { prompt.text_keys() } else { &[] };
            self.overlay.raise_matches(&PromptToMatch { keys: &keys, blocks: prompt.block_count(size), text }, exact_slots, &mut blocks);
            // An engine computes at least the last token of a prompt, and with it that token's
            // whole block.
            let most = prompt.token_count().saturating_sub(1) / size;
            for (row, blocks) in rows.iter().zip(blocks) {
                candidates[*row].matched = blocks.min(most) * size;
            }
            // Nearly all fleets have no host tiers.
            if host_slots.is_empty() {
                continue;
            }
            for (row, blocks) in host_rows.iter().zip(self.index.matched_blocks(&keys, host_slots)) {
                let candidate = &mut candidates[*row];
                let replica = &view.replicas[candidate.replica];
                let loading = replica.local_load.loading_tokens();
                candidate.add_host_tier(blocks.min(most) * size, replica.state.load_seconds_per_token, loading);
            }
        }
        rows.clear();
        approx_prefix_slots.clear();
        for (row, cache_knowledge) in cache_knowledge.iter().enumerate() {
            if let CacheKnowledge::Approximate(slot) = *cache_knowledge {
                rows.push(row);
                approx_prefix_slots.push(slot);
            }
        }
        if !rows.is_empty() {
            for (row, blocks) in rows.iter().zip(self.approx_prefix.matched_blocks(prompt.text_keys(), approx_prefix_slots)) {
                candidates[*row].matched = (blocks * TEXT_BLOCK_TOKENS).min(prompt.token_count());
            }
        }
    }
}
