//! One replica as a model of discrete steps.
//!
//! A step computes one token for every sequence whose prompt is computed. It spends the rest of the
//! token budget on prompts in the order in which they came, and its duration follows from the work.
//! Scheduling follows vLLM (chunked prefill, prefix caching, preemption by recomputing). The fleet
//! asks for a step and says when it has ended.
//!
//! A second tier in the host's memory follows vLLM's `OffloadingConnector`: blocks are copied as
//! they are computed. A prompt takes up memory when its loading begins, and is computed once that
//! has ended; others go on meanwhile. Loads share one link, the first one first.

use std::collections::VecDeque;

use crate::blocks::{Blocks, CacheChanges, Slot};
use crate::flag_values::{not_negative, positive};
use crate::request::{BLOCK_TOKENS, Request};

/// What a replica is made of. The defaults stand for a model of 32 billion parameters (64 layers of
/// 5,120, eight heads of keys and values) with weights in 8 bits, on two H100 with tensor
/// parallelism. They are estimates, not measurements.
#[derive(Debug, Clone, Copy, PartialEq, clap::Args)]
pub struct Hardware {
    /// Seconds of an empty step: reading 16.5 GB of weights per GPU at 80 % of 3.35 TB/s takes 6
    /// ms; launches, scheduling and all-reduces as much.
    #[arg(long, default_value_t = 0.012, value_name = "SECONDS", value_parser = positive)]
    pub step: f64,
    /// Seconds per prompt token: 64 GFLOP at 940 TFLOP/s, a quarter of what two H100 can do in 8
    /// bits.
    #[arg(long, default_value_t = 68e-6, value_name = "SECONDS", value_parser = not_negative)]
    pub prefill: f64,
    /// Seconds per prompt token and token before it: 1.3 MFLOP (four per layer and width) at 690
    /// TFLOP/s in 16 bits.
    #[arg(long, default_value_t = 1.9e-9, value_name = "SECONDS", value_parser = not_negative)]
    pub attention: f64,
    /// Seconds per sequence and step: a token's arithmetic, most of which hides behind the reading
    /// of weights, and its sampling.
    #[arg(long, default_value_t = 50e-6, value_name = "SECONDS", value_parser = not_negative)]
    pub decode: f64,
    /// Seconds per step and token that the decoding sequences hold: 131 kB of keys and values per
    /// GPU at 80 % of 3.35 TB/s.
    #[arg(long, default_value_t = 50e-9, value_name = "SECONDS", value_parser = not_negative)]
    pub context: f64,
    /// Tokens that the KV cache holds: 105 of 160 GB are left beside weights and activations, at
    /// 262 kB a token.
    #[arg(long, default_value_t = 400_000, value_name = "TOKENS")]
    pub kv_tokens: u32,
    /// Tokens of which the host's memory holds copies; 0 for no second tier. Those last used are
    /// kept.
    #[arg(long, default_value_t = 0, value_name = "TOKENS")]
    pub host_tokens: u32,
    /// Seconds to load a token from the host's memory: 131 kB per GPU at 30 GB/s.
    #[arg(long, default_value_t = 4.4e-6, value_name = "SECONDS", value_parser = not_negative)]
    pub load: f64,
    /// Tokens that a step computes at most, as `--max-num-batched-tokens`.
    #[arg(long, default_value_t = 8192, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub budget: u32,
    /// Sequences that run at once at most, as `--max-num-seqs`.
    #[arg(long, default_value_t = 256, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub sequences: u32,
}

impl Default for Hardware {
    fn default() -> Self {
        Self {
            step: 0.012,
            prefill: 68e-6,
            attention: 1.9e-9,
            decode: 50e-6,
            context: 50e-9,
            kv_tokens: 400_000,
            host_tokens: 0,
            load: 4.4e-6,
            budget: 8192,
            sequences: 256,
        }
    }
}

#[derive(Debug)]
pub(crate) struct SimulatedEngine {
    hardware: Hardware,
    blocks: Blocks,
    /// Copies in the host's memory. Running sequences hold theirs, so that the last used stay.
    copies: Blocks,
    /// When the last load ends that has begun.
    link_free_at: f64,
    /// Sequences that have memory: those that are computed, and those that are being loaded.
    running: Vec<EngineSequence>,
    waiting: VecDeque<EngineSequence>,
    preemptions: u64,
}

#[derive(Debug)]
struct EngineSequence {
    id: usize,
    request: Request,
    /// Tokens that have been given, beyond the prompt.
    generated: u32,
    /// Tokens of prompt and answer that are computed, or are in this step.
    computed: u32,
    /// Prompt tokens that were found when the sequence was first scheduled.
    found: Option<FoundTokens>,
    slots: Vec<Slot>,
    /// Copies of its leading blocks in the host's memory.
    copies: Vec<Slot>,
    /// Index of the first block that was loaded, and when the blocks that it begins with are there.
    first_loaded: usize,
    loaded_at: f64,
}

/// Prompt tokens that need not be computed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct FoundTokens {
    /// All of them.
    pub(crate) cached: u32,
    /// Tokens that only the host's memory had.
    pub(crate) loaded: u32,
}

/// Output of a step for one request, at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepOutput {
    /// First token of the answer; this much of the prompt was found.
    FirstToken { id: usize, found: FoundTokens },
    /// Last token of the answer.
    LastToken { id: usize },
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct EngineLoad {
    pub(crate) running: u32,
    pub(crate) waiting: u32,
    pub(crate) kv_use: f64,
}

impl SimulatedEngine {
    /// Creates a replica that has just started.
    pub(crate) fn new(hardware: Hardware) -> Self {
        let [blocks, copies] = [hardware.kv_tokens, hardware.host_tokens].map(|tokens| Blocks::new(tokens / BLOCK_TOKENS));
        Self { hardware, blocks, copies, link_free_at: 0.0, running: Vec::new(), waiting: VecDeque::new(), preemptions: 0 }
    }

    pub(crate) fn add(&mut self, id: usize, request: Request) {
        self.waiting.push_back(EngineSequence {
            id,
            request,
            generated: 0,
            computed: 0,
            found: None,
            slots: Vec::new(),
            copies: Vec::new(),
            first_loaded: 0,
            loaded_at: 0.0,
        });
    }

    /// Ends the process and begins a new one, with an empty cache.
    ///
    /// Returns the requests of the old process, and whether each has had a token.
    pub(crate) fn restart(&mut self) -> Vec<(usize, bool)> {
        self.blocks.clear();
        self.copies.clear();
        self.link_free_at = 0.0;
        self.running.drain(..).chain(self.waiting.drain(..)).map(|sequence| (sequence.id, sequence.generated > 0)).collect()
    }

    /// Whether there is no work.
    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Number of preemptions.
    pub(crate) fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Load that a metrics endpoint would report at this time. Sequences that are being loaded
    /// wait.
    pub(crate) fn load(&self, now: f64) -> EngineLoad {
        let count = |of: usize| u32::try_from(of).unwrap_or(u32::MAX);
        let loading = self.running.iter().filter(|sequence| sequence.loaded_at > now).count();
        EngineLoad {
            running: count(self.running.len() - loading),
            waiting: count(self.waiting.len() + loading),
            kv_use: self.blocks.held_share(),
        }
    }

    pub(crate) fn take_cache_changes(&mut self) -> CacheChanges {
        self.blocks.changes()
    }

    /// Changes among the copies in the host's memory.
    pub(crate) fn take_copy_changes(&mut self) -> CacheChanges {
        self.copies.changes()
    }

    /// When the next sequence has been loaded; `None` if none is being loaded at this time.
    pub(crate) fn next_loaded(&self, now: f64) -> Option<f64> {
        self.running.iter().map(|sequence| sequence.loaded_at).filter(|at| *at > now).min_by(f64::total_cmp)
    }

    /// Begins a step and returns its duration, or `None` if there is nothing to compute yet.
    ///
    /// Blocks count as cached from here on, as in vLLM.
    pub(crate) fn begin_step(&mut self, now: f64) -> Option<f64> {
        let mut work = StepWork { now, budget: self.hardware.budget, seconds: self.hardware.step };
        let preempted = self.schedule_running(&mut work);
        if !preempted {
            self.schedule_waiting(&mut work);
        }
        (work.budget < self.hardware.budget).then_some(work.seconds)
    }

    pub(crate) fn end_step(&mut self) -> Vec<StepOutput> {
        let mut given = Vec::new();
        for sequence in &mut self.running {
            if sequence.computed == sequence.length() {
                sequence.generated += 1;
                let (id, found) = (sequence.id, sequence.found.unwrap_or_default());
                given.extend((sequence.generated == 1).then_some(StepOutput::FirstToken { id, found }));
                given.extend((sequence.generated >= sequence.request.output).then_some(StepOutput::LastToken { id }));
            }
        }
        for mut left in self.running.extract_if(.., |sequence| sequence.generated >= sequence.request.output) {
            left.release(&mut self.blocks, &mut self.copies);
        }
        given
    }

    /// Schedules the running sequences.
    ///
    /// `true` if a sequence had to be preempted: nothing new begins in such a step.
    fn schedule_running(&mut self, work: &mut StepWork) -> bool {
        let mut preempted = false;
        let mut index = 0;
        while index < self.running.len() && work.budget > 0 {
            let sequence = &mut self.running[index];
            let tokens = (sequence.length() - sequence.computed).min(work.budget);
            if sequence.loaded_at > work.now {
                index += 1;
            } else if sequence.extend(tokens, &mut self.blocks, &mut self.copies) {
                work.add(&self.hardware, sequence, tokens);
                index += 1;
            } else {
                preempted = true;
                self.preempt(work.now);
            }
        }
        preempted
    }

    fn schedule_waiting(&mut self, work: &mut StepWork) {
        while work.budget > 0 && self.running.len() < self.hardware.sequences as usize {
            let Some(mut sequence) = self.waiting.pop_front() else { return };
            // At least one token is computed, because its output is needed.
            let keys = &sequence.request.keys[..((sequence.length() - 1) / BLOCK_TOKENS) as usize];
            let on_gpu = self.blocks.matched(keys);
            let found = on_gpu.max(self.copies.matched(keys));
            let [cached, loaded] = [found, found - on_gpu].map(|blocks| u32::try_from(blocks).unwrap_or(0) * BLOCK_TOKENS);
            let tokens = (sequence.length() - cached).min(work.budget);
            let needed = self.blocks.unheld(&keys[..on_gpu]) + (found - on_gpu) + tokens.div_ceil(BLOCK_TOKENS) as usize;
            if needed > self.blocks.free() {
                self.waiting.push_front(sequence);
                return;
            }
            sequence.slots = keys[..found].iter().map(|key| self.blocks.take(*key)).collect();
            sequence.computed = cached;
            sequence.found.get_or_insert(FoundTokens { cached, loaded });
            sequence.first_loaded = on_gpu;
            sequence.loaded_at = self.loaded_at(&sequence.slots[..on_gpu], loaded, work.now);
            if sequence.loaded_at > work.now {
                sequence.copy(&mut self.copies);
            } else {
                sequence.extend(tokens, &mut self.blocks, &mut self.copies);
                work.add(&self.hardware, &sequence, tokens);
            }
            self.running.push(sequence);
        }
    }

    /// When a sequence has its leading blocks that begins with these and loads so many tokens now.
    fn loaded_at(&mut self, on_gpu: &[Slot], loaded: u32, now: f64) -> f64 {
        if loaded > 0 {
            self.link_free_at = self.link_free_at.max(now) + self.hardware.load * f64::from(loaded);
            // Whatever else it waits for is loaded before.
            return self.link_free_at;
        }
        // Sequences that have any block in common have all before it in common.
        let awaited = |other: &&EngineSequence| {
            let first = other.first_loaded;
            on_gpu.get(first).is_some_and(|slot| other.slots.get(first) == Some(slot))
        };
        self.running.iter().filter(awaited).map(|other| other.loaded_at).fold(0.0, f64::max)
    }

    /// Preempts the sequence that came last of those that are computed. It starts over, ahead of
    /// all waiting ones.
    fn preempt(&mut self, now: f64) {
        if let Some(last) = self.running.iter().rposition(|sequence| sequence.loaded_at <= now) {
            let mut sequence = self.running.remove(last);
            sequence.release(&mut self.blocks, &mut self.copies);
            sequence.computed = 0;
            self.preemptions += 1;
            self.waiting.push_front(sequence);
        }
    }
}

impl EngineSequence {
    /// Tokens that must be computed before the next one can be given.
    fn length(&self) -> u32 {
        self.request.prompt + self.generated
    }

    /// Takes the blocks for this many more tokens.
    ///
    /// If there are too few, takes none and returns `false`.
    fn extend(&mut self, tokens: u32, blocks: &mut Blocks, copies: &mut Blocks) -> bool {
        let end = self.computed + tokens;
        let needed = (end.div_ceil(BLOCK_TOKENS) as usize).saturating_sub(self.slots.len());
        if needed > blocks.free() {
            return false;
        }
        let full = (end / BLOCK_TOKENS) as usize;
        let open = (self.computed / BLOCK_TOKENS) as usize;
        if open < self.slots.len() && open < full {
            self.slots[open] = blocks.assign_key(self.slots[open], self.request.keys[open]);
        }
        for index in self.slots.len()..end.div_ceil(BLOCK_TOKENS) as usize {
            self.slots.push(if index < full { blocks.take(self.request.keys[index]) } else { blocks.take_unnamed() });
        }
        self.computed = end;
        self.copy(copies);
        true
    }

    /// Copies its full blocks to the host's memory, as far as others that run leave room.
    fn copy(&mut self, copies: &mut Blocks) {
        let full = (self.computed / BLOCK_TOKENS) as usize;
        for index in self.copies.len()..full.min(self.copies.len() + copies.free()) {
            self.copies.push(copies.take(self.request.keys[index]));
        }
    }

    /// Gives its blocks back, from the end.
    fn release(&mut self, blocks: &mut Blocks, copies: &mut Blocks) {
        self.slots.drain(..).rev().for_each(|slot| blocks.give_back(slot));
        self.copies.drain(..).rev().for_each(|slot| copies.give_back(slot));
    }
}

/// Beginning of a step, its remaining budget, and its time so far.
struct StepWork {
    now: f64,
    budget: u32,
    seconds: f64,
}

impl StepWork {
    /// Adds the last `tokens` computed tokens of this sequence to the step.
    fn add(&mut self, hardware: &Hardware, sequence: &EngineSequence, tokens: u32) {
        self.budget -= tokens;
        let end = f64::from(sequence.computed);
        self.seconds += if sequence.generated > 0 && tokens == 1 {
            hardware.decode + hardware.context * end
        } else {
            let tokens = f64::from(tokens);
            tokens * (hardware.prefill + hardware.attention * (end - tokens / 2.0))
        };
    }
}

#[cfg(test)]
mod tests;
