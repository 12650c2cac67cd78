//! All of the router's counters and histograms, declared in one place. Handles are resolved once;
//! the request path only adds to them.

use std::time::Duration;

use hostler_boot::metrics::MetricRegistry;
use hostler_placement::cost::Candidate;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use strum::EnumCount;
use tokio::time::Instant;

use crate::cache_level::CacheLevel;
use crate::outcome::{AnswerOutcome, EndCounts, LossCause, RefusalReason, names};
use crate::resume_tier::ResumeTier;
use crate::sse::TokenUsage;

/// The router's own metrics.
#[derive(Debug)]
pub struct RouterMetrics {
    answers: [Counter; AnswerOutcome::COUNT],
    placements: [Counter; CacheLevel::COUNT],
    cached_tokens: CachedTokenMetrics,
    first_token: Histogram,
    first_token_ratio: Histogram,
    queue_time: Histogram,
    refused: [Counter; RefusalReason::COUNT],
    key_file_reads: [Counter; 2],
    /// Attempts beyond a request's first.
    pub retries: Counter,
    /// Failures that clients got because the retry budget for lost attempts was used up, and those
    /// for refused attempts.
    pub(crate) retries_denied: [Counter; 2],
    /// Frames of agents for requests that nobody knows any more.
    pub unknown_frames: Counter,
    pub access_log_dropped: Counter,
    pub trace_spans_dropped: Counter,
    first_byte: Histogram,
    answer_duration: Histogram,
    stream_events: Counter,
    completion_tokens: Counter,
    resumptions: [Counter; RESUMPTION_OUTCOMES.len()],
    resumption_reasons: [Counter; LossCause::COUNT],
    resumption_pause: Histogram,
    batches: BatchMetrics,
}

/// Prompt tokens whose computation was saved, as predicted and as engines said.
#[derive(Debug)]
struct CachedTokenMetrics {
    predicted: [Counter; CacheLevel::COUNT],
    loaded: Counter,
    read: Counter,
    actual: [Counter; CacheLevel::COUNT],
    error: Histogram,
}

impl CachedTokenMetrics {
    fn register(page: &mut MetricRegistry, levels: [&'static str; CacheLevel::COUNT]) -> Self {
        Self {
            predicted: page.register_counters(
                "predicted_cached_tokens",
                "level",
                "Prompt tokens predicted to be cached, of answers whose engine said how many were.",
                levels,
            ),
            loaded: page.register(
                "predicted_loaded_tokens",
                "Those among them that were expected to come from the host's memory. Engines say only the sum.",
                Counter::default(),
            ),
            read: page.register(
                "predicted_read_tokens",
                "Those of the loaded tokens that were expected to be read from files before.",
                Counter::default(),
            ),
            actual: page.register_counters("actual_cached_tokens", "level", "Prompt tokens that engines said were cached.", levels),
            error: page.register(
                "cached_tokens_error",
                "By how many tokens the cached part of a prompt was predicted wrongly, where the cache was known exactly.",
                Histogram::new([0.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0]),
            ),
        }
    }
}

/// Figures of the Batch API.
#[derive(Debug)]
struct BatchMetrics {
    unfinished: Gauge,
    requests: [Counter; 2],
}

impl BatchMetrics {
    fn register(page: &mut MetricRegistry) -> Self {
        Self {
            unfinished: page.register(
                "unfinished_batches",
                "Batches of the Batch API that have not ended, also those that another router runs.",
                Gauge::default(),
            ),
            requests: page.register_counters(
                "batch_requests",
                "result",
                "Requests of the Batch API's batches that have their final answer.",
                ["completed", "failed"],
            ),
        }
    }
}

/// Tier and outcome of a resumption.
const RESUMPTION_OUTCOMES: [&str; 6] = [
    "token_exact_failed",
    "token_exact_resumed",
    "valid_continuation_failed",
    "valid_continuation_resumed",
    "replay_failed",
    "replay_resumed",
];

const RETRIES_DENIED_HELP: &str =
    "Failures that clients got because the retry budget of attempts that were lost, or refused by an engine, was used up.";

/// 1 ms to about 9 minutes, each bucket twice the one before.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 20))
}

impl Default for RouterMetrics {
    /// Metrics that are shown on no page.
    fn default() -> Self {
        Self::register(&mut MetricRegistry::default())
    }
}

impl RouterMetrics {
    /// Registers the metrics on `page`.
    pub fn register(page: &mut MetricRegistry) -> Self {
        let levels = names::<CacheLevel, _>();
        Self {
            answers: page.register_counters(
                "answers",
                "outcome",
                "Answers that had begun, by how they ended.",
                names::<AnswerOutcome, _>(),
            ),
            placements: page.register_counters("placements", "level", "Requests sent to a replica, by how its cache was known.", levels),
            cached_tokens: CachedTokenMetrics::register(page, levels),
            first_token: page.register("first_token_seconds", "From a stream's dispatch to its first token.", seconds()),
            first_token_ratio: page.register(
                "first_token_ratio",
                "Time to the first token of a stream, as a multiple of what was predicted.",
                Histogram::new([0.125, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0, 8.0, 16.0]),
            ),
            queue_time: page.register("queue_seconds", "How long requests waited in the router for a replica with room.", seconds()),
            refused: page.register_counters(
                "refused",
                "reason",
                "Requests that got no engine's answer, by why.",
                names::<RefusalReason, _>(),
            ),
            key_file_reads: page.register_counters(
                "key_file_reads",
                "outcome",
                "How often the key file had changed and was read again, by how that ended; while it fails, the keys before it stay.",
                ["failed", "loaded"],
            ),
            retries: page.register("retries", "Attempts beyond a request's first.", Counter::default()),
            retries_denied: page.register_counters("retries_denied", "budget", RETRIES_DENIED_HELP, ["lost", "refused"]),
            unknown_frames: page.register(
                "unknown_frames",
                "Frames of agents for requests that nobody knows any more.",
                Counter::default(),
            ),
            access_log_dropped: page.register(
                "access_log_dropped",
                "Lines of the access log that were lost, because writing it was stuck.",
                Counter::default(),
            ),
            trace_spans_dropped: page.register("trace_spans_dropped", "Spans that no collector took.", Counter::default()),
            first_byte: page.register("first_byte_seconds", "From a request's arrival to the first byte of its answer.", seconds()),
            answer_duration: page.register("answer_seconds", "From a request's arrival to the last byte of its answer.", seconds()),
            stream_events: page.register("stream_events", "Events of completed streams.", Counter::default()),
            completion_tokens: page.register(
                "completion_tokens",
                "Tokens of completed streams, where their usage was asked for.",
                Counter::default(),
            ),
            resumptions: page.register_counters(
                "resumptions",
                "outcome",
                "Streams whose engine was lost and that could be resumed, by their tier and whether they were.",
                RESUMPTION_OUTCOMES,
            ),
            resumption_reasons: page.register_counters(
                "resumption_reasons",
                "reason",
                "The same, by what was the matter with the engine.",
                names::<LossCause, _>(),
            ),
            resumption_pause: page.register(
                "resumption_pause_seconds",
                "From the loss of a stream's engine to the first piece from another one.",
                seconds(),
            ),
            batches: BatchMetrics::register(page),
        }
    }

    /// Records the resumption of a stream of this tier that has lost its engine. `pause` is how
    /// long it took to go on, if it did.
    pub(crate) fn record_resumption(&self, tier: ResumeTier, cause: LossCause, pause: Option<Duration>) {
        let Some(row) = ResumeTier::RESUMED.iter().position(|name| *name == tier.as_str()) else { return };
        self.resumptions[2 * row + usize::from(pause.is_some())].inc();
        self.resumption_reasons[cause as usize].inc();
        pause.inspect(|pause| self.resumption_pause.observe(pause.as_secs_f64()));
    }

    /// How many streams have left an engine for this reason.
    #[cfg(test)]
    pub(crate) fn resumptions(&self, cause: LossCause) -> u64 {
        self.resumption_reasons[cause as usize].get()
    }

    pub(crate) fn set_unfinished_batches(&self, count: usize) {
        self.batches.unfinished.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(crate) fn count_batch_request(&self, is_success: bool) {
        self.batches.requests[usize::from(!is_success)].inc();
    }

    pub fn observe_first_byte(&self, begun: Instant) {
        self.first_byte.observe(begun.elapsed().as_secs_f64());
    }

    pub fn record_end(&self, outcome: AnswerOutcome, begun: Instant) {
        self.answer_duration.observe(begun.elapsed().as_secs_f64());
        self.answers[outcome as usize].inc();
    }

    pub fn record_stream(&self, events: u64, usage: Option<TokenUsage>) {
        self.stream_events.inc_by(events);
        self.completion_tokens.inc_by(usage.map_or(0, |usage| usage.completion_tokens));
    }

    pub fn count_placement(&self, level: CacheLevel) {
        self.placements[level as usize].inc();
    }

    pub fn observe_queue_time(&self, time: Duration) {
        self.queue_time.observe(time.as_secs_f64());
    }

    /// Compares the seconds until a stream's first token with the predicted seconds.
    pub fn observe_first_token(&self, predicted: f64, took: f64) {
        self.first_token.observe(took);
        self.first_token_ratio.observe(took / predicted.max(1e-6));
    }

    /// Records the tokens that an engine said were cached, beside those that were predicted.
    pub(crate) fn record_cached_tokens(&self, level: CacheLevel, predicted: &Candidate, actual: u32) {
        let metrics = &self.cached_tokens;
        metrics.predicted[level as usize].inc_by(predicted.matched.into());
        metrics.loaded.inc_by(predicted.loaded.into());
        metrics.read.inc_by(predicted.read.into());
        metrics.actual[level as usize].inc_by(actual.into());
        if level == CacheLevel::Exact {
            metrics.error.observe(predicted.matched.abs_diff(actual).into());
        }
    }

    pub fn count_key_file_read(&self, loaded: bool) {
        self.key_file_reads[usize::from(loaded)].inc();
    }

    /// Successful and failed reads of the changed key file.
    #[cfg(test)]
    pub(crate) fn key_file_reads(&self) -> (u64, u64) {
        (self.key_file_reads[1].get(), self.key_file_reads[0].get())
    }

    /// How requests have ended since the router began.
    pub(crate) fn end_counts(&self) -> EndCounts {
        EndCounts {
            answers: std::array::from_fn(|number| self.answers[number].get()),
            refused: std::array::from_fn(|number| self.refused[number].get()),
        }
    }

    pub fn count_refusal(&self, reason: RefusalReason) {
        self.refused[reason as usize].inc();
    }
}
