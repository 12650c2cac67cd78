//! Looks up how much of a prompt each replica has cached: exactly, in the cache index, or by the
//! text that was sent there.

use hostler_placement::affinity::{ChainGaps, PromptToMatch, ReplicaSlot};
use hostler_placement::block_keys::{BlockKey, TEXT_BLOCK_TOKENS};
use hostler_placement::cost::LowerTiers;

use super::{PlacementScratch, Placer, Prompt, block_tokens, kv_capacity_tokens};
use crate::fleet::{FleetView, Replica, ReplicaCache};

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
            return CacheKnowledge::Exact(KnownCache { slot, gaps, block_tokens });
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
        let mut size = 0;
        // Handle one block size after another. Usually there is only one.
        while let Some(larger) = tables.cache_knowledge.iter().filter_map(CacheKnowledge::block_tokens).filter(|of| *of > size).min() {
            size = larger;
            self.look_up_exact_caches(prompt, size, tables);
            // Nearly all fleets have none.
            if view.has_lower_tiers {
                self.look_up_lower_tiers(view, prompt, size, tables);
            }
        }
        self.look_up_approx_prefixes(prompt, tables);
    }

    /// Looks up the GPUs' blocks of so many tokens.
    #[inline]
    fn look_up_exact_caches(&self, prompt: &Prompt, size: u32, tables: &mut PlacementScratch) {
        let PlacementScratch { candidates, cache_knowledge, rows, exact_slots, .. } = tables;
        rows.clear();
        exact_slots.clear();
        for (row, cache_knowledge) in cache_knowledge.iter().enumerate() {
            if let CacheKnowledge::Exact(known) = *cache_knowledge
                && known.block_tokens == size
            {
                rows.push(row);
                exact_slots.push((known.slot, known.gaps));
            }
        }
        let keys = prompt.token_keys(size);
        let mut blocks = self.index.matched_blocks(&keys, exact_slots);
        let text: &[BlockKey] = if self.overlay.has_partly_read() { prompt.text_keys() } else { &[] };
        self.overlay.raise_matches(&PromptToMatch { keys: &keys, blocks: prompt.block_count(size), text }, exact_slots, &mut blocks);
        let most = most_cached_blocks(prompt, size);
        for (row, blocks) in rows.iter().zip(blocks) {
            candidates[*row].matched = blocks.min(most) * size;
        }
    }

    #[inline]
    fn look_up_approx_prefixes(&self, prompt: &Prompt, tables: &mut PlacementScratch) {
        let PlacementScratch { candidates, cache_knowledge, rows, approx_prefix_slots, .. } = tables;
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

    /// Adds the blocks in the hosts' memory and in files to the candidates of these rows, whose
    /// blocks have so many tokens. Any of those blocks may be removed, and what follows it stays.
    #[cold]
    fn look_up_lower_tiers(&self, view: &FleetView, prompt: &Prompt, block_tokens: u32, tables: &mut PlacementScratch) {
        let PlacementScratch { candidates, rows, .. } = tables;
        let (keys, most) = (prompt.token_keys(block_tokens), most_cached_blocks(prompt, block_tokens));
        let replicas: Vec<&Replica> = rows.iter().map(|row| &*view.replicas[candidates[*row].replica]).collect();
        let tokens_in = |tier: fn(&Replica) -> &ReplicaCache| {
            let known = replicas.iter().filter_map(|replica| Some((tier(replica).slot?, ChainGaps::Possible)));
            let mut blocks = self.index.matched_blocks(&keys, &known.collect::<Vec<_>>()).into_iter();
            let tokens = |replica: &&Replica| tier(replica).slot.and_then(|_| blocks.next()).unwrap_or(0).min(most) * block_tokens;
            replicas.iter().map(tokens).collect::<Vec<u32>>()
        };
        let (on_hosts, in_files) = (tokens_in(|replica| &replica.host_cache), tokens_in(|replica| &replica.file_cache));
        for ((row, replica), (on_host, in_files)) in rows.iter().zip(&replicas).zip(on_hosts.into_iter().zip(in_files)) {
            let (loading, reading) = (replica.local_load.loading_tokens(), replica.local_load.reading_tokens());
            let rates = replica.state.load_rates.scaled(replica.local_load.load_factors());
            candidates[*row].add_lower_tiers(&LowerTiers { on_host, in_files, loading, reading, rates });
        }
    }
}

/// Blocks of a prompt that an engine can find. It computes at least the last token of a prompt, and
/// with it that token's whole block.
fn most_cached_blocks(prompt: &Prompt, block_tokens: u32) -> u32 {
    prompt.token_count().saturating_sub(1) / block_tokens
}
