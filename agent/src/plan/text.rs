//! A plan in words: a page for people, a paragraph for the log, and warnings.

pub(super) mod json;
mod nodes;

use super::layout::{GpuGroupLayout, GpuLayout, SizeReason};
use super::memory::MemoryBudget;
use super::model::{ModelFacts, ModelInfo, WeightSizeSource};
use super::{FileCache, HostCache, NoFileCache, NoHostCache, Plan};
use crate::config::Profile;
use crate::gpu::Gpu;
use crate::sizes::format_gib;
use crate::vllm::arguments::EngineArguments;
use crate::vllm::{FlagChoice, FlagOrigin, FrontEndInUse};

/// Tokens of a usual request, prompt and answer, used to say how many fit at once.
const TYPICAL_REQUEST_TOKENS: u64 = 2_048;

/// GPUs of this compute capability and newer have bfloat16.
const BFLOAT16_SINCE: (u32, u32) = (8, 0);

/// Largest model that outruns the Python front-end on a GPU of at least this size.
///
/// Measured with 1.7 billion parameters on an H200, where the front-end sent two thirds of the
/// tokens.
const FAST_MODEL_BYTES: u64 = 8 << 30;
const FAST_GPU_BYTES: u64 = 70 << 30;

/// A cache smaller than this part of the memory is worth a warning.
const SMALL_CACHE_PART: u64 = 10;

pub(super) fn page(plan: &Plan) -> String {
    let mut lines = Vec::new();
    let mut section = |title: &str, sentences: Vec<String>| {
        for (at, sentence) in sentences.into_iter().enumerate() {
            lines.push(format!("{:<11}{sentence}", if at == 0 { title } else { "" }));
        }
    };
    section("model", model(plan));
    section("GPUs", gpus(plan));
    section("layout", layout(plan));
    section("network", nodes::network(plan));
    section("KV cache", cache(plan));
    if !matches!(plan.host_cache, HostCache::Off(NoHostCache::Unset)) {
        section("host cache", vec![host_cache(plan)]);
    }
    if plan.file_cache != FileCache::Off(NoFileCache::Unset) {
        section("files", vec![file_cache(plan)]);
    }
    section("standby", standby(plan).into_iter().collect());
    section("front-end", vec![format!("{}: {}", front_end(plan.front_end.in_use), plan.front_end.because)]);
    section("profile", vec![format!("{}, {}", plan.setup.profile.as_str(), release(plan))]);
    let mut page = lines.join("\n");
    page.push('\n');
    for flags in flags(plan) {
        page.push_str(&flags);
        page.push('\n');
    }
    for warning in &plan.warnings {
        page.push_str("warning    ");
        page.push_str(warning);
        page.push('\n');
    }
    page.trim_end().to_owned()
}

pub(super) fn summary(plan: &Plan) -> String {
    if plan.setup.attached {
        let count = plan.replicas.len();
        return if count == 1 { "1 engine that runs already".to_owned() } else { format!("{count} engines that run already") };
    }
    let mut sentences = vec![layout(plan).remove(0)];
    if let (ModelInfo::Unknown { because }, true) = (&plan.model, plan.layout.is_some()) {
        sentences.push(format!("{}: {because}", plan.name));
    }
    if let Some(first) = cache(plan).into_iter().next() {
        sentences.push(format!("KV cache: {first}"));
    }
    let hostlers = |choice: &FlagChoice| (choice.origin == FlagOrigin::Hostler).then(|| choice.display_short());
    let flags: Vec<String> = plan
        .replicas
        .first()
        .map(|first| plan.choices(first, plan.front_end.in_use))
        .unwrap_or_default()
        .iter()
        .filter_map(hostlers)
        .collect();
    sentences.push(format!("Profile {}: {}", plan.setup.profile.as_str(), flags.join(" ")));
    sentences.push(format!("Front-end {}", front_end(plan.front_end.in_use)));
    sentences.join(". ")
}

fn model(plan: &Plan) -> Vec<String> {
    let name = if plan.name.is_empty() { "the simulated engine's own" } else { &plan.name };
    match &plan.model {
        ModelInfo::Unknown { because } => vec![format!("{name}: {because}")],
        ModelInfo::Known(facts) => {
            let measured = match facts.size_source {
                WeightSizeSource::Index => "by the index of its files",
                WeightSizeSource::Files => "by the size of its files",
                WeightSizeSource::Shapes => "by its shapes, there are no files",
            };
            let size = format!(
                "{name}: {} parameters, {} in {}, {measured}",
                billions(facts.parameters),
                format_gib(facts.weight_bytes),
                facts.format.name
            );
            vec![size, shapes(facts)]
        }
    }
}

fn shapes(facts: &ModelFacts) -> String {
    let shape = &facts.shape;
    let kept = match shape.latent {
        Some(latent) => format!("latent attention of {latent} elements"),
        None => format!("{} of {}", count(shape.kv_heads as usize, "KV head"), shape.head_dim),
    };
    let mut kinds = format!("{} layers", shape.layers);
    if shape.windowed_layers > 0 {
        kinds.push_str(&format!(", {} of them with a window of {} tokens", shape.windowed_layers, thousands(u64::from(shape.window))));
    }
    if shape.recurrent_layers > 0 {
        kinds.push_str(&format!(", {} of them with a state instead of a cache", shape.recurrent_layers));
    }
    format!("{kinds}; {} attention heads, {kept}; context {} tokens", shape.heads, thousands(u64::from(facts.context)))
}

fn gpus(plan: &Plan) -> Vec<String> {
    let Some(layout) = &plan.layout else { return vec!["none: the engines run on the CPU".to_owned()] };
    let nodes = plan.spread.map_or(String::new(), |spread| format!("{} nodes of ", spread.nodes));
    let describe = |share: &GpuGroupLayout| format!("{nodes}{}", describe_gpus(share.replicas.iter().flatten().collect()));
    let mut lines: Vec<String> = layout.shares.iter().map(describe).collect();
    lines.extend(
        layout.spare.iter().map(|spare| format!("{} {} stays unused: {}", device_noun(&spare.gpu), spare.gpu.index, spare.because)),
    );
    lines
}

fn describe_gpus(gpus: Vec<&Gpu>) -> String {
    let first = gpus[0];
    let memory = if first.memory_bytes == 0 { "memory unknown".to_owned() } else { format_gib(first.memory_bytes) };
    format!("{} x {} ({memory})", gpus.len(), first.name)
}

fn device_noun(gpu: &Gpu) -> &'static str {
    if gpu.slice.is_some() { "MIG slice of GPU" } else { "GPU" }
}

/// Use of the GPUs, and the reasons.
fn layout(plan: &Plan) -> Vec<String> {
    if let Some(spread) = plan.spread {
        return nodes::layout(plan, spread);
    }
    let Some(layout) = &plan.layout else {
        return vec![format!("{} on the CPU", count(plan.in_service().count(), "replica"))];
    };
    let mut lines = Vec::new();
    for share in &layout.shares {
        lines.push(headline(share));
        lines.extend(share.rejected.as_ref().map(|memory| explain_rejected_size(share, memory)));
        lines.extend(share.memory.as_ref().map(|memory| format!("each GPU: {}", describe_parts(memory))));
    }
    lines
}

fn headline(share: &GpuGroupLayout) -> String {
    let replicas = count(share.replicas.len(), "replica");
    let each = if share.replicas.len() == 1 { "" } else { " each" };
    let unit = if share.why == SizeReason::Slices { "MIG slice" } else { "GPU" };
    let size = format!("{replicas} of {}{each} ({} x TP{})", count(share.tp as usize, unit), share.replicas.len(), share.tp);
    let why = match (share.why, share.tp) {
        (SizeReason::Requested, _) => "as --tp says",
        (SizeReason::Unknown, _) => "one GPU each is assumed, since nothing can be computed",
        (SizeReason::Slices, _) => "slices cannot work together",
        (SizeReason::Smallest, 1) if share.is_context_shortened => {
            "one GPU holds the model with a shorter context, and more would have to work over PCIe or are not there"
        }
        (SizeReason::Smallest, 1) => "the model fits one GPU, and replicas that exchange nothing serve the most",
        (SizeReason::Smallest, _) => "the smallest number that leaves room for the cache",
    };
    let joined = match (share.tp, share.over_pcie) {
        (1, _) => "",
        (_, false) => ", joined by NVLink",
        (_, true) => ", over PCIe",
    };
    format!("{size}{joined}: {why}")
}

fn explain_rejected_size(share: &GpuGroupLayout, memory: &MemoryBudget) -> String {
    let fewer = count(share.tp as usize / 2, "GPU");
    let verb = if share.tp == 2 { "is" } else { "are" };
    explain_too_few(&format!("{fewer} {verb} too few"), memory, share.context.unwrap_or(0))
}

fn explain_too_few(what: &str, memory: &MemoryBudget, context: u32) -> String {
    let taken = format!(
        "weights {} + running {} of {}",
        format_gib(memory.weights),
        format_gib(memory.runtime + memory.activations),
        format_gib(memory.usable)
    );
    if memory.missing > 0 {
        return format!("{what}: {taken} that may be used, {} are missing", format_gib(memory.missing));
    }
    let (tokens, context) = (memory.tokens_in(context).unwrap_or(0), u64::from(context));
    let small = if tokens >= context { ", less than a tenth of the memory" } else { "" };
    format!(
        "{what}: {taken} that may be used leave {} for the cache, {} tokens{small}; a context has {}",
        format_gib(memory.cache),
        thousands(tokens),
        thousands(context)
    )
}

fn describe_parts(memory: &MemoryBudget) -> String {
    format!(
        "{} of {} may be used: weights {}, CUDA and its graphs {}, one step {}, KV cache {}",
        format_gib(memory.usable),
        format_gib(memory.total),
        format_gib(memory.weights),
        format_gib(memory.runtime),
        format_gib(memory.activations),
        format_gib(memory.cache)
    )
}

/// The standby and its memory.
fn standby(plan: &Plan) -> Option<String> {
    plan.replicas.iter().find(|replica| replica.is_standby)?;
    let role = "a second engine on the same GPUs, which answers only while no other replica serves the model";
    let Some(standby) = &plan.standby else { return Some(role.to_owned()) };
    let memory = &standby.budget;
    Some(format!(
        "{role}: {} of each GPU, of them weights {} and KV cache {}, {} tokens; requests of up to {} tokens",
        format_gib(memory.usable),
        format_gib(memory.weights),
        format_gib(memory.cache),
        memory.tokens_in(standby.context).map_or_else(|| "an unknown number of".to_owned(), thousands),
        thousands(u64::from(standby.context))
    ))
}

/// Capacity of each replica.
fn cache(plan: &Plan) -> Vec<String> {
    let shares = plan.layout.iter().flat_map(|layout| &layout.shares);
    let sequences = |share: &GpuGroupLayout| plan.setup.steps(share.replicas[0].first()).sequences;
    shares.filter_map(|share| Some(describe_capacity(share.memory.as_ref()?, share.context?, sequences(share)))).collect()
}

/// Copies in the host's memory, or why there are none.
fn host_cache(plan: &Plan) -> String {
    match &plan.host_cache {
        HostCache::Off(because) => format!("off: {because}"),
        HostCache::On(share) => {
            format!("about {} tokens a replica, {}: {}", thousands(share.tokens), format_gib(share.bytes), share.because())
        }
    }
}

/// Files with what the engines have cached, or why there are none.
fn file_cache(plan: &Plan) -> String {
    match &plan.file_cache {
        FileCache::Off(because) => format!("off: {because}"),
        FileCache::On(pool) => {
            format!("about {} tokens for all replicas, {} in {}", thousands(pool.tokens), format_gib(pool.bytes), pool.folder.display())
        }
    }
}

fn describe_capacity(memory: &MemoryBudget, context: u32, sequences: u32) -> String {
    let Some((tokens, whole)) = memory.tokens_in(context).zip(memory.requests_of(u64::from(context))) else {
        return "the model keeps states only, whose number the engine decides".to_owned();
    };
    let usual = memory.requests_of(TYPICAL_REQUEST_TOKENS.min(u64::from(context))).unwrap_or(0).min(u64::from(sequences));
    format!(
        "about {} tokens a replica: {} of {} tokens at once, or {} of {}",
        thousands(tokens),
        count(usize::try_from(whole).unwrap_or(usize::MAX), "request"),
        thousands(u64::from(context)),
        thousands(usual),
        thousands(TYPICAL_REQUEST_TOKENS.min(u64::from(context)))
    )
}

/// Lines of the flags, one for each; several kinds of GPU have one list each.
fn flags(plan: &Plan) -> Vec<String> {
    let mut lines = Vec::new();
    let mut printed: Vec<Vec<FlagChoice>> = Vec::new();
    for replica in &plan.replicas {
        let choices = plan.choices(replica, plan.front_end.in_use);
        if printed.contains(&choices) {
            continue;
        }
        if !printed.is_empty() {
            lines.push(if replica.is_standby { "  the standby:".to_owned() } else { format!("  from replica {} on:", replica.index) });
        }
        let width = choices.iter().map(|choice| choice.display_short().chars().count()).max().unwrap_or(0);
        lines.extend(
            choices
                .iter()
                .map(|choice| format!("  {:<width$}  {:<14}  {}", choice.display_short(), choice.origin.as_str(), choice.because)),
        );
        printed.push(choices);
    }
    lines
}

/// Warnings to read before the plan runs.
pub(super) fn warnings(plan: &Plan) -> Vec<String> {
    let mut warnings = nodes::warnings(plan);
    for share in plan.layout.iter().flat_map(|layout: &GpuLayout| &layout.shares) {
        warnings.extend(warnings_of(plan, share));
    }
    let given = EngineArguments(&plan.setup.arguments);
    if given.has("--enforce-eager") && plan.layout.is_some() && !plan.setup.simulated {
        warnings.push("--enforce-eager turns CUDA graphs off: each step waits for the CPU to start every kernel, which costs decode speed, most of all with small models".to_owned());
    }
    if given.negates("--enable-prefix-caching") {
        warnings.push("--no-enable-prefix-caching: every prompt is computed anew, and requests are placed by load alone".to_owned());
    }
    if plan.model.facts().is_some_and(|facts| facts.shape.recurrent_layers > 0) {
        warnings.push("the model has layers with a state instead of a cache: what is said of its KV cache is an upper bound".to_owned());
    }
    warnings
}

fn warnings_of(plan: &Plan, share: &GpuGroupLayout) -> Vec<String> {
    let mut warnings = Vec::new();
    if share.over_pcie && share.tp > 1 {
        warnings.push("the GPUs of a replica are not joined by NVLink: each layer of each step waits for PCIe; a smaller or quantized model on one GPU is faster".to_owned());
    }
    let gpu = &share.replicas[0][0];
    if gpu.memory_bytes >= FAST_GPU_BYTES && plan.front_end.in_use == FrontEndInUse::Python && plan.setup.profile == Profile::Throughput {
        let small = plan.model.facts().is_some_and(|facts| facts.weight_bytes <= FAST_MODEL_BYTES);
        if small && !EngineArguments(&plan.setup.arguments).has("--stream-interval") {
            warnings.push("the Python front-end will be the limit of so small a model on such a GPU: use a vLLM with the Rust one, or give --stream-interval 4 after `--`, which saves a third of its work and sends four tokens at a time".to_owned());
        }
    }
    let (Some(facts), Some(memory), Some(context)) = (plan.model.facts(), &share.memory, share.context) else { return warnings };
    if share.is_context_shortened {
        let more = if plan.spread.is_some() { "nodes" } else { "GPUs" };
        warnings.push(format!(
            "the model's context of {} tokens does not fit: engines are started with --max-model-len {context}; more {more} per replica, or --kv-cache-dtype fp8, hold more",
            thousands(u64::from(facts.context))
        ));
    } else if memory.requests_of(u64::from(context)) == Some(0) {
        warnings.push(format!("by this arithmetic the cache does not hold one request of {} tokens, and the engine may refuse to start: give a smaller --max-model-len, such as {}", thousands(u64::from(context)), memory.max_request_tokens(context)));
    } else if memory.cache < memory.total / SMALL_CACHE_PART {
        warnings.push("the KV cache is less than a tenth of the memory: few requests run at once".to_owned());
    }
    if facts.format.name == "bf16" && gpu.compute.is_some_and(|compute| compute < BFLOAT16_SINCE) {
        warnings.push(format!("{} has no bfloat16: give --dtype half after `--`", gpu.name));
    }
    warnings
}

fn front_end(front_end: FrontEndInUse) -> &'static str {
    match front_end {
        FrontEndInUse::Python => "Python",
        FrontEndInUse::Rust => "Rust",
    }
}

fn release(plan: &Plan) -> String {
    match (plan.setup.simulated, plan.setup.version) {
        (true, _) => "simulated engine".to_owned(),
        (false, Some(version)) => format!("vLLM {version}"),
        (false, None) => "vLLM of an unknown version, which gets only what every release has".to_owned(),
    }
}

fn count(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

/// Formats 1234567 as 1,234,567.
pub(super) fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> = digits.as_bytes().rchunks(3).rev().map(|group| std::str::from_utf8(group).expect("digits are ASCII")).collect();
    groups.join(",")
}

/// Formats a number in billions with one digit after the point, or below that in millions.
fn billions(number: u64) -> String {
    match number {
        0..1_000_000_000 => format!("{} million", (number + 500_000) / 1_000_000),
        _ => format!("{}.{} billion", (number + 50_000_000) / 1_000_000_000, (number + 50_000_000) % 1_000_000_000 / 100_000_000),
    }
}
