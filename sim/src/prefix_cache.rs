//! KV blocks of the engine: the sequences that hold them, the hash of each block, and the order in
//! which idle ones are reused.
//!
//! The pool knows hashes, not tokens. The scheduler owns it.
//!
//! It behaves like vLLM's for a consumer of KV events. An idle block keeps its hash until it is
//! needed again, least recently used first and the end of a prefix before its beginning. Two blocks
//! may carry one hash (a prompt whose length is a whole number of blocks computes its last block
//! again).

use std::collections::HashMap;

#[cfg(test)]
mod tests;

pub(crate) type BlockId = usize;

/// Pool with a fixed number of blocks.
#[derive(Debug)]
pub(crate) struct BlockPool {
    blocks: Vec<Block>,
    /// Blocks that carry each hash, the oldest first.
    by_hash: HashMap<u64, Vec<BlockId>>,
    idle: IdleList,
    evicted: Vec<u64>,
}

#[derive(Clone, Debug, Default)]
struct Block {
    hash: Option<u64>,
    references: usize,
    previous: Option<BlockId>,
    next: Option<BlockId>,
}

/// Ends of the list of unreferenced blocks, threaded through the blocks.
#[derive(Debug, Default)]
struct IdleList {
    first: Option<BlockId>,
    last: Option<BlockId>,
    length: usize,
}

impl BlockPool {
    pub(crate) fn new(capacity: usize) -> Self {
        let mut pool =
            Self { blocks: vec![Block::default(); capacity], by_hash: HashMap::new(), idle: IdleList::default(), evicted: Vec::new() };
        for block in 0..capacity {
            pool.append_idle(block);
        }
        pool
    }

    /// Unreferenced blocks, cached or not.
    pub(crate) fn idle(&self) -> usize {
        self.idle.length
    }

    /// Share of the pool that running sequences hold, from 0 to 1.
    pub(crate) fn usage(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "block counts are far below 2^52")]
        let (held, all) = ((self.blocks.len() - self.idle.length) as f64, self.blocks.len() as f64);
        held / all.max(1.0)
    }

    /// Blocks that hold the longest cached prefix of `hashes`.
    pub(crate) fn matched(&self, hashes: &[u64]) -> Vec<BlockId> {
        hashes.iter().map_while(|hash| self.by_hash.get(hash)?.first().copied()).collect()
    }

    /// Number of idle blocks among `blocks`, so that referencing them shrinks `idle`.
    pub(crate) fn idle_among(&self, blocks: &[BlockId]) -> usize {
        blocks.iter().filter(|block| self.blocks[**block].references == 0).count()
    }

    pub(crate) fn reference(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            if self.blocks[block].references == 0 {
                self.remove_idle(block);
            }
            self.blocks[block].references += 1;
        }
    }

    /// Takes `count` idle blocks into `held`, or none if there are fewer.
    ///
    /// A cached block that is taken loses its hash, which `take_evicted` then reports.
    #[must_use]
    pub(crate) fn allocate(&mut self, count: usize, held: &mut Vec<BlockId>) -> bool {
        if count > self.idle.length {
            return false;
        }
        for _ in 0..count {
            let block = self.idle.first.expect("the list is as long as its count");
            self.remove_idle(block);
            self.forget(block);
            self.blocks[block].references = 1;
            held.push(block);
        }
        true
    }

    /// Gives a block its hash, once it is full.
    pub(crate) fn store(&mut self, block: BlockId, hash: u64) {
        debug_assert!(self.blocks[block].hash.is_none(), "a block is stored once");
        self.blocks[block].hash = Some(hash);
        self.by_hash.entry(hash).or_default().push(block);
    }

    /// Returns the blocks of one sequence, given in the order of their tokens.
    pub(crate) fn release(&mut self, blocks: &[BlockId]) {
        for &block in blocks.iter().rev() {
            self.blocks[block].references -= 1;
            if self.blocks[block].references == 0 {
                self.append_idle(block);
            }
        }
    }

    /// Takes the hashes removed since the last call, one for each block that carried one.
    pub(crate) fn take_evicted(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.evicted)
    }

    /// Removes the hashes of all blocks, if all are idle; `false` if they are not.
    pub(crate) fn clear(&mut self) -> bool {
        let all_idle = self.idle.length == self.blocks.len();
        if all_idle {
            self.by_hash.clear();
            for block in &mut self.blocks {
                block.hash = None;
            }
        }
        all_idle
    }

    fn forget(&mut self, block: BlockId) {
        let Some(hash) = self.blocks[block].hash.take() else { return };
        if let Some(carriers) = self.by_hash.get_mut(&hash) {
            carriers.retain(|carrier| *carrier != block);
            if carriers.is_empty() {
                self.by_hash.remove(&hash);
            }
        }
        self.evicted.push(hash);
    }

    fn append_idle(&mut self, block: BlockId) {
        let last = self.idle.last.replace(block);
        self.blocks[block].previous = last;
        self.blocks[block].next = None;
        match last {
            Some(last) => self.blocks[last].next = Some(block),
            None => self.idle.first = Some(block),
        }
        self.idle.length += 1;
    }

    fn remove_idle(&mut self, block: BlockId) {
        let (previous, next) = (self.blocks[block].previous.take(), self.blocks[block].next.take());
        match previous {
            Some(previous) => self.blocks[previous].next = next,
            None => self.idle.first = next,
        }
        match next {
            Some(next) => self.blocks[next].previous = previous,
            None => self.idle.last = previous,
        }
        self.idle.length -= 1;
    }
}
