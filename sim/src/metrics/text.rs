//! The Prometheus text of the metrics, whole or filtered by sample name as the
//! Python client's `name[]` does.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{FINISH_REASONS, ITERATION_BUCKETS, Metrics};
use crate::args::EngineArgs;

/// Labels of `vllm:cache_config_info` that this engine has no value for, as a vLLM on CPU shows
/// them; their order is the wire's.
const CACHE_CONFIG: &str = r#"_block_size_resolved="True",block_size="{block_size}",cache_dtype="auto",cache_hit_alignment_tokens="None",effective_attention_block_size="{block_size}",enable_mamba_shared_prefix_checkpoint="False",enable_prefix_caching="True",engine="0",gpu_memory_utilization="0.92",hash_block_size="None",is_attention_free="False",kv_cache_dtype_skip_layers="[]",kv_cache_layout="None",kv_cache_max_concurrency="{concurrency}",kv_cache_memory_bytes="None",kv_cache_size_tokens="{tokens}",kv_offloading_backend="native",kv_offloading_size="None",kv_sharing_fast_prefill="False",mamba_block_size="None",mamba_cache_dtype="auto",mamba_cache_mode="none",mamba_page_size_padded="None",mamba_ssm_cache_dtype="float32",num_cpu_blocks="None",num_gpu_blocks="{blocks}",num_gpu_blocks_override="{blocks}",prefix_cache_retention_interval="0",prefix_caching_hash_algo="sha256",prefix_match_unit="None",replayssm_buffer_len="16",skip_page_size_padded="None",sliding_window="None",swa_bounded_replay="True",use_kda_recoverssm="False",use_replayssm="False",user_specified_block_size="False""#;

/// Writes the samples named in `names`, or all of them if it is empty.
pub(crate) fn render(metrics: &Metrics, args: &EngineArgs, names: &[String]) -> String {
    let mut page = Page { text: String::new(), names, labels: labels(args) };
    page.gauge("vllm:num_requests_running", "Number of requests in model execution batches.", int(&metrics.running));
    page.gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", int(&metrics.waiting));
    write_waiting_by_reason(&mut page, int(&metrics.waiting));
    write_sleep_state(&mut page, metrics);
    let usage = f64::from_bits(metrics.cache_usage.load(Ordering::Relaxed));
    page.gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage);
    let counters = [
        ("vllm:prefix_cache_queries_total", "Prefix cache queries, in terms of number of queried tokens.", &metrics.queried_tokens),
        ("vllm:prefix_cache_hits_total", "Prefix cache hits, in terms of number of cached tokens.", &metrics.cached_tokens),
        ("vllm:num_preemptions_total", "Cumulative number of preemption from the engine.", &metrics.preemptions),
        ("vllm:prompt_tokens_total", "Number of prefill tokens processed.", &metrics.prompt_tokens),
        ("vllm:prompt_tokens_cached_total", "Number of cached prompt tokens (local + external).", &metrics.cached_tokens),
        ("vllm:generation_tokens_total", "Number of generation tokens processed.", &metrics.generated_tokens),
    ];
    for (name, help, value) in counters {
        let labels = page.labels.clone();
        page.family(name, help, "counter");
        page.sample(name, &labels, int(value));
    }
    write_finished(&mut page, metrics, args);
    write_rejections(&mut page, metrics, args);
    write_iterations(&mut page, metrics, args);
    write_cache_config(&mut page, args);
    page.finish()
}

/// Page so far. A family's header is written with its first sample.
struct Page<'a> {
    text: String,
    names: &'a [String],
    labels: String,
}

impl Page<'_> {
    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        let labels = self.labels.clone();
        self.family(name, help, "gauge");
        self.sample(name, &labels, value);
    }

    fn family(&mut self, name: &str, help: &str, kind: &str) {
        let chosen = |requested: &String| {
            // A histogram's samples have suffixes.
            requested == name || (kind == "histogram" && requested.starts_with(name))
        };
        if self.names.is_empty() || self.names.iter().any(chosen) {
            let _ = write!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
        }
    }

    fn sample(&mut self, name: &str, labels: &str, value: f64) {
        if self.names.is_empty() || self.names.iter().any(|requested| requested == name) {
            // Use the debug format, because Prometheus clients in Python write `1.0`, not `1`.
            let _ = writeln!(self.text, "{name}{{{labels}}} {value:?}");
        }
    }

    fn finish(self) -> String {
        self.text
    }
}

fn labels(args: &EngineArgs) -> String {
    format!(r#"engine="0",model_name="{}""#, label_value(args.served_name()))
}

/// Escapes a label value for the text format.
fn label_value(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

fn write_waiting_by_reason(page: &mut Page<'_>, waiting: f64) {
    let name = "vllm:num_requests_waiting_by_reason";
    page.family(name, "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; 'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all reasons equals vllm:num_requests_waiting.", "gauge");
    for (reason, value) in [("capacity", waiting), ("deferred", 0.0)] {
        let labels = format!(r#"{},reason="{reason}""#, page.labels);
        page.sample(name, &labels, value);
    }
}

fn write_sleep_state(page: &mut Page<'_>, metrics: &Metrics) {
    let name = "vllm:engine_sleep_state";
    page.family(name, "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.", "gauge");
    let level = metrics.sleep_level.load(Ordering::Relaxed);
    for (of, state) in ["awake", "weights_offloaded", "discard_all"].into_iter().enumerate() {
        let value = if level == of as u64 { 1.0 } else { 0.0 };
        let labels = format!(r#"{},sleep_state="{state}""#, page.labels);
        page.sample(name, &labels, value);
    }
}

fn write_finished(page: &mut Page<'_>, metrics: &Metrics, args: &EngineArgs) {
    let name = "vllm:request_success_total";
    page.family(name, "Count of successfully processed requests.", "counter");
    let model = label_value(args.served_name());
    for (reason, count) in FINISH_REASONS.iter().zip(&metrics.finished) {
        let labels = format!(r#"engine="0",finished_reason="{reason}",model_name="{model}""#);
        page.sample(name, &labels, int(count));
    }
}

fn write_rejections(page: &mut Page<'_>, metrics: &Metrics, args: &EngineArgs) {
    let name = "vllm:admission_rejections_total";
    page.family(name, "Number of admission attempts rejected by a queue limit, by reason.", "counter");
    let model = label_value(args.served_name());
    for (reason, count) in [("max_num_queued_reqs", int(&metrics.rejections)), ("max_num_queued_tokens", 0.0)] {
        page.sample(name, &format!(r#"model_name="{model}",reason="{reason}""#), count);
    }
}

fn write_iterations(page: &mut Page<'_>, metrics: &Metrics, args: &EngineArgs) {
    let name = "vllm:iteration_tokens_total";
    page.family(name, "Histogram of number of tokens per engine_step.", "histogram");
    let model = label_value(args.served_name());
    let bounds = ITERATION_BUCKETS.iter().map(|bound| format!("{bound}.0"));
    let mut steps = 0.0;
    for (bound, bucket) in bounds.chain(["+Inf".to_owned()]).zip(&metrics.iterations) {
        steps += int(bucket);
        let labels = format!(r#"engine="0",le="{bound}",model_name="{model}""#);
        page.sample(&format!("{name}_bucket"), &labels, steps);
    }
    let labels = page.labels.clone();
    page.sample(&format!("{name}_count"), &labels, steps);
    page.sample(&format!("{name}_sum"), &labels, int(&metrics.iteration_tokens));
}

fn write_cache_config(page: &mut Page<'_>, args: &EngineArgs) {
    let name = "vllm:cache_config_info";
    page.family(name, "Information of the LLMEngine CacheConfig", "gauge");
    let tokens = args.cache_tokens();
    let labels = CACHE_CONFIG
        .replace("{block_size}", &args.block_size.to_string())
        .replace("{concurrency}", &format!("{}.0", tokens / args.context_length().max(1)))
        .replace("{tokens}", &tokens.to_string())
        .replace("{blocks}", &args.num_gpu_blocks_override.to_string());
    page.sample(name, &labels, 1.0);
}

#[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^52")]
fn int(value: &AtomicU64) -> f64 {
    value.load(Ordering::Relaxed) as f64
}
