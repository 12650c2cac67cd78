//! Recent demand for each prefix.
//!
//! A block that many requests share is worth computing on more than one replica, so its price is
//! shared among those requests.
//!
//! Only some positions of a chain are counted, with growing distances: a chain of 6,250 blocks
//! touches 26 entries.

use std::mem;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::block_keys::BlockKey;

/// Seconds after which an arrival counts for 1/e.
const DECAY_SECONDS: f64 = 2.0;

/// Number of counted positions: 0, 1, 2, 3, 4, 6, 8, 12, 16 and so on, up to block 2^19.
const SAMPLES: usize = 40;

/// Default size of each of two generations, which fits into tables of 6.5 MB each.
///
/// A prefix that is requested once in each generation is never forgotten. A generation is at least
/// 8,800 requests, even if they are all long and share nothing.
const MAX_ENTRIES: usize = 7 << 15;

/// Decayed, bounded counts of arrivals by block.
///
/// There are two generations of entries; the older is dropped when the newer is full.
#[derive(Debug)]
pub struct Popularity {
    max_entries: usize,
    generations: Mutex<Generations>,
}

#[derive(Debug, Default)]
struct Generations {
    new: FxHashMap<BlockKey, DecayedCount>,
    old: FxHashMap<BlockKey, DecayedCount>,
}

#[derive(Debug, Clone, Copy)]
struct DecayedCount {
    arrivals: f64,
    time: f64,
}

/// Number of recent requests with each block of a prompt, before this one.
#[derive(Debug, Clone, PartialEq)]
pub struct Arrivals {
    counts: [f32; SAMPLES],
    blocks: u32,
    block_tokens: u32,
}

impl Default for Popularity {
    fn default() -> Self {
        Self::new(MAX_ENTRIES)
    }
}

impl Popularity {
    /// Keeps at most twice as many entries; a prompt of 6,250 blocks takes 26, a shorter one fewer.
    #[must_use]
    pub fn new(entries: usize) -> Self {
        Self { max_entries: entries.max(1), generations: Mutex::default() }
    }

    /// Counts a request for this chain and returns the number before it.
    ///
    /// `now` is in seconds; if it goes back, time stands still.
    pub fn arrive(&self, keys: &[BlockKey], block_tokens: u32, now: f64) -> Arrivals {
        let mut arrivals = Arrivals { blocks: u32::try_from(keys.len()).unwrap_or(u32::MAX), block_tokens, ..Arrivals::empty() };
        let mut generations = self.generations.lock();
        let mut most = f32::INFINITY;
        for (sample, count) in arrivals.counts.iter_mut().enumerate() {
            let Some(key) = keys.get(sample_block(sample) as usize) else { break };
            // A request with this block also had those before it, so the counts cannot rise. Only
            // forgetting could make it look otherwise.
            most = most.min(generations.arrive(*key, now, self.max_entries));
            *count = most;
        }
        arrivals
    }

    #[must_use]
    pub fn len(&self) -> usize {
        let generations = self.generations.lock();
        generations.new.len() + generations.old.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Generations {
    /// Counts one arrival and returns the decayed number of those before it.
    #[expect(clippy::cast_possible_truncation, reason = "seven digits of a count are enough")]
    fn arrive(&mut self, key: BlockKey, now: f64, entries: usize) -> f32 {
        if let Some(count) = self.new.get_mut(&key) {
            return count.arrive(now) as f32;
        }
        if self.new.len() >= entries {
            mem::swap(&mut self.new, &mut self.old);
            self.new.clear();
        }
        let mut count = self.old.remove(&key).unwrap_or(DecayedCount { arrivals: 0.0, time: now });
        let before = count.arrive(now);
        self.new.insert(key, count);
        before as f32
    }
}

impl DecayedCount {
    fn arrive(&mut self, now: f64) -> f64 {
        let before = self.arrivals * (-(now - self.time).max(0.0) / DECAY_SECONDS).exp();
        *self = Self { arrivals: before + 1.0, time: self.time.max(now) };
        before
    }
}

impl Arrivals {
    /// No arrivals, so every block has its full weight.
    #[must_use]
    pub const fn empty() -> Self {
        Self { counts: [0.0; SAMPLES], blocks: 0, block_tokens: 0 }
    }

    /// Decayed arrivals with this block, by the nearest counted block.
    ///
    /// Never more than with an earlier block.
    #[must_use]
    pub fn through_block(&self, block: u32) -> f64 {
        if block >= self.blocks {
            return 0.0;
        }
        let sample = (1..SAMPLES).take_while(|sample| first_block(*sample) <= block).count();
        f64::from(self.counts[sample])
    }

    /// Sums the tokens from `matched_tokens` to `tokens`, each divided by one more than the
    /// arrivals with its block.
    ///
    /// Tokens beyond the last whole block are never shared and count in full.
    #[must_use]
    pub fn discounted_tokens(&self, matched_tokens: u32, tokens: u32) -> f64 {
        let (matched, tokens, block_tokens) = (u64::from(matched_tokens), u64::from(tokens), u64::from(self.block_tokens));
        let within = |from: u64, to: u64| (to.min(tokens).saturating_sub(from.max(matched))) as f64;
        let blocks = u64::from(self.blocks);
        let mut sum = within(blocks * block_tokens, u64::MAX);
        for (sample, count) in self.counts.iter().enumerate() {
            let from = u64::from(first_block(sample));
            if from >= blocks {
                break;
            }
            let to = if sample + 1 < SAMPLES { u64::from(first_block(sample + 1)).min(blocks) } else { blocks };
            sum += within(from * block_tokens, to * block_tokens) / (1.0 + f64::from(*count));
        }
        sum
    }
}

#[expect(clippy::cast_possible_truncation, reason = "there are forty samples")]
const fn sample_block(sample: usize) -> u32 {
    match sample {
        0 | 1 => sample as u32,
        _ if sample.is_multiple_of(2) => 1 << (sample / 2),
        _ => 3 << ((sample - 3) / 2),
    }
}

/// First block for which this sample is the nearest.
const fn first_block(sample: usize) -> u32 {
    match sample {
        0 => 0,
        _ => sample_block(sample - 1).midpoint(sample_block(sample)) + 1,
    }
}

#[cfg(test)]
mod tests;
