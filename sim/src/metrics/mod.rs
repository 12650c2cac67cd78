//! The engine's metrics under vLLM's names and labels. As in vLLM, gauges are set
//! once a step, so they freeze when the engine hangs. `text` writes them; the
//! stepping task and the admission of requests set them.

#[cfg(test)]
mod tests;
mod text;

use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) use text::render;

use crate::mailbox::Finish;
use crate::scheduler::{Scheduler, Step};

/// Upper bounds of `vllm:iteration_tokens_total`, without the last one (+Inf).
pub(crate) const ITERATION_BUCKETS: [u64; 13] = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];

/// The reasons of `vllm:request_success_total`, in vLLM's order.
pub(crate) const FINISH_REASONS: [&str; 5] = ["stop", "length", "abort", "error", "repetition"];

/// All values. Readers see each value separately, not a consistent set.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    running: AtomicU64,
    waiting: AtomicU64,
    /// Cache usage from 0 to 1, as the bits of an `f64`.
    cache_usage: AtomicU64,
    queried_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    preemptions: AtomicU64,
    prompt_tokens: AtomicU64,
    generated_tokens: AtomicU64,
    rejections: AtomicU64,
    finished: [AtomicU64; FINISH_REASONS.len()],
    iterations: [AtomicU64; ITERATION_BUCKETS.len() + 1],
    iteration_tokens: AtomicU64,
    /// Level of the sleep; 0 when awake.
    sleep_level: AtomicU64,
}

impl Metrics {
    /// Records the changes of a step. `step` is its work, or `None` if sequences ended without one.
    pub(crate) fn record(&self, scheduler: &mut Scheduler, step: Option<Step>) {
        let tally = scheduler.take_counters();
        set(&self.running, scheduler.running());
        set(&self.waiting, scheduler.waiting());
        self.cache_usage.store(scheduler.cache_usage().to_bits(), Ordering::Relaxed);
        add(&self.queried_tokens, tally.queried_tokens);
        add(&self.cached_tokens, tally.cached_tokens);
        add(&self.preemptions, tally.preemptions);
        add(&self.prompt_tokens, tally.prompt_tokens);
        add(&self.generated_tokens, tally.generated_tokens);
        for finish in tally.finished {
            add(&self.finished[reason_index(finish)], 1);
        }
        if step.is_some() {
            // vLLM counts the prompts that became complete and the tokens generated.
            let tokens = tally.prompt_tokens + tally.generated_tokens;
            let bucket = ITERATION_BUCKETS.iter().position(|bound| tokens as u64 <= *bound);
            add(&self.iterations[bucket.unwrap_or(ITERATION_BUCKETS.len())], 1);
            add(&self.iteration_tokens, tokens);
        }
    }

    /// Records the level at which the engine sleeps; 0 when awake.
    pub(crate) fn record_sleep(&self, level: u8) {
        set(&self.sleep_level, level.into());
    }

    pub(crate) fn record_rejection(&self) {
        add(&self.rejections, 1);
    }
}

fn reason_index(finish: Finish) -> usize {
    let found = FINISH_REASONS.iter().position(|reason| *reason == finish.as_str());
    found.expect("every finish has its reason in the list")
}

fn set(gauge: &AtomicU64, value: usize) {
    gauge.store(value as u64, Ordering::Relaxed);
}

fn add(counter: &AtomicU64, value: usize) {
    counter.fetch_add(value as u64, Ordering::Relaxed);
}
