//! Metrics that only the advisor wants, once a second from a busy engine: how long requests are and
//! wait, and what the queue waits for.

use super::{PrometheusSample, SampleSum, path_of, round_count};

/// Details of one engine beyond its load.
///
/// Values that the engine does not report stay at zero or `None`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct EngineDetails {
    /// Waiting requests that could not run even if there were room.
    ///
    /// Their grammar is being compiled, or their adapter or their blocks are not there yet.
    /// Reported since vLLM 0.20.
    pub deferred: u32,
    /// Requests that have ended since the engine started.
    pub requests: u64,
    /// Upper bound of all prompts since the engine started, in tokens.
    ///
    /// `None` if one is beyond the scale.
    pub longest_prompt: Option<u64>,
    /// Upper bound of all answers since the engine started, in tokens.
    pub longest_answer: Option<u64>,
    /// Seconds that requests have waited in the engine's queue since it started.
    pub queue_seconds: f64,
    /// Number of requests behind `queue_seconds`: those that had begun to run.
    pub queued: u64,
    /// Seconds between two tokens of one answer, summed since the engine started.
    pub gap_seconds: f64,
    /// Number of these gaps.
    pub gaps: u64,
}

const DEFERRED: &str = "vllm:num_requests_waiting_by_reason";
const PROMPTS: &str = "vllm:request_prompt_tokens_bucket";
const PROMPTS_COUNT: &str = "vllm:request_prompt_tokens_count";
const ANSWERS: &str = "vllm:request_generation_tokens_bucket";
const QUEUE_SUM: &str = "vllm:request_queue_time_seconds_sum";
const QUEUE_COUNT: &str = "vllm:request_queue_time_seconds_count";

/// Names of the sums and counts.
///
/// The second of each is the name in old releases; the first counts if both are present.
const GAP_SUM: [&str; 2] = ["vllm:inter_token_latency_seconds_sum", "vllm:time_per_output_token_seconds_sum"];
const GAP_COUNT: [&str; 2] = ["vllm:inter_token_latency_seconds_count", "vllm:time_per_output_token_seconds_count"];

/// Path that requests only the details; see `filtered_path`.
pub(crate) fn detailed_path() -> String {
    path_of([DEFERRED, PROMPTS, PROMPTS_COUNT, ANSWERS, QUEUE_SUM, QUEUE_COUNT].into_iter().chain(GAP_SUM).chain(GAP_COUNT))
}

/// Parses a page. Lines that are not samples are skipped.
pub(crate) fn parse_details(page: &str) -> EngineDetails {
    let [mut deferred, mut requests, mut queue_sum, mut queued] = [SampleSum::default(); 4];
    let (mut gap_sums, mut gap_counts) = ([SampleSum::default(); 2], [SampleSum::default(); 2]);
    let (mut prompts, mut answers) = (PrometheusHistogram::default(), PrometheusHistogram::default());
    for sample in page.lines().filter_map(PrometheusSample::parse) {
        match sample.name {
            DEFERRED if sample.label("reason") == Some("deferred") => deferred.add(sample.value),
            PROMPTS => prompts.add(&sample),
            PROMPTS_COUNT => requests.add(sample.value),
            ANSWERS => answers.add(&sample),
            QUEUE_SUM => queue_sum.add(sample.value),
            QUEUE_COUNT => queued.add(sample.value),
            name => {
                for (known, sum) in GAP_SUM.iter().zip(&mut gap_sums).chain(GAP_COUNT.iter().zip(&mut gap_counts)) {
                    if *known == name {
                        sum.add(sample.value);
                    }
                }
            }
        }
    }
    let newest = |[new, old]: [SampleSum; 2]| if new.samples > 0 { new } else { old };
    EngineDetails {
        deferred: deferred.to_u32(),
        requests: requests.count(),
        longest_prompt: prompts.upper_bound(),
        longest_answer: answers.upper_bound(),
        queue_seconds: queue_sum.value.max(0.0),
        queued: queued.count(),
        gap_seconds: newest(gap_sums).value.max(0.0),
        gaps: newest(gap_counts).count(),
    }
}

/// Buckets of a histogram: the number of samples up to each bound, over all label sets.
#[derive(Debug, Default)]
struct PrometheusHistogram {
    buckets: Vec<(f64, f64)>,
}

impl PrometheusHistogram {
    fn add(&mut self, sample: &PrometheusSample<'_>) {
        // Rust parses `+Inf`, too.
        let Some(bound) = sample.label("le").and_then(|bound| bound.parse::<f64>().ok()).filter(|bound| !bound.is_nan()) else { return };
        if !sample.value.is_finite() {
            return;
        }
        match self.buckets.iter_mut().find(|(known, _)| known.total_cmp(&bound).is_eq()) {
            Some((_, count)) => *count += sample.value,
            None => self.buckets.push((bound, sample.value)),
        }
    }

    /// Least bound that no sample exceeds: 0 if nothing was counted, `None` if only infinity holds
    /// all.
    fn upper_bound(mut self) -> Option<u64> {
        self.buckets.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        let (_, all) = *self.buckets.last()?;
        if all <= 0.0 {
            return Some(0);
        }
        let (bound, _) = self.buckets.iter().find(|(_, count)| *count >= all)?;
        bound.is_finite().then(|| round_count(*bound))
    }
}

#[cfg(test)]
mod tests;
