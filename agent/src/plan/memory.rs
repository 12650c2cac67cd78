//! Budget of a GPU's memory, and the tokens that the rest can cache.
//!
//! Arithmetic only; `layout` computes it for each size of a replica.

use std::cmp::Reverse;

use super::model::ModelFacts;
use super::setup::{EnginePlanSetup, KvCacheFormat, StepLimits};
use super::shape::ModelShape;
use super::stage::{PipelineStage, ReplicaSpread};
use crate::gpu::Gpu;
use crate::sizes::{GIB, scaled};

/// Memory for CUDA's context, the libraries' workspaces, fragmentation and CUDA graphs: 1.5 GiB.
/// This is an estimate on the safe side.
///
/// Contexts and workspaces take half to three quarters of a GiB, vLLM's graphs of small and large
/// models 0.3 to 0.8. The driver also counts half a GiB as memory of the GPU that it does not give
/// out.
const RUNTIME_BYTES: u64 = 3 * GIB / 2;

/// Buffers of NCCL and of the direct all-reduce, on each GPU of a replica with several.
const EXCHANGE_BYTES: u64 = GIB / 2;

/// A standby caches at least a twentieth of the memory, so that many short streams can go on there.
const MIN_STANDBY_CACHE_DIVISOR: u64 = 20;

/// Copies of a token's hidden state that a layer holds at once, and of its feed-forward state:
/// residual, input, attention's query, key, value and output; gate, up and their product.
const HIDDEN_COPIES: u64 = 6;
const FEED_FORWARD_COPIES: u64 = 3;

/// Bytes of one logit while the sampler works: 32 bits, twice.
const LOGIT_BYTES: u64 = 8;

/// Memory budget of one GPU, for one size of a replica; in a pipeline, of the stage with the least
/// room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryBudget {
    pub total: u64,
    pub usable: u64,
    pub weights: u64,
    /// CUDA, graphs and the exchange between GPUs.
    pub runtime: u64,
    /// Activations of one step.
    pub activations: u64,
    /// Memory left for the KV cache; 0 if none is left.
    pub cache: u64,
    /// Memory that is missing before anything could be cached.
    pub missing: u64,
    /// Layers that the GPU computes, with those that share them.
    pub stage: PipelineStage,
    tp: u64,
    /// Shape of these layers.
    shape: ModelShape,
    format: KvCacheFormat,
    step: u32,
}

impl MemoryBudget {
    /// Computes the budget of one GPU in a replica of `tp`.
    pub(super) fn new(facts: &ModelFacts, gpu: &Gpu, tp: u32, setup: &EnginePlanSetup) -> Self {
        Self::of_stage(facts, gpu, tp, PipelineStage::whole(facts.shape.layers), setup)
    }

    /// Computes the budget of one GPU of the stage with the least room in a replica over nodes.
    ///
    /// vLLM gives all stages as many blocks as the fullest one has room for.
    pub(super) fn of_fullest_stage(facts: &ModelFacts, gpu: &Gpu, spread: ReplicaSpread, setup: &EnginePlanSetup) -> Self {
        let stages = PipelineStage::divide(facts.shape.layers, spread.stages);
        let budgets = stages.map(|stage| Self::of_stage(facts, gpu, spread.tp, stage, setup));
        let room = |budget: &Self| (Reverse(budget.missing), budget.tokens_in(facts.context).unwrap_or(budget.cache));
        budgets.min_by_key(room).unwrap_or_else(|| Self::new(facts, gpu, spread.tp, setup))
    }

    fn of_stage(facts: &ModelFacts, gpu: &Gpu, tp: u32, stage: PipelineStage, setup: &EnginePlanSetup) -> Self {
        let (total, steps) = (gpu.memory_bytes, setup.steps(Some(gpu)));
        let parts = u64::from(tp);
        let usable = scaled(total, setup.utilization());
        let weights = facts.stage_bytes(&stage).div_ceil(parts).saturating_sub(setup.offloaded_bytes());
        let runtime = RUNTIME_BYTES + if tp > 1 || stage.of > 1 { EXCHANGE_BYTES } else { 0 };
        let activations = activation_bytes(facts, parts, stage, steps);
        let taken = activations.saturating_add(weights + runtime);
        Self {
            total,
            usable,
            weights,
            runtime,
            activations,
            cache: usable.saturating_sub(taken),
            missing: taken.saturating_sub(usable),
            stage,
            tp: parts,
            shape: stage.shape(&facts.shape),
            format: setup.cache_format(facts),
            step: steps.tokens,
        }
    }

    /// Budget of a standby beside the engine of this one, with room for one request of `context`
    /// tokens. Its usable memory is a whole number of hundredths, as vLLM's flag has it.
    pub(super) fn of_standby(&self, facts: &ModelFacts, steps: StepLimits, context: u32) -> Self {
        let activations = activation_bytes(facts, self.tp, self.stage, steps);
        let small = Self { activations, step: steps.tokens, missing: 0, ..self.clone() };
        let cache = small.context_bytes(u64::from(context)).max(self.total / MIN_STANDBY_CACHE_DIVISOR);
        let taken = activations.saturating_add(self.weights + self.runtime);
        let hundredths = u128::from(taken.saturating_add(cache)) * 100;
        let usable = hundredths.div_ceil(u128::from(self.total.max(1))) * u128::from(self.total) / 100;
        let usable = u64::try_from(usable).unwrap_or(u64::MAX);
        Self { usable, cache: usable.saturating_sub(taken), ..small }
    }

    /// Budget that is left beside a standby.
    pub(super) fn beside(&self, standby: &Self) -> Self {
        let cache = self.cache.saturating_sub(standby.usable);
        let missing = self.missing.saturating_add(standby.usable.saturating_sub(self.cache));
        Self { usable: self.usable.saturating_sub(standby.usable), cache, missing, ..self.clone() }
    }

    /// Bytes that one request of this many tokens takes in one GPU's cache.
    #[must_use]
    pub fn context_bytes(&self, tokens: u64) -> u64 {
        let layer = self.layer_token_bytes();
        let full = u64::from(self.shape.full_layers);
        let windowed = u64::from(self.shape.windowed_layers);
        let bytes = |layers: u64, tokens: u64| layers.saturating_mul(layer).saturating_mul(tokens);
        if !self.format.limits_windowed_layers {
            return bytes(full + windowed, tokens);
        }
        // The blocks of a window are freed once a step has passed them.
        let in_window = tokens.min(u64::from(self.shape.window) + u64::from(self.step));
        bytes(full, tokens).saturating_add(bytes(windowed, in_window))
    }

    /// Bytes that one more token of a long request takes, over all layers of one GPU.
    #[must_use]
    pub fn token_bytes(&self) -> u64 {
        let kept = if self.format.limits_windowed_layers { 0 } else { self.shape.windowed_layers };
        (u64::from(self.shape.full_layers) + u64::from(kept)).saturating_mul(self.layer_token_bytes())
    }

    /// Bytes of one token in one layer on one GPU. If more GPUs need a key or value head than there
    /// are heads, each of them keeps a copy.
    ///
    /// The same applies to latent attention.
    fn layer_token_bytes(&self) -> u64 {
        let elements = match self.shape.latent {
            Some(latent) => u64::from(latent),
            None => 2 * (u64::from(self.shape.kv_heads) / self.tp).max(1) * u64::from(self.shape.head_dim),
        };
        elements * self.format.element_bytes
    }

    /// Requests of this many tokens that the cache holds at once; `None` if nothing is cached by
    /// token.
    #[must_use]
    pub fn requests_of(&self, tokens: u64) -> Option<u64> {
        self.cache.checked_div(self.context_bytes(tokens))
    }

    /// Tokens that the cache holds, in requests of that length.
    #[must_use]
    pub fn tokens_in(&self, context: u32) -> Option<u64> {
        let each = u128::from(self.context_bytes(u64::from(context)));
        let tokens = (u128::from(self.cache) * u128::from(context)).checked_div(each)?;
        u64::try_from(tokens).ok()
    }

    /// Longest request that fits, up to `limit`.
    #[must_use]
    pub fn max_request_tokens(&self, limit: u32) -> u32 {
        let (mut fits, mut too_long) = (0_u32, limit.saturating_add(1));
        while too_long - fits > 1 {
            let middle = fits + (too_long - fits) / 2;
            if self.context_bytes(u64::from(middle)) <= self.cache { fits = middle } else { too_long = middle }
        }
        fits
    }
}

fn activation_bytes(facts: &ModelFacts, parts: u64, stage: PipelineStage, steps: StepLimits) -> u64 {
    let shape = &facts.shape;
    let token = HIDDEN_COPIES * shape.hidden + FEED_FORWARD_COPIES * shape.active / parts;
    let states = u64::from(steps.tokens).saturating_mul(token).saturating_mul(facts.format.plain_bytes);
    let logits = if stage.is_last() { u64::from(steps.sequences) * shape.vocabulary * LOGIT_BYTES } else { 0 };
    states.saturating_add(logits)
}
