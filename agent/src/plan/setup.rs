//! Engine setup from the profile, the release and the user's own arguments: memory use, step size,
//! and cache format.
//!
//! The user's arguments come first, then the profile, then the release's defaults.

use std::time::Duration;

use hostler_api::{NAMES_FLAG, path_alias};

use super::model::{ModelFacts, ModelInfo};
use crate::config::{AgentConfig, Profile};
use crate::gpu::Gpu;
use crate::host::EngineProgram;
use crate::sizes::{GIB, scaled};
use crate::vllm::arguments::EngineArguments;
use crate::vllm::arguments::{expand_config_file, value_of};
use crate::vllm::parsers::ModelParsers;
use crate::vllm::releases::{GRAPHS_COUNTED_SINCE, LARGE_STEPS_SINCE, WINDOWS_WITH_EVENTS_SINCE};
use crate::vllm::version::VllmVersion;
use crate::vllm::{EngineTraces, FrontEndInUse};

/// Default limit of vLLM for steps with graphs, in tokens.
const DEFAULT_GRAPH_TOKENS: u32 = 512;

/// Largest step with a graph.
///
/// Larger steps take so long to compute that the time to start their kernels is hidden behind it.
const MAX_GRAPH_TOKENS: u32 = 4_096;

/// Prefixes of arguments that decide about graphs, or about something that graphs must fit.
const GRAPH_ARGUMENTS: [&str; 10] = [
    "--enforce-eager",
    "--no-enforce-eager",
    "--compilation-config",
    "-cc",
    "-O",
    "--optimization-level",
    "--cudagraph-capture-sizes",
    "--max-cudagraph-capture-size",
    "--spec",
    "-sc",
];

/// Share of a GPU that the conservative profile uses.
///
/// The rest is room for another process, or for a model that vLLM measures too small.
const CONSERVATIVE_UTILIZATION: f64 = 0.85;

const SIMULATED_STEPS: StepLimits = StepLimits { tokens: 8_192, sequences: 256 };

const CPU_STEPS: StepLimits = StepLimits { tokens: 2_048, sequences: 128 };

/// Setup of the engines of a node.
#[derive(Debug, Clone)]
pub struct EnginePlanSetup {
    pub simulated: bool,
    /// Whether somebody else runs the engines.
    pub attached: bool,
    /// Release of vLLM; unknown counts as older than every one.
    pub version: Option<VllmVersion>,
    pub profile: Profile,
    /// Model name as given.
    pub model: String,
    /// User's own arguments for the engines, including those of their `--config` file.
    pub arguments: Vec<String>,
    /// Whether the engine decides the size of a step, because of the model. See `for_model`.
    pub leaves_steps_to_engine: bool,
    /// Whether the engines send KV events.
    pub kv_events: bool,
    pub drain_timeout: Duration,
    /// Nodes of a replica.
    pub nodes: u32,
    pub traces: EngineTraces,
    /// Whether routers cannot read the model's prompts themselves.
    pub only_engine_reads_prompts: bool,
    pub(super) parsers: PlannedParsers,
}

/// A model's parsers, for each front-end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PlannedParsers {
    pub(super) python: ModelParsers,
    pub(super) rust: ModelParsers,
}

impl PlannedParsers {
    pub(super) fn without(because: &str) -> Self {
        Self { python: ModelParsers::without(because), rust: ModelParsers::without(because) }
    }

    fn simulated() -> Self {
        let parsers = ModelParsers { tools: Ok("hermes"), reasoning: Err("the simulated engine does not reason".to_owned()) };
        Self { python: parsers.clone(), rust: parsers }
    }

    pub(super) fn of(&self, front_end: FrontEndInUse) -> &ModelParsers {
        match front_end {
            FrontEndInUse::Python => &self.python,
            FrontEndInUse::Rust => &self.rust,
        }
    }
}

/// Most work in one step of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepLimits {
    /// Tokens in one step, `--max-num-batched-tokens`.
    pub tokens: u32,
    /// Requests in one step, `--max-num-seqs`.
    pub sequences: u32,
}

/// Format of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvCacheFormat {
    pub element_bytes: u64,
    /// Whether layers with a window keep only their window.
    ///
    /// Some releases cannot while they send KV events.
    pub limits_windowed_layers: bool,
}

impl EnginePlanSetup {
    /// Creates the setup from the agent's settings.
    #[must_use]
    pub fn new(engine: &EngineProgram, version: Option<VllmVersion>, config: &AgentConfig) -> Self {
        Self {
            simulated: matches!(engine, EngineProgram::Simulated { .. }),
            attached: matches!(engine, EngineProgram::Attached { .. }),
            version,
            profile: config.profile,
            model: config.model.clone(),
            arguments: expand_config_file(&config.engine_args),
            leaves_steps_to_engine: false,
            kv_events: config.kv_events,
            drain_timeout: config.drain_timeout,
            nodes: config.nodes_per_replica.max(1),
            traces: EngineTraces::Unasked,
            only_engine_reads_prompts: false,
            parsers: match engine {
                EngineProgram::Simulated { .. } => PlannedParsers::simulated(),
                EngineProgram::Vllm { .. } | EngineProgram::Attached { .. } => PlannedParsers::without("the model was not read"),
            },
        }
    }

    /// Adapts the setup to this model.
    ///
    /// A model with states has room for only so many requests, and the engine does not start if it
    /// must take more. A model that generates no text reads prompts whole, however long they are.
    #[must_use]
    pub(super) fn for_model(self, model: &ModelInfo) -> Self {
        let own_steps = model.facts().is_some_and(|facts| facts.shape.recurrent_layers > 0 || !facts.is_generative());
        Self { leaves_steps_to_engine: own_steps, ..self }
    }

    /// The second name of a model that is named by a path, if its engines get no names of the
    /// user's.
    #[must_use]
    pub fn path_alias(&self) -> Option<&str> {
        let has_own_names = self.attached || EngineArguments(&self.arguments).has(NAMES_FLAG);
        path_alias(&self.model).filter(|_| !has_own_names)
    }

    /// Whether the release is this one or a later one.
    #[must_use]
    pub fn is_at_least(&self, release: VllmVersion) -> bool {
        self.version.is_some_and(|version| version >= release)
    }

    #[must_use]
    pub fn context(&self) -> Option<u32> {
        value_of(&self.arguments, "--max-model-len").and_then(parse_human_number).filter(|tokens| *tokens > 0)
    }

    /// Share of a GPU's memory that an engine may use.
    #[must_use]
    pub fn utilization(&self) -> f64 {
        let given = value_of(&self.arguments, "--gpu-memory-utilization").and_then(|given| given.trim().parse::<f64>().ok());
        match (given, self.profile) {
            (Some(given), _) => given.clamp(0.0, 1.0),
            (None, Profile::Conservative) => CONSERVATIVE_UTILIZATION,
            (None, _) => self.default_utilization(),
        }
    }

    /// Default share of the release.
    #[must_use]
    pub fn default_utilization(&self) -> f64 {
        if self.is_at_least(GRAPHS_COUNTED_SINCE) { 0.92 } else { 0.9 }
    }

    /// Bytes of its weights that each GPU keeps in host memory, as the user set it.
    #[must_use]
    pub fn offloaded_bytes(&self) -> u64 {
        let gib = value_of(&self.arguments, "--cpu-offload-gb").and_then(|given| given.trim().parse::<f64>().ok());
        scaled(GIB, gib.unwrap_or(0.0).clamp(0.0, 100_000.0))
    }

    #[must_use]
    pub fn steps(&self, gpu: Option<&Gpu>) -> StepLimits {
        let chosen = self.profile_steps(gpu);
        let desired = chosen.unwrap_or_else(|| self.default_steps(gpu));
        let given = |flag, otherwise| value_of(&self.arguments, flag).map_or(otherwise, |value| parse_human_number(value).unwrap_or(0));
        // No step has more requests than tokens, because the engine does not start with that. The
        // user's own values are not changed.
        let least = if chosen.is_some() { given("--max-num-seqs", 0) } else { 0 };
        let tokens = given("--max-num-batched-tokens", desired.tokens.max(least));
        let most = if tokens == 0 { u32::MAX } else { tokens };
        StepLimits { tokens, sequences: given("--max-num-seqs", desired.sequences.min(most)) }
    }

    /// Step limits of the profile.
    ///
    /// `None` leaves them to the engine, as does a file or a mode of the user that may set other
    /// limits.
    #[must_use]
    pub fn profile_steps(&self, gpu: Option<&Gpu>) -> Option<StepLimits> {
        let gpu = gpu.filter(|gpu| !self.simulated && gpu.memory_bytes > 0)?;
        if self.version.is_none() || ["--config", "--performance-mode"].iter().any(|flag| value_of(&self.arguments, flag).is_some()) {
            return None;
        }
        // Prompts that are not read in parts must fit one step whole, however long they are.
        if self.leaves_steps_to_engine || EngineArguments(&self.arguments).negates("--enable-chunked-prefill") {
            return None;
        }
        let default = self.default_steps(Some(gpu));
        // 1,024 is vLLM's own value on 70 GiB and more, except on an A100. There it found larger
        // steps to be slower and says nothing of more requests. The doubled number and the latency
        // profile's are choices, not measured.
        match (self.profile, gpu.memory_bytes / GIB) {
            (Profile::Conservative, _) => None,
            (Profile::Latency, _) => Some(StepLimits { tokens: default.tokens.min(2_048), sequences: 128 }),
            (Profile::Throughput, 70..) => Some(StepLimits { sequences: 1_024, ..default }),
            (Profile::Throughput, 16..) => Some(StepLimits { tokens: 2 * default.tokens, sequences: 2 * default.sequences }),
            (Profile::Throughput, _) => None,
        }
    }

    /// Whether the user's own arguments decide what is compiled or made into graphs.
    pub(super) fn decides_about_graphs(&self) -> bool {
        let decides = |argument: &String| GRAPH_ARGUMENTS.iter().any(|beginning| argument.replace('_', "-").starts_with(beginning));
        self.arguments.iter().any(decides)
    }

    /// Largest step with a CUDA graph, in tokens, if the agent decides it.
    ///
    /// That needs a release that counts the graphs' memory, and a profile and a user that leave the
    /// steps to the agent.
    #[must_use]
    pub fn graph_tokens(&self, gpu: Option<&Gpu>) -> Option<u32> {
        if self.profile != Profile::Throughput || !self.is_at_least(GRAPHS_COUNTED_SINCE) || self.decides_about_graphs() {
            return None;
        }
        self.profile_steps(gpu)?;
        Some(self.steps(gpu).tokens.min(MAX_GRAPH_TOKENS)).filter(|tokens| *tokens > DEFAULT_GRAPH_TOKENS)
    }

    /// Default of the release. vLLM's changes for models with unusual limits are not followed.
    #[must_use]
    pub fn default_steps(&self, gpu: Option<&Gpu>) -> StepLimits {
        if self.simulated {
            return SIMULATED_STEPS;
        }
        let Some(gpu) = gpu else { return CPU_STEPS };
        let is_a100 = gpu.name.to_lowercase().contains("a100");
        let (tokens, sequences) = match gpu.memory_bytes / GIB {
            160.. if self.is_at_least(LARGE_STEPS_SINCE) => (16_384, 1_024),
            70.. if !is_a100 => (8_192, 1_024),
            _ => (2_048, 256),
        };
        let factor = if value_of(&self.arguments, "--performance-mode") == Some("throughput") { 2 } else { 1 };
        StepLimits { tokens: factor * tokens, sequences: factor * sequences }
    }

    /// Most tokens that an engine computes in one step; 0 if unknown.
    #[must_use]
    pub fn token_budget(&self, gpu: Option<&Gpu>) -> u32 {
        let in_file = value_of(&self.arguments, "--config").is_some() && value_of(&self.arguments, "--max-num-batched-tokens").is_none();
        if in_file && !self.simulated { 0 } else { self.steps(gpu).tokens }
    }

    #[must_use]
    pub fn cache_format(&self, facts: &ModelFacts) -> KvCacheFormat {
        let element_bytes = match value_of(&self.arguments, "--kv-cache-dtype") {
            Some(kind) if kind.contains("fp8") || kind.contains("int8") => 1,
            _ => facts.format.plain_bytes,
        };
        KvCacheFormat { element_bytes, limits_windowed_layers: !self.kv_events || self.is_at_least(WINDOWS_WITH_EVENTS_SINCE) }
    }
}

/// Parses a number in the format of vLLM's arguments: plain, in thousands (`8k`, `2.5k`) or in
/// 1,024s (`8K`), and so on for millions.
pub(super) fn parse_human_number(text: &str) -> Option<u32> {
    let text = text.trim();
    let (number, factor) = match text.char_indices().last()? {
        (at, 'k') => (&text[..at], 1e3),
        (at, 'm') => (&text[..at], 1e6),
        (at, 'K') => (&text[..at], f64::from(1 << 10)),
        (at, 'M') => (&text[..at], f64::from(1 << 20)),
        _ => return text.parse().ok(),
    };
    let number = number.parse::<f64>().ok()? * factor;
    // Truncated as in the engine. A number that is negative, or too large for a budget, counts as
    // none.
    format!("{:.0}", number.trunc()).parse().ok()
}

#[cfg(test)]
mod tests;
