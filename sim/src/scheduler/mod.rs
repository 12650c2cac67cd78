//! Choice of the sequences that run in the next step, and the step's results.
//!
//! It is pure state: the stepping task in `engine` supplies the time between `plan` and `commit`,
//! and nothing here waits or reads a clock.
//!
//! The rules are vLLM's in outline: running sequences first, then waiting ones in order, under a
//! token budget and a sequence limit; long prompts in chunks; the youngest sequence is preempted
//! when the cache is full. There is no priority and no speculative decoding.

mod sequence;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

pub(crate) use sequence::{Limit, Sequence};

use crate::host_tier::HostTier;
use crate::kv_events::Event;
use crate::mailbox::Finish;
use crate::prefix_cache::BlockPool;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) sequences: usize,
    pub(crate) batched_tokens: usize,
    pub(crate) block_size: usize,
    pub(crate) blocks: usize,
    /// Blocks of copies in the host's memory.
    pub(crate) host_blocks: usize,
    pub(crate) kv_events: bool,
}

/// Work of one step, which decides how long it takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Step {
    /// Prompt tokens computed.
    pub(crate) prefill_tokens: usize,
    /// Prompt tokens loaded from the host's memory.
    pub(crate) loaded_tokens: usize,
    /// Sequences that compute one generated token.
    pub(crate) decodes: usize,
}

/// Counts since the last `take_counters`, for the metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SchedulerCounters {
    pub(crate) prompt_tokens: usize,
    pub(crate) generated_tokens: usize,
    pub(crate) queried_tokens: usize,
    pub(crate) cached_tokens: usize,
    pub(crate) preemptions: usize,
    pub(crate) finished: Vec<Finish>,
}

/// All sequences of one engine.
#[derive(Debug)]
pub(crate) struct Scheduler {
    limits: Limits,
    pool: BlockPool,
    host: HostTier,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    events: Vec<Event>,
    tally: SchedulerCounters,
}

impl Scheduler {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            pool: BlockPool::new(limits.blocks),
            host: HostTier::new(limits.host_blocks),
            waiting: VecDeque::new(),
            running: Vec::new(),
            events: Vec::new(),
            tally: SchedulerCounters::default(),
        }
    }

    /// Puts a sequence at the end of the queue. The queue needs no bound of its own:
    /// each entry belongs to an open connection.
    pub(crate) fn add(&mut self, sequence: Sequence) {
        self.waiting.push_back(sequence);
    }

    pub(crate) fn running(&self) -> usize {
        self.running.len()
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn cache_usage(&self) -> f64 {
        self.pool.usage()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Chooses the work of the next step and allocates its blocks.
    pub(crate) fn plan(&mut self) -> Step {
        self.drop_cancelled();
        let mut budget = self.limits.batched_tokens;
        let preempted = self.plan_running(&mut budget);
        if !preempted {
            self.plan_waiting(&mut budget);
        }
        let mut step = Step::default();
        for sequence in &mut self.running {
            step.loaded_tokens += std::mem::take(&mut sequence.loading);
            if sequence.is_decoding() {
                step.decodes += sequence.scheduled.min(1);
            } else {
                step.prefill_tokens += sequence.scheduled;
            }
        }
        step
    }

    /// Ends the step: every sequence whose tokens are all computed gets one more.
    pub(crate) fn commit(&mut self) {
        let (pool, tally) = (&mut self.pool, &mut self.tally);
        self.running.retain_mut(|sequence| {
            sequence.computed += std::mem::take(&mut sequence.scheduled);
            if self.host.has_room() {
                copy_to_host(&mut self.host, sequence, self.limits, &mut self.events);
            }
            if sequence.computed < sequence.len() {
                return true;
            }
            if !sequence.has_generated() {
                tally.prompt_tokens += sequence.prompt_length();
            }
            tally.generated_tokens += 1;
            let Some(finish) = sequence.emit() else { return true };
            tally.finished.push(finish);
            pool.release(&sequence.blocks);
            false
        });
        self.drop_cancelled();
    }

    pub(crate) fn end_all(&mut self, finish: Finish) {
        for sequence in self.running.drain(..).chain(self.waiting.drain(..)) {
            self.pool.release(&sequence.blocks);
            sequence.end(finish);
            self.tally.finished.push(finish);
        }
    }

    /// Forgets all cached blocks, unless sequences hold some, and returns whether it did.
    ///
    /// As in vLLM, the event goes out with the next step.
    pub(crate) fn reset_cache(&mut self) -> bool {
        let cleared = self.pool.clear();
        if cleared {
            // Like a reset that includes vLLM's connectors.
            self.host.clear();
        }
        if cleared && self.limits.kv_events {
            self.events.push(Event::AllBlocksCleared);
        }
        cleared
    }

    /// KV events of the steps since the last call.
    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    pub(crate) fn take_counters(&mut self) -> SchedulerCounters {
        std::mem::take(&mut self.tally)
    }

    fn drop_cancelled(&mut self) {
        let pool = &mut self.pool;
        self.running.retain(|sequence| {
            let keep = !sequence.is_cancelled();
            if !keep {
                pool.release(&sequence.blocks);
            }
            keep
        });
        self.waiting.retain(|sequence| !sequence.is_cancelled());
    }

    /// Schedules the running sequences; `true` if one of them was preempted.
    fn plan_running(&mut self, budget: &mut usize) -> bool {
        let mut preempted = false;
        let mut index = 0;
        while index < self.running.len() && *budget > 0 {
            let tokens = self.running[index].remaining().min(*budget);
            if self.schedule_running(index, tokens) {
                *budget -= tokens;
                index += 1;
            } else {
                preempted = true;
                let mut victim = self.running.pop().expect("the loop's index is inside");
                self.pool.release(&std::mem::take(&mut victim.blocks));
                victim.restart();
                self.tally.preemptions += 1;
                self.waiting.push_front(victim);
            }
        }
        preempted
    }

    fn schedule_running(&mut self, index: usize, tokens: usize) -> bool {
        let sequence = &mut self.running[index];
        let blocks = (sequence.computed + tokens).div_ceil(self.limits.block_size);
        let missing = blocks.saturating_sub(sequence.blocks.len());
        if !self.pool.allocate(missing, &mut sequence.blocks) {
            return false;
        }
        sequence.scheduled = tokens;
        self.record_evicted();
        self.store_full_blocks(index);
        true
    }

    fn plan_waiting(&mut self, budget: &mut usize) {
        while *budget > 0 && self.running.len() < self.limits.sequences {
            let Some(mut sequence) = self.waiting.pop_front() else { return };
            if !self.admit(&mut sequence, *budget) {
                self.waiting.push_front(sequence);
                return;
            }
            *budget -= sequence.scheduled;
            self.running.push(sequence);
            self.record_evicted();
            self.store_full_blocks(self.running.len() - 1);
        }
    }

    /// Gives a waiting sequence its cached and new blocks, if they are available.
    fn admit(&mut self, sequence: &mut Sequence, budget: usize) -> bool {
        let size = self.limits.block_size;
        // The last token is always computed, because its result is the next token.
        let matchable = (sequence.len() - 1) / size;
        let matched = self.pool.matched(&sequence.hashes()[..matchable]);
        let loaded = self.host.matched(&sequence.hashes()[matched.len()..matchable]);
        let cached = (matched.len() + loaded) * size;
        let tokens = (sequence.len() - cached).min(budget);
        let missing = (cached + tokens).div_ceil(size) - matched.len();
        if missing + self.pool.idle_among(&matched) > self.pool.idle() {
            return false;
        }
        self.pool.reference(&matched);
        self.host.touch(sequence.hashes());
        let on_gpu = matched.len();
        sequence.blocks = matched;
        assert!(self.pool.allocate(missing, &mut sequence.blocks), "room was checked above");
        if sequence.start(cached, tokens) {
            self.tally.queried_tokens += sequence.prompt_length();
            self.tally.cached_tokens += cached;
        }
        // Loaded blocks are stored on the GPU like computed ones.
        (sequence.stored, sequence.loading) = (on_gpu, loaded * size);
        true
    }

    fn record_evicted(&mut self) {
        let evicted = self.pool.take_evicted();
        if self.limits.kv_events {
            self.events.extend(evicted.into_iter().map(Event::removed));
        }
    }

    /// Stores full blocks. Blocks count as stored when they are scheduled, as in vLLM.
    fn store_full_blocks(&mut self, index: usize) {
        let size = self.limits.block_size;
        let sequence = &mut self.running[index];
        let full = (sequence.computed + sequence.scheduled) / size;
        let already = sequence.stored;
        if full <= already {
            return;
        }
        sequence.stored = full;
        for position in already..full {
            self.pool.store(sequence.blocks[position], sequence.hashes()[position]);
        }
        if self.limits.kv_events {
            self.events.push(sequence.stored_event(already..full));
        }
    }
}

/// Copies a sequence's computed blocks to the host's memory, as far as they have no copies there.
fn copy_to_host(host: &mut HostTier, sequence: &mut Sequence, limits: Limits, events: &mut Vec<Event>) {
    let full = sequence.computed / limits.block_size;
    let already = sequence.copied;
    sequence.copied = full.max(already);
    for position in already..full {
        let hash = sequence.hashes()[position];
        if host.holds(hash) {
            continue;
        }
        let dropped = host.store(hash);
        if limits.kv_events {
            events.extend(dropped.map(Event::removed_from_host));
            events.push(sequence.copied_event(position));
        }
    }
}
