//! Rules that turn an engine's observations into findings.
//!
//! Rules are pure: each looks at the last minute and returns at most one finding.
//!
//! Most rules count the seconds in which a sign was seen. A finding appears when the sign was there
//! for half of the last minute, so a burst is no finding. It goes when the sign was there for less
//! than a sixth, so a finding near the threshold does not flap. An idle engine shows no sign.
//! Findings about how the engine was started stand from its first half minute of work until its
//! life ends.

use super::window::{EngineSetup, Observation, RuntimeFacts, WINDOW_SECONDS, Window};

/// A finding appears when this many seconds of the last minute show its sign.
const SECONDS_TO_RAISE: usize = 30;

/// A finding goes when fewer seconds than this show its sign.
const SECONDS_TO_CLEAR: usize = 10;

/// A cache with a smaller free share may be what requests wait for.
///
/// At 10 % there is room for ten times the batch.
const MIN_FREE_KV_SHARE: f64 = 0.10;

/// Shorter queue times are no reason for a larger batch: even on an idle engine, each request waits
/// for the running step.
const MIN_QUEUE_SECONDS: f64 = 0.1;

/// Preemptions in a minute that make a finding: one in ten seconds. Fewer belong to short bursts.
const MIN_PREEMPTIONS: u64 = 6;

/// A finding needs at least one preemption in this many requests that ended meanwhile.
///
/// Among thousands of requests, a few preemptions do not matter.
const MAX_REQUESTS_PER_PREEMPTION: u64 = 100;

/// Share of a core from which a front-end counts as saturated.
///
/// Python computes on one core at a time; the rest of the core's time goes to waiting for the lock
/// and the socket.
const SATURATED_CORE_SHARE: f32 = 0.90;

/// Guided requests are blamed when tokens are this many times farther apart than without them.
///
/// Batches of one size class differ by at most a factor of two in size, and by much less in time.
const SLOWDOWN_TO_RAISE: f64 = 1.5;

/// The finding stands while tokens are at least this many times farther apart.
const SLOWDOWN_TO_CLEAR: f64 = 1.25;

/// Requests needed before the usual size is known.
const MIN_REQUESTS: u64 = 200;

/// A limit this many times above actual use is far too high.
const EXCESS_FACTOR: u64 = 4;

/// Kinds of findings, the gravest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FindingKind {
    /// An adapter that an operator had loaded could not be loaded again.
    Adapter,
    /// A GPU's clocks are held down.
    Throttled,
    /// Requests are pushed out of the batch and computed again.
    Preemptions,
    /// The front-end computes all the time.
    FrontEnd,
    /// Requests wait although there is memory for them.
    BatchLimit,
    /// Requests wait for their grammar, or make each step slow.
    GuidedDecoding,
    /// The engine neither compiles nor uses CUDA graphs.
    Eager,
    /// A small model is spread over GPUs that are slow to reach each other.
    TensorParallel,
    /// A single request may take most of the cache, and no request needs that much.
    Context,
}

impl FindingKind {
    pub const ALL: [Self; 9] = [
        Self::Adapter,
        Self::Throttled,
        Self::Preemptions,
        Self::FrontEnd,
        Self::BatchLimit,
        Self::GuidedDecoding,
        Self::Eager,
        Self::TensorParallel,
        Self::Context,
    ];

    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Adapter => "adapter",
            Self::Throttled => "throttled",
            Self::Preemptions => "preemptions",
            Self::FrontEnd => "front_end",
            Self::BatchLimit => "batch_limit",
            Self::GuidedDecoding => "guided_decoding",
            Self::Eager => "eager",
            Self::TensorParallel => "tensor_parallel",
            Self::Context => "context",
        }
    }
}

/// Something that slows an engine down, or that the engine does not serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub kind: FindingKind,
    pub evidence: String,
    pub advice: String,
}

struct RuleInput<'a> {
    window: &'a Window,
    setup: &'a EngineSetup,
    facts: &'a RuntimeFacts,
}

/// Findings about an engine, the gravest first. `standing` are the findings of a second ago.
pub(crate) fn evaluate_rules(window: &Window, setup: &EngineSetup, facts: &RuntimeFacts, standing: &[FindingKind]) -> Vec<Finding> {
    let case = RuleInput { window, setup, facts };
    let finding = |kind: FindingKind| {
        let stands = standing.contains(&kind);
        let (evidence, advice) = match kind {
            FindingKind::Adapter => case.adapter(),
            FindingKind::Throttled => case.throttled(stands),
            FindingKind::Preemptions => case.preemptions(stands),
            FindingKind::FrontEnd => case.front_end(stands),
            FindingKind::BatchLimit => case.batch_limit(stands),
            FindingKind::GuidedDecoding => case.guided_decoding(stands),
            FindingKind::Eager => case.eager(),
            FindingKind::TensorParallel => case.tensor_parallel(),
            FindingKind::Context => case.context(),
        }?;
        Some(Finding { kind, evidence, advice })
    };
    FindingKind::ALL.into_iter().filter_map(finding).collect()
}

/// Evidence and advice.
type Advice = Option<(String, String)>;

fn is_sustained(seconds: usize, stands: bool) -> bool {
    seconds >= if stands { SECONDS_TO_CLEAR } else { SECONDS_TO_RAISE }
}

impl RuleInput<'_> {
    fn adapter(&self) -> Advice {
        let lost = &self.facts.lost_adapters;
        let first = &lost.first()?.name;
        let named: Vec<String> = lost.iter().map(|adapter| format!("{} ({})", adapter.name, adapter.path)).collect();
        let evidence = format!(
            "the engine has started again and could not load what operators had loaded: {}; the agent's log says why",
            named.join(", ")
        );
        let advice =
            format!("`hostler lora load {first} PATH` with the path where it is now, or `hostler lora unload {first}` to do without");
        Some((evidence, advice))
    }

    fn throttled(&self, stands: bool) -> Advice {
        let seconds = self.window.observations_with(|seen| seen.is_busy() && seen.gpus.iter().any(is_throttled));
        let count = seconds.clone().count();
        if !is_sustained(count, stands) {
            return None;
        }
        let gpu = seconds.last()?.gpus.iter().find(|gpu| is_throttled(gpu))?;
        // Some GPUs may not have reported.
        let known = self.setup.gpus.iter().find(|known| known.uuid == gpu.uuid);
        let name = known.map_or_else(|| gpu.uuid.clone(), |known| format!("GPU {}", known.index));
        let mut now = Vec::new();
        now.extend(gpu.sm_mhz.map(|mhz| format!("{mhz} MHz")));
        now.extend(gpu.celsius.map(|celsius| format!("{celsius} °C")));
        now.extend(gpu.watts.map(|watts| format!("{watts:.0} W")));
        let reasons = throttle_reasons(gpu).collect::<Vec<_>>().join(", ");
        let evidence =
            format!("the clocks of {name} were held down in {count} of the last {WINDOW_SECONDS} s: {reasons} ({})", now.join(", "));
        let advice = if throttle_reasons(gpu).any(|reason| reason.contains("administrator")) {
            "no flag of the engine helps: ask for the usual clocks (`nvidia-smi --reset-applications-clocks`, as root)"
        } else {
            "no flag of the engine helps: look at this node's cooling and power, or keep work away from it with `hostler drain`"
        };
        Some((evidence, advice.to_owned()))
    }

    fn preemptions(&self, stands: bool) -> Advice {
        let preempted = self.window.counter_increase(|figures| figures.preemptions);
        let ended = self.window.finished_requests();
        let enough = if stands { preempted > 0 } else { preempted >= MIN_PREEMPTIONS && preempted * MAX_REQUESTS_PER_PREEMPTION >= ended };
        if !enough {
            return None;
        }
        let busy = self.window.metrics().filter(|figures| figures.kv_use > 0.5);
        let (most, fullest) = busy.fold((0, 0.0_f64), |(most, fullest), now| (most.max(now.running), fullest.max(now.kv_use)));
        let evidence = format!(
            "requests were pushed out of the batch {preempted} times in the last {WINDOW_SECONDS} s, to be computed again: the KV cache was {:.0} % full with \
             {most} of them running",
            fullest * 100.0
        );
        // A batch that fitted most of the time is smaller than the largest one tried.
        let lower = (most > 1).then(|| format!("lower --max-num-seqs to about {}", u64::from(most) * 8 / 10));
        let memory = if self.setup.gpus.is_empty() {
            "give the KV cache more memory (VLLM_CPU_KVCACHE_SPACE)"
        } else {
            "give the KV cache more: --gpu-memory-utilization nearer to 1, --kv-cache-dtype fp8 (a little less exact), or more GPUs for each \
             replica (--tp)"
        };
        let advice = lower.map_or_else(|| memory.to_owned(), |lower| format!("{lower}, or {memory}"));
        Some((evidence, advice))
    }

    fn front_end(&self, stands: bool) -> Advice {
        if self.setup.simulated || !self.facts.python {
            return None;
        }
        let seconds =
            self.window.observations_with(|seen| seen.is_busy() && seen.front_end_cpu.is_some_and(|share| share >= SATURATED_CORE_SHARE));
        let count = seconds.clone().count();
        if !is_sustained(count, stands) {
            return None;
        }
        let most = seconds.filter_map(|seen| seen.front_end_cpu).fold(0.0, f32::max);
        let rate = self.window.counter_increase(|figures| figures.generation_tokens) / self.window.observed_seconds();
        let evidence = format!(
            "the Python front-end used up to {most:.2} of a core, and it cannot use much more than one, in {count} of the last {WINDOW_SECONDS} s, at {rate} \
             tokens/s: the engine waits for it"
        );
        let because = match self.setup.python_front_end_reason.as_str() {
            "" => "it did not start",
            because => because,
        };
        let mut ways = vec![format!("--front-end rust (about a quarter of the CPU for each event; not in use here: {because})")];
        match self.setup.flag_value("--stream-interval") {
            Some(interval) if interval > 1 => {}
            _ => ways.push("--stream-interval 4 (fewer events, each of more tokens)".to_owned()),
        }
        // Each front-end process knows only the adapters that it was told to load.
        if !self.setup.has_flag("--enable-lora") {
            ways.push(format!("--api-server-count {}", self.setup.flag_value("--api-server-count").unwrap_or(1) + 1));
        }
        Some((evidence, ways.join(", or ")))
    }

    fn batch_limit(&self, stands: bool) -> Advice {
        let sign = |seen: &Observation| {
            let deferred = seen.details.map_or(0, |details| details.deferred);
            seen.metrics.is_some_and(|figures| figures.waiting > deferred && figures.kv_use < MIN_FREE_KV_SHARE)
        };
        let seconds = self.window.observations_with(sign);
        let count = seconds.clone().count();
        if !is_sustained(count, stands) {
            return None;
        }
        let figures = seconds.filter_map(|seen| seen.metrics);
        let (mut waiting, mut running, mut fullest) = (0, 0, 0.0_f64);
        for figures in figures {
            waiting += u64::from(figures.waiting);
            running = running.max(figures.running);
            fullest = fullest.max(figures.kv_use);
        }
        let queue_seconds = self.window.mean_queue_seconds();
        if queue_seconds.is_some_and(|seconds| seconds < MIN_QUEUE_SECONDS) {
            return None;
        }
        let waited = queue_seconds.map(|seconds| format!(", each {seconds:.1} s")).unwrap_or_default();
        let evidence = format!(
            "{} requests waited on average{waited}, in {count} of the last {WINDOW_SECONDS} s, while {running} ran and the KV cache was at most {:.1} % full",
            waiting.div_ceil(count as u64),
            fullest * 100.0
        );
        let advice = match self.setup.flag_value("--max-num-seqs") {
            // The batch had its full size.
            Some(limit) if u64::from(running) >= limit => format!("raise --max-num-seqs (now {limit}), to {}", limit * 2),
            // The batch was below its full size, so the steps were full of prompts.
            Some(_) => match self.setup.flag_value("--max-num-batched-tokens") {
                Some(limit) => format!("raise --max-num-batched-tokens (now {limit}), to {}", limit * 2),
                None => "raise --max-num-batched-tokens".to_owned(),
            },
            None => format!("raise --max-num-seqs if its limit is near {running}, else --max-num-batched-tokens"),
        };
        Some((evidence, advice))
    }

    /// Either cost of guided decoding: compiling a grammar before a request may run, or following
    /// it in each step.
    fn guided_decoding(&self, stands: bool) -> Advice {
        self.compiling_grammars(stands).or_else(|| self.slow_steps(stands))
    }

    /// Guided requests delay the tokens of the whole batch.
    ///
    /// Compares seconds of one life with batches of one size.
    fn slow_steps(&self, stands: bool) -> Advice {
        let (seconds, with, without) = self.window.guided_gaps();
        let factor = if stands { SLOWDOWN_TO_CLEAR } else { SLOWDOWN_TO_RAISE };
        if !is_sustained(seconds, stands) || with < without * factor {
            return None;
        }
        let most = self.window.observations_with(|seen| seen.guided > 0).map(|seen| seen.guided).max().unwrap_or(0);
        let evidence = format!(
            "with up to {most} requests that follow a schema or grammar, tokens were {:.1} ms apart in {seconds} of the last {WINDOW_SECONDS} s; without them, at \
             batches of that size, {:.1} ms",
            with * 1e3,
            without * 1e3
        );
        let advice = "give the engine more CPU cores, try another backend (--structured-outputs-config.backend), use simpler schemas, or keep such requests \
                      on replicas of their own";
        Some((evidence, advice.to_owned()))
    }

    /// Requests wait for a grammar to compile. vLLM reports requests that wait for something other
    /// than room, but not for what.
    ///
    /// If neither adapters nor block transfers are in use, the grammar is the only reason left.
    fn compiling_grammars(&self, stands: bool) -> Advice {
        if self.setup.has_flag("--enable-lora") || self.setup.has_flag("--kv-transfer-config") {
            return None;
        }
        let seconds = self.window.observations_with(|seen| seen.details.is_some_and(|details| details.deferred > 0));
        let count = seconds.clone().count();
        if !is_sustained(count, stands) {
            return None;
        }
        let most = seconds.filter_map(|seen| seen.details).map(|details| details.deferred).max().unwrap_or(0);
        let evidence =
            format!("up to {most} requests at once waited for their grammar to be compiled, in {count} of the last {WINDOW_SECONDS} s");
        let advice = "send the same JSON schemas again instead of a new one with each request (compiled ones are kept), give the engine more CPU cores, or \
                      use simpler schemas";
        Some((evidence, advice.to_owned()))
    }

    fn eager(&self) -> Advice {
        let given = self.setup.has_flag("--enforce-eager");
        // On a CPU there are no graphs to lose.
        if self.setup.gpus.is_empty() || !(given || self.facts.eager) || !self.has_worked() {
            return None;
        }
        let evidence = "the engine runs without CUDA graphs and compiled kernels: in every step the CPU launches each kernel by itself";
        let advice = if given { "drop --enforce-eager" } else { "give it no compilation settings that turn graphs off (see its log)" };
        Some((evidence.to_owned(), advice.to_owned()))
    }

    fn tensor_parallel(&self) -> Advice {
        let [first, _, ..] = &self.setup.gpus[..] else { return None };
        let weights = self.setup.weights_bytes?;
        // The other half is for the KV cache and the engine itself.
        if self.setup.has_nvlink_mesh || weights == 0 || weights * 2 > first.memory_bytes || !self.has_worked() {
            return None;
        }
        let count = self.setup.gpus.len();
        let evidence = format!(
            "the model's {} of weights fit one {} of {}, and its {count} GPUs are not joined by NVLink: every layer waits for PCIe twice",
            gib(weights),
            first.name,
            gib(first.memory_bytes)
        );
        Some((evidence, format!("--tp 1: {count} replicas of one GPU each, between which requests are spread")))
    }

    /// The context limit is far above what requests use.
    ///
    /// A high limit costs nothing by itself, because blocks are taken as they are needed. It
    /// matters if so few requests of full length fit that one stray request pushes the others out
    /// of the cache.
    fn context(&self) -> Advice {
        let details = self.window.details.filter(|details| details.requests >= MIN_REQUESTS)?;
        let limit = self.facts.max_model_len.filter(|limit| *limit > 0)?;
        let cache = self.facts.kv_tokens.or_else(|| self.window.kv_tokens()).filter(|tokens| *tokens > 0)?;
        let longest = details.longest_prompt? + details.longest_answer?;
        if cache >= limit * EXCESS_FACTOR || longest * EXCESS_FACTOR > limit || !self.has_worked() {
            return None;
        }
        let evidence = format!(
            "none of {} requests was longer than {longest} tokens, but one may take {limit} of the KV cache's {cache} tokens and push the others out",
            details.requests
        );
        Some((evidence, format!("--max-model-len {}", (longest * 2).next_power_of_two().min(limit))))
    }

    fn has_worked(&self) -> bool {
        self.window.busy_seconds as usize >= SECONDS_TO_RAISE
    }
}

/// Why a GPU's clocks are held down, except for the power limit, which is normal at full load.
fn throttle_reasons(gpu: &crate::gpu::GpuReading) -> impl Iterator<Item = &'static str> + '_ {
    gpu.throttled.iter().copied().filter(|reason| *reason != "power limit")
}

fn is_throttled(gpu: &crate::gpu::GpuReading) -> bool {
    throttle_reasons(gpu).next().is_some()
}

#[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests;
