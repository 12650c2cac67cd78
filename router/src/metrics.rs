//! Everything the router counts, declared in one place. Handles are resolved once; the request path only adds to them.

mod fleet_figures;

use std::time::Duration;

use hostler_boot::metrics::{MetricDescription, MetricRegistry};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use tokio::time::Instant;

use crate::cache_level::CacheLevel;
use crate::outcome::{AnswerOutcome, RefusalReason};
use crate::sse::TokenUsage;
pub(crate) use fleet_figures::MetricsSnapshot;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RefusedLabel {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LevelLabel {
    level: &'static str,
}

/// The router's own metrics.
#[derive(Debug)]
pub struct RouterMetrics {
    page: MetricRegistry,
    /// Attempts beyond a request's first.
    pub retries: Counter,
    /// Frames of agents for requests that nobody knows any more.
    pub unknown_frames: Counter,
    /// Lines of the access log for which there was no room.
    pub access_log_dropped: Counter,
    complete: Counter,
    broken: Counter,
    client_left: Counter,
    refused: Family<RefusedLabel, Counter>,
    key_file_reads: [Counter; 2],
    first_byte: Histogram,
    answer_duration: Histogram,
    stream_events: Counter,
    completion_tokens: Counter,
    placements: [Counter; 3],
    predicted_cached: [Counter; 3],
    actual_cached: [Counter; 3],
    cached_error: Histogram,
    first_token: Histogram,
    first_token_ratio: Histogram,
    queue_time: Histogram,
}

/// In the order of the counters by level.
const LEVELS: [CacheLevel; 3] = [CacheLevel::Exact, CacheLevel::Text, CacheLevel::Load];

fn by_level(family: &Family<LevelLabel, Counter>) -> [Counter; 3] {
    LEVELS.map(|level| family.get_or_create(&LevelLabel { level: level.as_str() }).clone())
}

fn counter_for(level: CacheLevel, counters: &[Counter; 3]) -> &Counter {
    match level {
        CacheLevel::Exact => &counters[0],
        CacheLevel::Text => &counters[1],
        CacheLevel::Load => &counters[2],
    }
}

/// A histogram of seconds without labels: 1 ms to about 9 minutes, each bucket twice the one before.
fn register_seconds(page: &mut MetricRegistry, name: &'static str, help: &'static str) -> Histogram {
    page.register_seconds(name, &[], help, Histogram::new(exponential_buckets(0.001, 2.0, 20)))
}

impl Default for RouterMetrics {
    fn default() -> Self {
        let mut page = MetricRegistry::default();
        let outcomes = page.register(
            "answers",
            &["outcome"],
            "Answers that had begun, by how they ended.",
            Family::<OutcomeLabel, Counter>::default(),
        );
        let outcome = |outcome: AnswerOutcome| outcomes.get_or_create(&OutcomeLabel { outcome: outcome.as_str() }).clone();
        let placed = page.register("placements", &["level"], "Requests sent to a replica, by how its cache was known.", Family::default());
        let predicted = page.register(
            "predicted_cached_tokens",
            &["level"],
            "Prompt tokens predicted to be cached, of answers whose engine said how many were.",
            Family::default(),
        );
        let actual = page.register("actual_cached_tokens", &["level"], "Prompt tokens that engines said were cached.", Family::default());
        Self {
            placements: by_level(&placed),
            predicted_cached: by_level(&predicted),
            actual_cached: by_level(&actual),
            cached_error: page.register_histogram(
                "cached_tokens_error",
                &[],
                "By how many tokens the cached part of a prompt was predicted wrongly, where the cache was known exactly.",
                Histogram::new([0.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0]),
            ),
            first_token: register_seconds(&mut page, "first_token", "From a stream's dispatch to its first token."),
            first_token_ratio: page.register_histogram(
                "first_token_ratio",
                &[],
                "Time to the first token of a stream, as a multiple of what was predicted.",
                Histogram::new([0.125, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0, 8.0, 16.0]),
            ),
            queue_time: register_seconds(&mut page, "queue", "How long requests waited in the router for a replica with room."),
            complete: outcome(AnswerOutcome::Complete),
            broken: outcome(AnswerOutcome::Broken),
            client_left: outcome(AnswerOutcome::ClientLeft),
            refused: page.register("refused", &["reason"], "Requests that got no engine's answer, by why.", Family::default()),
            key_file_reads: {
                let help =
                    "How often the key file had changed and was read again, by how that ended; while it fails, the keys before it stay.";
                let family = page.register("key_file_reads", &["outcome"], help, Family::<OutcomeLabel, Counter>::default());
                ["failed", "loaded"].map(|outcome| family.get_or_create(&OutcomeLabel { outcome }).clone())
            },
            retries: page.register("retries", &[], "Attempts beyond a request's first.", Counter::default()),
            unknown_frames: page.register(
                "unknown_frames",
                &[],
                "Frames of agents for requests that nobody knows any more.",
                Counter::default(),
            ),
            access_log_dropped: page.register(
                "access_log_dropped",
                &[],
                "Lines of the access log that were lost, because writing it was stuck.",
                Counter::default(),
            ),
            first_byte: register_seconds(&mut page, "first_byte", "From a request's arrival to the first byte of its answer."),
            answer_duration: register_seconds(&mut page, "answer", "From a request's arrival to the last byte of its answer."),
            stream_events: page.register("stream_events", &[], "Events of completed streams.", Counter::default()),
            completion_tokens: page.register(
                "completion_tokens",
                &[],
                "Tokens of completed streams, where their usage was asked for.",
                Counter::default(),
            ),
            page: {
                page.describe(fleet_figures::descriptions());
                page
            },
        }
    }
}

impl RouterMetrics {
    /// An answer has begun.
    pub fn observe_first_byte(&self, begun: Instant) {
        self.first_byte.observe(begun.elapsed().as_secs_f64());
    }

    /// An answer that had begun has ended.
    pub fn record_end(&self, outcome: AnswerOutcome, begun: Instant) {
        self.answer_duration.observe(begun.elapsed().as_secs_f64());
        match outcome {
            AnswerOutcome::Complete => self.complete.inc(),
            AnswerOutcome::Broken => self.broken.inc(),
            AnswerOutcome::ClientLeft => self.client_left.inc(),
        };
    }

    /// A stream has ended whole.
    pub fn record_stream(&self, events: u64, usage: Option<TokenUsage>) {
        self.stream_events.inc_by(events);
        self.completion_tokens.inc_by(usage.map_or(0, |usage| usage.completion_tokens));
    }

    /// A request is sent to a replica whose cache is known at this level.
    pub fn count_placement(&self, level: CacheLevel) {
        counter_for(level, &self.placements).inc();
    }

    /// A request was queued for this long.
    pub fn observe_queue_time(&self, time: Duration) {
        self.queue_time.observe(time.as_secs_f64());
    }

    /// A stream's first token came after `took` seconds, and not after those that were predicted.
    pub fn observe_first_token(&self, predicted: f64, took: f64) {
        self.first_token.observe(took);
        self.first_token_ratio.observe(took / predicted.max(1e-6));
    }

    /// An engine said how many tokens of a prompt were cached.
    pub fn record_cached_tokens(&self, level: CacheLevel, predicted: u32, actual: u32) {
        counter_for(level, &self.predicted_cached).inc_by(predicted.into());
        counter_for(level, &self.actual_cached).inc_by(actual.into());
        if level == CacheLevel::Exact {
            self.cached_error.observe(predicted.abs_diff(actual).into());
        }
    }

    /// The key file had changed and was read again, or could not be.
    pub fn count_key_file_read(&self, loaded: bool) {
        self.key_file_reads[usize::from(loaded)].inc();
    }

    /// How often the key file was read again: with success, and without.
    #[cfg(test)]
    pub(crate) fn key_file_reads(&self) -> (u64, u64) {
        (self.key_file_reads[1].get(), self.key_file_reads[0].get())
    }

    /// A request got no engine's answer.
    pub fn count_refusal(&self, reason: RefusalReason) {
        self.refused.get_or_create(&RefusedLabel { reason: reason.as_str() }).inc();
    }

    /// The page: the router's own metrics, then those that agents reported, by node and replica.
    #[must_use]
    pub(crate) fn page(&self, now: &MetricsSnapshot<'_>) -> String {
        let mut page = self.page.render();
        fleet_figures::write_page(&mut page, now);
        page
    }

    /// What is on the page, for the manual.
    #[must_use]
    pub fn descriptions(&self) -> &[MetricDescription] {
        self.page.descriptions()
    }
}
