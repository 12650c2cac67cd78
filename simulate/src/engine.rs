//! One replica as a model of discrete steps.
//!
//! A step computes one token for every sequence whose prompt is computed. It spends the rest of the
//! token budget on prompts in the order in which they came, and its duration follows from the work.
//! Scheduling follows vLLM (chunked prefill, prefix caching, preemption by recomputing). The model
//! knows only durations: the fleet asks for a step and says when it has ended.

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
    /// Tokens that a step computes at most, as `--max-num-batched-tokens`.
    #[arg(long, default_value_t = 8192, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub budget: u32,
    /// Sequences that run at once at most, as `--max-num-seqs`.
    #[arg(long, default_value_t = 256, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub sequences: u32,
}

impl Default for Hardware {
    fn default() -> Self {
        let (budget, sequences) = (8192, 256);
        Self { step: 0.012, prefill: 68e-6, attention: 1.9e-9, decode: 50e-6, context: 50e-9, kv_tokens: 400_000, budget, sequences }
    }
}

#[derive(Debug)]
pub(crate) struct SimulatedEngine {
    hardware: Hardware,
    blocks: Blocks,
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
    /// Prompt tokens that were cached when the sequence was first scheduled.
    cached: Option<u32>,
    slots: Vec<Slot>,
}

/// Output of a step for one request, at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepOutput {
    /// First token of the answer; this much of the prompt was cached.
    FirstToken { id: usize, cached: u32 },
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
        let blocks = Blocks::new(hardware.kv_tokens / BLOCK_TOKENS);
        Self { hardware, blocks, running: Vec::new(), waiting: VecDeque::new(), preemptions: 0 }
    }

    pub(crate) fn add(&mut self, id: usize, request: Request) {
        self.waiting.push_back(EngineSequence { id, request, generated: 0, computed: 0, cached: None, slots: Vec::new() });
    }

    /// Ends the process and begins a new one, with an empty cache.
    ///
    /// Returns the requests of the old process, and whether each has had a token.
    pub(crate) fn restart(&mut self) -> Vec<(usize, bool)> {
        self.blocks.clear();
        self.running.drain(..).chain(self.waiting.drain(..)).map(|sequence| (sequence.id, sequence.generated > 0)).collect()
    }

    /// Whether there is no work.
    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Number of preemptions.
    pub(crate) fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Load that a metrics endpoint would report.
    pub(crate) fn load(&self) -> EngineLoad {
        let count = |of: usize| u32::try_from(of).unwrap_or(u32::MAX);
        EngineLoad { running: count(self.running.len()), waiting: count(self.waiting.len()), kv_use: self.blocks.held_share() }
    }

    pub(crate) fn take_cache_changes(&mut self) -> CacheChanges {
        self.blocks.changes()
    }

    /// Begins a step and returns its duration. Blocks count as cached from here on, as in vLLM.
    pub(crate) fn begin_step(&mut self) -> f64 {
        let mut work = StepWork { budget: self.hardware.budget, seconds: self.hardware.step };
        let preempted = self.schedule_running(&mut work);
        if !preempted {
            self.schedule_waiting(&mut work);
        }
        work.seconds
    }

    pub(crate) fn end_step(&mut self) -> Vec<StepOutput> {
        let mut given = Vec::new();
        for sequence in &mut self.running {
            if sequence.computed == sequence.length() {
                sequence.generated += 1;
                let (id, cached) = (sequence.id, sequence.cached.unwrap_or(0));
                given.extend((sequence.generated == 1).then_some(StepOutput::FirstToken { id, cached }));
                given.extend((sequence.generated >= sequence.request.output).then_some(StepOutput::LastToken { id }));
            }
        }
        for left in self.running.extract_if(.., |sequence| sequence.generated >= sequence.request.output) {
            left.slots.iter().rev().for_each(|slot| self.blocks.give_back(*slot));
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
            while !self.running[index].extend(tokens, &mut self.blocks) {
                preempted = true;
                self.preempt();
                if index == self.running.len() {
                    return true;
                }
            }
            work.add(&self.hardware, &self.running[index], tokens);
            index += 1;
        }
        preempted
    }

    fn schedule_waiting(&mut self, work: &mut StepWork) {
        while work.budget > 0 && self.running.len() < self.hardware.sequences as usize {
            let Some(mut sequence) = self.waiting.pop_front() else { return };
            // At least one token is computed, because its output is needed.
            let keys = &sequence.request.keys[..((sequence.length() - 1) / BLOCK_TOKENS) as usize];
            let hits = &keys[..self.blocks.matched(keys)];
            let cached = u32::try_from(hits.len()).unwrap_or(0) * BLOCK_TOKENS;
            let tokens = (sequence.length() - cached).min(work.budget);
            let needed = self.blocks.unheld(hits) + tokens.div_ceil(BLOCK_TOKENS) as usize;
            if needed > self.blocks.free() {
                self.waiting.push_front(sequence);
                return;
            }
            sequence.slots = hits.iter().map(|key| self.blocks.take(*key)).collect();
            sequence.computed = cached;
            sequence.cached.get_or_insert(cached);
            sequence.extend(tokens, &mut self.blocks);
            work.add(&self.hardware, &sequence, tokens);
            self.running.push(sequence);
        }
    }

    /// Preempts the sequence that came last. It starts over, ahead of all waiting ones.
    fn preempt(&mut self) {
        if let Some(mut sequence) = self.running.pop() {
            sequence.slots.drain(..).rev().for_each(|slot| self.blocks.give_back(slot));
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
    fn extend(&mut self, tokens: u32, blocks: &mut Blocks) -> bool {
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
        true
    }
}

/// Remaining budget of a step, and its time so far.
struct StepWork {
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
