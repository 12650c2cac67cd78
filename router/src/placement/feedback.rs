//! Learns from a placement's outcome: the replica's speed, the length of answers, the quality of
//! the prediction. Follows one placed request until its answer has ended.

use std::sync::Arc;
use std::time::Duration;

use hostler_placement::affinity::ReplicaSlot;
use hostler_placement::block_keys::BlockKey;
use hostler_placement::rates::{FirstTokenSample, LoadSample};
use tokio::time::Instant;

use super::{PlacementDecision, Placer, Prompt};
use crate::fleet::{Fleet, InFlight, LocalLoad};
use crate::sse::TokenUsage;

/// A placed request, from its dispatch to the end of its answer.
#[derive(Debug)]
pub(crate) struct PlacementFeedback {
    placer: Arc<Placer>,
    decision: Arc<PlacementDecision>,
    local_load: Arc<LocalLoad>,
    /// The approximate prefix slot, and the blocks that were added to it, if the prompt's tokens
    /// are not known.
    approx_prefix_blocks: Option<(ReplicaSlot, Arc<[BlockKey]>)>,
    sent_at: Instant,
    first_token_at: Option<Instant>,
    /// Sequences in the engine and their tokens when the answer began.
    load_at_start: (u32, u64),
    is_stream: bool,
    /// Whether the prompt's tokens are known well enough to learn from.
    is_reliable: bool,
    max_output_tokens: Option<u64>,
}

impl PlacementFeedback {
    pub(crate) fn fleet(&self) -> &Fleet {
        &self.placer.fleet
    }

    /// The router's own number of the request, which the answer has as `x-hostler-id`.
    pub(crate) fn decision_id(&self) -> u64 {
        self.decision.id
    }

    /// Tokens of the prompt, as the router counts them.
    pub(crate) fn prompt_tokens(&self) -> u32 {
        self.decision.prompt_tokens
    }

    /// Follows the request of `decision`, which `in_flight` counts. `approx_prefix_slot` is where
    /// its text was added.
    #[must_use]
    pub(crate) fn new(
        placer: &Arc<Placer>,
        prompt: &Prompt,
        decision: Arc<PlacementDecision>,
        in_flight: &InFlight,
        approx_prefix_slot: Option<ReplicaSlot>,
    ) -> Self {
        Self {
            placer: placer.clone(),
            decision,
            local_load: in_flight.load().clone(),
            approx_prefix_blocks: approx_prefix_slot.map(|slot| (slot, prompt.text_keys().clone())),
            sent_at: Instant::now(),
            first_token_at: None,
            load_at_start: (0, 0),
            is_stream: prompt.is_stream(),
            is_reliable: !prompt.is_estimate(),
            max_output_tokens: prompt.output_bounds().most,
        }
    }

    /// Records the first byte of a successful answer's body.
    pub(crate) fn record_start(&mut self) {
        let now = Instant::now();
        self.first_token_at = Some(now);
        let took = now.duration_since(self.sent_at).as_secs_f64();
        self.load_at_start = (self.local_load.sequences(), self.local_load.context_tokens());
        // A plain answer begins only when it is complete.
        if !self.is_stream {
            return;
        }
        let choice = self.decision.decision.choice();
        if self.is_reliable {
            let sample = FirstTokenSample {
                predicted_seconds: choice.terms.first_token(),
                load_seconds: choice.terms.load,
                priced: choice.candidate.rates,
                actual_seconds: took,
                uncached: choice.uncached,
                matched: choice.candidate.matched,
                pending: choice.candidate.pending,
                in_flight: choice.candidate.in_flight,
            };
            self.local_load.learn_first_token(&sample, self.placer.fleet.view().seconds(now));
        }
        self.placer.metrics.observe_first_token(choice.terms.first_token(), took);
        self.decision.outcome.lock().first_token_seconds = Some(took);
    }

    /// Records how the answer has ended, or why no more of it came from this engine.
    pub(crate) fn record_outcome(&self, end: &'static str) {
        let mut outcome = self.decision.outcome.lock();
        outcome.end = Some(end);
        outcome.total_seconds = Some(self.sent_at.elapsed().as_secs_f64());
    }

    /// Records the longest gap in a stream: how long it was, and when it ended.
    pub(crate) fn record_gap(&self, (gap, ended_at): (Duration, Instant)) {
        if !gap.is_zero() {
            let began = ended_at.saturating_duration_since(self.sent_at).saturating_sub(gap);
            self.decision.outcome.lock().longest_gap_seconds = Some((gap.as_secs_f64(), began.as_secs_f64()));
        }
    }

    /// Learns from a complete generation, with so many tokens `seen` of a stream, on an engine with
    /// this `context` length.
    ///
    /// All callers share the learned lengths, so only a single answer (`one`) teaches, and no more
    /// than its engine could generate.
    #[allow(clippy::cast_precision_loss, reason = "token counts are far below 2^52")]
    pub(crate) fn record_end(&self, usage: Option<TokenUsage>, seen: u64, context: u64, one: bool) {
        let completion = usage.map_or(seen, |usage| usage.completion_tokens);
        let learned = completion.min(context).min(self.max_output_tokens.unwrap_or(u64::MAX));
        if learned > 0 && one {
            self.placer.output_lengths.observe(learned);
        }
        if completion > 0 {
            self.decision.outcome.lock().answer_tokens = Some(completion);
        }
        if let Some(first) = self.first_token_at.filter(|_| self.is_stream && completion > 2) {
            let now = Instant::now();
            let interval = now.duration_since(first).as_secs_f64() / (completion - 1) as f64;
            let sequences = u32::midpoint(self.load_at_start.0, self.local_load.sequences()).max(1);
            let context = u64::midpoint(self.load_at_start.1, self.local_load.context_tokens());
            self.decision.outcome.lock().between_tokens_seconds = Some(interval);
            self.local_load.learn_interval(sequences, context, interval, self.placer.fleet.view().seconds(now));
        }
        let Some(cached) = usage.and_then(|usage| usage.cached_tokens) else { return };
        let cached_tokens = u32::try_from(cached).unwrap_or(u32::MAX);
        self.learn_load(cached_tokens);
        let candidate = &self.decision.decision.choice().candidate;
        let predicted = candidate.matched;
        self.placer.metrics.record_cached_tokens(self.decision.level, candidate, cached_tokens);
        if let Some((slot, keys)) = &self.approx_prefix_blocks {
            // Convert to the unit of the approximate prefix, whose tokens are estimates.
            let cached = scale_tokens(self.decision.prompt_tokens, cached, usage.map_or(1, |usage| usage.prompt_tokens));
            self.placer.correct_approx_prefix(*slot, keys, predicted, cached);
        }
        let told = usage.map(|usage| u32::try_from(usage.prompt_tokens).unwrap_or(u32::MAX));
        let mut outcome = self.decision.outcome.lock();
        (outcome.cached_tokens, outcome.told_prompt_tokens) = (Some(cached_tokens), told);
    }

    /// Learns from a stream's first token how long loading takes, if the engine has found all that
    /// it was to load.
    fn learn_load(&self, cached_tokens: u32) {
        let choice = self.decision.decision.choice();
        let Some(first) = self.first_token_at.filter(|_| self.is_stream && self.is_reliable) else { return };
        if choice.candidate.loaded > 0 && cached_tokens >= choice.candidate.matched {
            self.local_load.learn_load(&LoadSample {
                load_seconds: choice.terms.load,
                other_seconds: choice.terms.first_token() - choice.terms.load,
                actual_seconds: first.duration_since(self.sent_at).as_secs_f64(),
                loaded: choice.candidate.loaded,
                read: choice.candidate.read,
            });
        }
    }
}

fn scale_tokens(tokens: u32, cached: u64, prompt: u64) -> u32 {
    let part = u128::from(tokens) * u128::from(cached) / u128::from(prompt.max(1));
    u32::try_from(part).map_or(tokens, |part| part.min(tokens))
}

#[cfg(test)]
mod tests;
