//! Flags of an engine: those that the agent gives, those that are this release's defaults already,
//! and those that the user has given, each with its reason.
//!
//! A flag unknown to the release is not given: it would cost an engine thirteen seconds and its
//! life.

use hostler_api::NAMES_FLAG;

use super::file_cache::FilePoolPlan;
use super::host_cache::{HostCacheShare, TRANSFER_FLAG};
use super::setup::EnginePlanSetup;
use super::standby::{MemoryPart, StandbyMemory};
use crate::config::Profile;
use crate::gpu::Gpu;
use crate::vllm::arguments::EngineArguments;
use crate::vllm::flag::{EXECUTOR_FLAG, FlagChoice, FlagOrigin, SCALE_OUT_FLAG};
use crate::vllm::parsers::{ModelParsers, REASONING_PARSER_FLAG, TOOL_PARSER_FLAG};
use crate::vllm::releases::{
    ASYNC_AUTO_SINCE, ASYNC_SINCE, ASYNC_STAGES_SINCE, PERFORMANCE_MODE_SINCE, QUEUE_LIMIT_SINCE, SCALE_OUT_SINCE, SHUTDOWN_TIMEOUT_SINCE,
    STREAM_INTERVAL_SINCE,
};
use crate::vllm::traces::TRACES_FLAG;
use crate::vllm::{EngineTraces, FrontEndInUse};

/// Minimum queue limit. A lower one would refuse bursts that a single replica can well hold.
const MIN_QUEUE_LIMIT: u64 = 256;

/// Compilation that leaves the model's code as it is.
const UNCOMPILED: &str = "{\"mode\":3,\"backend\":\"eager\"}";

/// Flags with which the user decides about parsers of calls, in place of the agent.
const TOOL_FLAGS: [&str; 2] = ["--enable-auto-tool-choice", "--tool-parser-plugin"];

/// Flags with which the user decides about parsers of reasoning.
const REASONING_FLAGS: [&str; 3] = ["--reasoning-parser-plugin", "--reasoning-config", "--structured-outputs-config"];

/// Context for the flags of one replica, besides the setup.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReplicaContext<'a> {
    pub(super) gpu: Option<&'a Gpu>,
    pub(super) tp: u32,
    /// Stages of the pipeline.
    pub(super) stages: u32,
    pub(super) memory: MemoryPart<'a>,
    /// Shorter context used because the model's own does not fit.
    pub(super) shortened_context: Option<u32>,
    pub(super) front_end: FrontEndInUse,
    /// Its copies in the host's memory, if it keeps some.
    pub(super) host_cache: Option<&'a HostCacheShare>,
    /// Its files, if it keeps some.
    pub(super) files: Option<&'a FilePoolPlan>,
    /// There is room for a separate process around the model.
    pub(super) has_workers: bool,
}

/// Flags of one replica, in the order of the command line.
pub(super) fn choose_flags(setup: &EnginePlanSetup, place: &ReplicaContext<'_>) -> Vec<FlagChoice> {
    if setup.attached {
        return Vec::new();
    }
    let mut list = FlagList { given: EngineArguments(&setup.arguments), choices: Vec::new() };
    if let Some(alias) = setup.path_alias() {
        let names = format!("{} {alias}", setup.model);
        list.add(NAMES_FLAG, names, FlagOrigin::Hostler, "clients may name the model by the last part of its path");
    }
    if !setup.simulated {
        add_shutdown_flags(&mut list, setup);
    }
    if !setup.simulated {
        add_division_flags(&mut list, place);
    }
    if place.gpu.is_none() && !setup.simulated {
        add_cpu_flags(&mut list, setup, place);
    }
    if let Some(gpu) = place.gpu.filter(|_| !setup.simulated) {
        add_memory_flags(&mut list, setup, place);
        if let Some(share) = place.host_cache {
            let because = "what has left the GPU is loaded from the host's memory instead of computed again";
            list.add(
                TRANSFER_FLAG,
                share.transfer_config(&place.files.map(FilePoolPlan::tier_config).unwrap_or_default()),
                FlagOrigin::Hostler,
                because,
            );
        }
        match place.memory {
            MemoryPart::Standby(standby) => {
                add_standby_flags(&mut list, standby);
                add_scheduling_flags(&mut list, setup, place.stages);
            }
            MemoryPart::Alone | MemoryPart::BesideStandby(_) => {
                add_step_flags(&mut list, setup, gpu, place.front_end);
                add_scheduling_flags(&mut list, setup, place.stages);
                add_graph_flags(&mut list, setup, gpu);
                add_executor_flag(&mut list, setup, place);
            }
        }
    }
    add_parser_flags(&mut list, setup.parsers.of(place.front_end));
    add_reporting_flags(&mut list);
    add_rendering_flag(&mut list, setup, place.front_end);
    add_traces_flag(&mut list, setup, place.front_end);
    list.choices
}

/// Collector of flags; a flag that the user gave stays unchanged.
struct FlagList<'a> {
    given: EngineArguments<'a>,
    choices: Vec<FlagChoice>,
}

impl FlagList<'_> {
    fn add(&mut self, flag: &'static str, value: impl Into<String>, origin: FlagOrigin, because: impl Into<String>) {
        let choice = match self.given.display_value(flag) {
            Some(given) => FlagChoice { flag, value: given, origin: FlagOrigin::User, because: "you gave it after `--`".to_owned() },
            None => FlagChoice { flag, value: value.into(), origin, because: because.into() },
        };
        self.choices.push(choice);
    }
}

fn add_shutdown_flags(list: &mut FlagList<'_>, setup: &EnginePlanSetup) {
    if setup.is_at_least(SHUTDOWN_TIMEOUT_SINCE) {
        let seconds = setup.drain_timeout.as_secs().to_string();
        // A batch system may send SIGTERM to engine and agent at the same time.
        list.add(
            "--shutdown-timeout",
            seconds,
            FlagOrigin::Hostler,
            "running answers finish when the engine is told to stop, as long as agent.drain_timeout",
        );
    }
}

/// Adds flags for engines on CPU. On two CPUs, vLLM 0.32 compiled a small model for more than ten
/// minutes before it served.
fn add_cpu_flags(list: &mut FlagList<'_>, setup: &EnginePlanSetup, place: &ReplicaContext<'_>) {
    if setup.decides_about_graphs() {
        return;
    }
    if place.stages > 1 {
        // In eager mode vLLM 0.32 fails its first request (an assertion in gpu_model_runner.py).
        list.add("--compilation-config", UNCOMPILED, FlagOrigin::Hostler, "on a CPU, compiling the model takes minutes");
    } else {
        let because = "on a CPU, compiling the model takes minutes; `-- --no-enforce-eager` has it compiled";
        list.add("--enforce-eager", "", FlagOrigin::Hostler, because);
    }
}

fn add_division_flags(list: &mut FlagList<'_>, place: &ReplicaContext<'_>) {
    if place.tp > 1 {
        list.add("--tensor-parallel-size", place.tp.to_string(), FlagOrigin::Hostler, "the GPUs of one replica, see the layout");
    }
    if place.stages > 1 {
        list.add(
            "--pipeline-parallel-size",
            place.stages.to_string(),
            FlagOrigin::Hostler,
            "stages of the model, one after another over the nodes",
        );
    }
}

fn add_memory_flags(list: &mut FlagList<'_>, setup: &EnginePlanSetup, place: &ReplicaContext<'_>) {
    // A standby has a context of its own.
    let shortened = place.shortened_context.filter(|_| !matches!(place.memory, MemoryPart::Standby(_)));
    if let Some(tokens) = shortened {
        list.add(
            "--max-model-len",
            tokens.to_string(),
            FlagOrigin::Hostler,
            "the model's own context does not fit; the engine would not start with it",
        );
    }
    let (origin, because) = match (place.memory, setup.profile) {
        (MemoryPart::Standby(_), _) => (FlagOrigin::Hostler, "the weights, and a cache for one context; the other engine has the rest"),
        (MemoryPart::BesideStandby(_), _) => (FlagOrigin::Hostler, "the standby has the rest, see the layout"),
        (MemoryPart::Alone, Profile::Conservative) => (FlagOrigin::Hostler, "leaves memory for what vLLM does not count"),
        (MemoryPart::Alone, _) => (FlagOrigin::Engine, "the rest is for CUDA and what vLLM does not count"),
    };
    list.add("--gpu-memory-utilization", place.memory.utilization(setup).to_string(), origin, because);
}

fn add_standby_flags(list: &mut FlagList<'_>, standby: &StandbyMemory) {
    let mut add = |flag, value: u32, because| list.add(flag, value.to_string(), FlagOrigin::Hostler, because);
    add("--max-model-len", standby.context, "a standby holds one context of this length");
    add("--max-num-seqs", standby.steps.sequences, "small steps leave memory to the other engine");
    add("--max-num-batched-tokens", standby.steps.tokens, "small steps leave memory to the other engine");
}

fn add_step_flags(list: &mut FlagList<'_>, setup: &EnginePlanSetup, gpu: &Gpu, front_end: FrontEndInUse) {
    let (steps, default) = (setup.steps(Some(gpu)), setup.default_steps(Some(gpu)));
    let chosen = setup.profile_steps(Some(gpu)).is_some();
    let origin = |differs| if chosen && differs { FlagOrigin::Hostler } else { FlagOrigin::Engine };
    let (few, small) = match setup.profile {
        Profile::Throughput => {
            ("more requests in each step give more tokens a second, as far as the cache reaches", "larger steps read prompts faster")
        }
        Profile::Latency => {
            ("fewer requests in each step make the step shorter", "a prompt holds up the tokens of others for one small step at a time")
        }
        Profile::Conservative => ("left as it is", "left as it is"),
    };
    list.add("--max-num-seqs", steps.sequences.to_string(), origin(steps.sequences != default.sequences), few);
    list.add("--max-num-batched-tokens", steps.tokens.to_string(), origin(steps.tokens != default.tokens), small);
    let limited = setup.profile != Profile::Conservative && setup.is_at_least(QUEUE_LIMIT_SINCE) && front_end == FrontEndInUse::Python;
    if limited && steps.sequences > 0 {
        // The limit is twice the batch: a burst waits, and requests beyond it are better off at
        // another replica.
        let most = (2 * u64::from(steps.sequences)).max(MIN_QUEUE_LIMIT).to_string();
        list.add(
            "--max-num-queued-reqs",
            most,
            FlagOrigin::Hostler,
            "beyond so many requests, running or waiting, the engine says 503 and the router tries another replica",
        );
    }
}

fn add_scheduling_flags(list: &mut FlagList<'_>, setup: &EnginePlanSetup, stages: u32) {
    list.add("--enable-prefix-caching", "", FlagOrigin::Engine, "what was computed for a prompt serves the next one that begins alike");
    list.add("--enable-chunked-prefill", "", FlagOrigin::Engine, "long prompts are read in parts, between the tokens of others");
    list.add("--enforce-eager", "off", FlagOrigin::Engine, "CUDA graphs start the kernels of a step at once");
    add_async_flag(list, setup, stages);
    if setup.profile == Profile::Latency && setup.is_at_least(PERFORMANCE_MODE_SINCE) {
        list.add(
            "--performance-mode",
            "interactivity",
            FlagOrigin::Hostler,
            "CUDA graphs for every small number of requests, not only for some",
        );
    }
    if setup.is_at_least(STREAM_INTERVAL_SINCE) {
        list.add("--stream-interval", "1", FlagOrigin::Engine, "each token is sent as soon as it is there");
    }
}

fn add_async_flag(list: &mut FlagList<'_>, setup: &EnginePlanSetup, stages: u32) {
    if stages > 1 && setup.is_at_least(ASYNC_SINCE) && !setup.is_at_least(ASYNC_STAGES_SINCE) {
        list.add("--async-scheduling", "off", FlagOrigin::Engine, "this release does not plan ahead for a pipeline");
    } else if setup.is_at_least(ASYNC_AUTO_SINCE) {
        let because = if stages > 1 {
            "the next step is planned while the GPUs compute this one; vLLM's V1 model runner turns that off for a pipeline"
        } else {
            "the next step is planned while the GPU computes this one, where the model allows it"
        };
        list.add("--async-scheduling", "", FlagOrigin::Engine, because);
    } else if setup.is_at_least(ASYNC_SINCE) && setup.profile != Profile::Conservative && !list.given.has("--speculative-config") {
        list.add(
            "--async-scheduling",
            "",
            FlagOrigin::Hostler,
            "the next step is planned while the GPU computes this one; this release does not do so by itself",
        );
    }
}

fn add_graph_flags(list: &mut FlagList<'_>, setup: &EnginePlanSetup, gpu: &Gpu) {
    if let Some(most) = setup.graph_tokens(Some(gpu)) {
        let sizes: Vec<String> = graph_sizes(most).iter().map(ToString::to_string).collect();
        list.add(
            "--cudagraph-capture-sizes",
            sizes.join(" "),
            FlagOrigin::Hostler,
            "CUDA graphs for steps that read prompts too: by itself the engine makes them for 512 tokens and less",
        );
    }
}

/// Adds the executor flag. With several GPUs the engine has such processes anyway.
fn add_executor_flag(list: &mut FlagList<'_>, setup: &EnginePlanSetup, place: &ReplicaContext<'_>) {
    if setup.profile == Profile::Throughput && place.tp == 1 && place.stages == 1 && place.has_workers {
        list.add(
            EXECUTOR_FLAG,
            "mp",
            FlagOrigin::Hostler,
            "the model runs in a process of its own, while the engine's plans the next step: worth it from eight CPUs an engine on",
        );
    }
}

/// Token counts for which there are graphs; a step takes the next larger one.
///
/// There are eight for each doubling, so at most an eighth of a step is padding. Up to 4,096 tokens
/// that makes 59, where vLLM makes 51 up to 512, in the same four seconds (H200, 1.7B).
fn graph_sizes(most: u32) -> Vec<u32> {
    let fine = (8..=64).step_by(8);
    let coarse =
        (6..).map(|power| 1 << power).take_while(|from| *from < most).flat_map(|from: u32| (1..=8).map(move |part| from + from / 8 * part));
    [1, 2, 4].into_iter().chain(fine).chain(coarse).filter(|size| *size < most).chain([most]).collect()
}

/// Adds the flags that every engine has, including the simulated one.
fn add_reporting_flags(list: &mut FlagList<'_>) {
    list.add("--disable-uvicorn-access-log", "", FlagOrigin::Hostler, "requests are logged and counted by the router");
    list.add("--enable-prompt-tokens-details", "", FlagOrigin::Hostler, "routers learn how much of a prompt was cached");
    list.add("--enable-request-id-headers", "", FlagOrigin::Hostler, "answers carry the id of their request");
}

/// Adds the flag by which routers can ask the engine for the tokens of a prompt.
fn add_rendering_flag(list: &mut FlagList<'_>, setup: &EnginePlanSetup, front_end: FrontEndInUse) {
    let has_flag = setup.simulated || setup.is_at_least(SCALE_OUT_SINCE);
    if setup.only_engine_reads_prompts && setup.kv_events && has_flag && front_end == FrontEndInUse::Python {
        list.add(
            SCALE_OUT_FLAG,
            "",
            FlagOrigin::Hostler,
            "only the engine can read this model's prompts: routers ask it for their tokens; clients do not reach these routes",
        );
    }
}

/// Adds the parsers of calls and of reasoning.
fn add_parser_flags(list: &mut FlagList<'_>, parsers: &ModelParsers) {
    let is_users_own = TOOL_FLAGS.iter().any(|flag| list.given.has(flag));
    let chosen = if list.given.has(TOOL_PARSER_FLAG) { Ok("") } else { parsers.tools.as_ref().copied() };
    match chosen {
        _ if is_users_own => {}
        Ok(name) => {
            list.add("--enable-auto-tool-choice", "", FlagOrigin::Hostler, "requests with tools are refused without it");
            list.add(TOOL_PARSER_FLAG, name, FlagOrigin::Hostler, "reads calls in the form that the model's chat template has");
        }
        Err(because) => {
            let because = format!("{because}, so requests with tools are refused; `-- {TOOL_PARSER_FLAG} NAME` names a parser");
            list.add(TOOL_PARSER_FLAG, "off", FlagOrigin::Engine, because);
        }
    }
    let gives_reasoning = REASONING_FLAGS.iter().any(|flag| list.given.has(flag));
    match &parsers.reasoning {
        _ if gives_reasoning => {}
        Ok(name) => list.add(REASONING_PARSER_FLAG, *name, FlagOrigin::Hostler, "reasoning comes apart from the answer"),
        Err(because) => list.add(REASONING_PARSER_FLAG, "off", FlagOrigin::Engine, because.clone()),
    }
}

fn add_traces_flag(list: &mut FlagList<'_>, setup: &EnginePlanSetup, front_end: FrontEndInUse) {
    match (&setup.traces, front_end) {
        (EngineTraces::Unasked, _) => {}
        (EngineTraces::SentTo(_), FrontEndInUse::Rust) => {
            list.add(
                TRACES_FLAG,
                "off",
                FlagOrigin::Engine,
                "traces end at the router: the Rust front-end sends none, for which use --front-end python",
            );
        }
        (EngineTraces::SentTo(endpoint), FrontEndInUse::Python) => {
            list.add(
                TRACES_FLAG,
                endpoint,
                FlagOrigin::Hostler,
                "a request's trace goes on in the engine, to the collector of OTEL_EXPORTER_OTLP_ENDPOINT",
            );
        }
        (EngineTraces::Impossible { because }, _) => {
            list.add(TRACES_FLAG, "off", FlagOrigin::Engine, format!("traces end at the router: {because}"));
        }
    }
}

#[cfg(test)]
mod tests;
