//! Parser for the few metrics that placement and the advisor need from an engine's Prometheus text.
//!
//! Samples are matched by exact name and summed over label sets. The parser is pure; unknown names,
//! odd values and absent ones are no error.

/// Metrics of one engine at one moment.
///
/// Values that the engine does not report stay at zero or `None`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct EngineMetrics {
    /// Requests in the running batch.
    pub running: u32,
    /// Requests waiting for room in the batch.
    pub waiting: u32,
    /// Share of the KV blocks in use, from 0 to 1.
    pub kv_use: f64,
    /// Number of KV blocks; not reported by vLLM's Rust front-end.
    pub kv_blocks: Option<u64>,
    /// Tokens in one KV block; not reported by vLLM's Rust front-end.
    pub block_size: Option<u32>,
    /// Prompt tokens processed since the engine started.
    pub prompt_tokens: u64,
    /// Tokens generated since the engine started.
    pub generation_tokens: u64,
    /// Engine steps since the engine started, which show its progress.
    pub steps: u64,
    /// Requests preempted for lack of blocks since the engine started.
    pub preemptions: u64,
    /// Prompt tokens looked up in the prefix cache since the engine started.
    pub prefix_queries: u64,
    /// Prompt tokens found in the prefix cache.
    pub prefix_hits: u64,
}

impl EngineMetrics {
    /// Whether the engine itself reports requests.
    pub(crate) fn has_requests(&self) -> bool {
        self.running + self.waiting > 0
    }
}

/// Names of the changing metrics.
///
/// If there are two names, the second is that of old releases, and the first counts if both are
/// present.
const NAMES: [(EngineMetric, &str, Option<&str>); 9] = [
    (EngineMetric::Running, "vllm:num_requests_running", None),
    (EngineMetric::Waiting, "vllm:num_requests_waiting", None),
    (EngineMetric::KvUse, "vllm:kv_cache_usage_perc", Some("vllm:gpu_cache_usage_perc")),
    (EngineMetric::PromptTokens, "vllm:prompt_tokens_total", None),
    (EngineMetric::GenerationTokens, "vllm:generation_tokens_total", None),
    (EngineMetric::Steps, "vllm:iteration_tokens_total_count", None),
    (EngineMetric::Preemptions, "vllm:num_preemptions_total", None),
    (EngineMetric::PrefixQueries, "vllm:prefix_cache_queries_total", Some("vllm:gpu_prefix_cache_queries_total")),
    (EngineMetric::PrefixHits, "vllm:prefix_cache_hits_total", Some("vllm:gpu_prefix_cache_hits_total")),
];

const CACHE_CONFIG: &str = "vllm:cache_config_info";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EngineMetric {
    Running,
    Waiting,
    KvUse,
    PromptTokens,
    GenerationTokens,
    Steps,
    Preemptions,
    PrefixQueries,
    PrefixHits,
}

#[derive(Debug, Clone, Copy, Default)]
struct SampleSum {
    value: f64,
    samples: u32,
}

/// Path that requests only these metrics: 0.4 ms of the engine's time instead of 5 ms for the whole
/// page.
///
/// The trailing slash is needed.
pub(crate) fn filtered_path() -> String {
    path_of(NAMES.iter().flat_map(|(_, name, older)| [Some(*name), *older]).flatten().chain([CACHE_CONFIG]))
}

fn path_of<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let mut path = "/metrics/".to_owned();
    for (position, name) in names.enumerate() {
        path.push(if position == 0 { '?' } else { '&' });
        path.push_str("name[]=");
        path.push_str(name);
    }
    path
}

/// Parses a page. Lines that are not samples are skipped.
pub(crate) fn parse_metrics(page: &str) -> EngineMetrics {
    let mut figures = EngineMetrics::default();
    let mut sums = [(SampleSum::default(), SampleSum::default()); NAMES.len()];
    for sample in page.lines().filter_map(PrometheusSample::parse) {
        if sample.name == CACHE_CONFIG {
            figures.add_cache_config(&sample);
            continue;
        }
        for ((_, name, older), (sum, older_sum)) in NAMES.iter().zip(&mut sums) {
            if sample.name == *name {
                sum.add(sample.value);
            } else if *older == Some(sample.name) {
                older_sum.add(sample.value);
            }
        }
    }
    for ((figure, _, _), (sum, older_sum)) in NAMES.iter().zip(sums) {
        figures.set(*figure, if sum.samples > 0 { sum } else { older_sum });
    }
    figures
}

impl SampleSum {
    fn add(&mut self, value: f64) {
        // An empty gauge has the value NaN.
        if value.is_finite() {
            self.value += value;
            self.samples += 1;
        }
    }

    fn count(self) -> u64 {
        round_count(self.value)
    }

    fn to_u32(self) -> u32 {
        u32::try_from(round_count(self.value)).unwrap_or(u32::MAX)
    }

    fn mean(self) -> f64 {
        if self.samples == 0 { 0.0 } else { self.value / f64::from(self.samples) }
    }
}

/// Nearest count; 0 for a negative value.
#[expect(clippy::cast_possible_truncation, reason = "the cast saturates, and no counter comes near the limit")]
fn round_count(value: f64) -> u64 {
    value.max(0.0).round() as u64
}

impl EngineMetrics {
    fn set(&mut self, figure: EngineMetric, sum: SampleSum) {
        match figure {
            EngineMetric::Running => self.running = sum.to_u32(),
            EngineMetric::Waiting => self.waiting = sum.to_u32(),
            EngineMetric::KvUse => self.kv_use = sum.mean().clamp(0.0, 1.0),
            EngineMetric::PromptTokens => self.prompt_tokens = sum.count(),
            EngineMetric::GenerationTokens => self.generation_tokens = sum.count(),
            EngineMetric::Steps => self.steps = sum.count(),
            EngineMetric::Preemptions => self.preemptions = sum.count(),
            EngineMetric::PrefixQueries => self.prefix_queries = sum.count(),
            EngineMetric::PrefixHits => self.prefix_hits = sum.count(),
        }
    }

    fn add_cache_config(&mut self, sample: &PrometheusSample<'_>) {
        let number = |label| sample.label(label).and_then(|text| text.parse::<u64>().ok());
        if let Some(blocks) = number("num_gpu_blocks") {
            self.kv_blocks = Some(self.kv_blocks.unwrap_or(0).saturating_add(blocks));
        }
        let size = number("block_size").and_then(|size| u32::try_from(size).ok());
        self.block_size = self.block_size.or(size);
    }
}

#[derive(Debug, PartialEq)]
struct PrometheusSample<'a> {
    name: &'a str,
    /// Text between the braces.
    labels: &'a str,
    value: f64,
}

impl<'a> PrometheusSample<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            return None;
        }
        let end = line.find(|character: char| character == '{' || character.is_whitespace())?;
        let (name, rest) = line.split_at(end);
        let (labels, rest) = match rest.strip_prefix('{') {
            Some(inside) => {
                let close = end_of_labels(inside)?;
                (&inside[..close], &inside[close + 1..])
            }
            None => ("", rest),
        };
        // A time stamp may follow the value.
        let value = rest.split_whitespace().next()?.parse().ok()?;
        Some(Self { name, labels, value })
    }

    /// Value of a label. Escapes are left unchanged; numbers have none.
    fn label(&self, key: &str) -> Option<&'a str> {
        let mut rest = self.labels;
        loop {
            let (name, after) = rest.split_once("=\"")?;
            let close = end_of_quoted(after)?;
            if name.trim_start_matches([',', ' ']) == key {
                return Some(&after[..close]);
            }
            rest = &after[close + 1..];
        }
    }
}

/// End of the labels: the first brace outside of quoted text.
fn end_of_labels(labels: &str) -> Option<usize> {
    let mut position = 0;
    loop {
        let next = position + labels[position..].find(['"', '}'])?;
        if labels.as_bytes()[next] == b'}' {
            return Some(next);
        }
        position = next + 1 + end_of_quoted(&labels[next + 1..])? + 1;
    }
}

/// End of a quoted text, given the text after its opening quote.
fn end_of_quoted(text: &str) -> Option<usize> {
    let mut escaped = false;
    text.bytes().position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    })
}

mod details;

pub(crate) use details::EngineDetails;
pub(super) use details::{detailed_path, parse_details};

#[cfg(test)]
mod tests;
