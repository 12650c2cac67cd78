//! Everything the router counts, declared in one place. Handles are resolved once; the request path only adds to them.

mod figures;

use std::time::Duration;

use hostler_boot::metrics::{Described, Metrics};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use tokio::time::Instant;

use crate::dispatch::Usage;
use crate::placement::Level;
pub(crate) use figures::Now;

/// How an answer that had begun came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Whole.
    Complete,
    /// The engine or its node broke off.
    Broken,
    /// The client left first.
    ClientLeft,
}

impl Outcome {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Broken => "broken",
            Self::ClientLeft => "client_left",
        }
    }
}

/// Why a request got no engine's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The request itself: malformed, too large, or of an unknown model.
    Request,
    /// It shows no key, and keys are wanted.
    NoKey,
    /// Its key is not valid.
    WrongKey,
    /// The router was full.
    Full,
    /// Its caller has reached a limit.
    Limit,
    /// No replica could take it, or each attempt was lost.
    Fleet,
    /// It kills engines.
    Poison,
}

impl Refused {
    fn word(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::NoKey => "no_key",
            Self::WrongKey => "wrong_key",
            Self::Full => "full",
            Self::Limit => "limit",
            Self::Fleet => "fleet",
            Self::Poison => "poison",
        }
    }
}

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

/// The router's own figures.
#[derive(Debug)]
pub struct RouterMetrics {
    page: Metrics,
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
    keys_read: [Counter; 2],
    first_byte: Histogram,
    duration: Histogram,
    events: Counter,
    tokens: Counter,
    placed: [Counter; 3],
    predicted_cached: [Counter; 3],
    actual_cached: [Counter; 3],
    cached_error: Histogram,
    first_token: Histogram,
    first_token_ratio: Histogram,
    held: Histogram,
}

/// In the order of the counters by level.
const LEVELS: [Level; 3] = [Level::Exact, Level::Text, Level::Load];

fn by_level(family: &Family<LevelLabel, Counter>) -> [Counter; 3] {
    LEVELS.map(|level| family.get_or_create(&LevelLabel { level: level.word() }).clone())
}

fn of(level: Level, counters: &[Counter; 3]) -> &Counter {
    match level {
        Level::Exact => &counters[0],
        Level::Text => &counters[1],
        Level::Load => &counters[2],
    }
}

/// 1 ms to about 9 minutes, each bucket twice the one before.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 20))
}

impl Default for RouterMetrics {
    fn default() -> Self {
        let mut page = Metrics::default();
        let outcomes =
            page.counter("answers", &["outcome"], "Answers that had begun, by how they ended.", Family::<OutcomeLabel, Counter>::default());
        let outcome = |outcome: Outcome| outcomes.get_or_create(&OutcomeLabel { outcome: outcome.word() }).clone();
        let placed = page.counter("placements", &["level"], "Requests sent to a replica, by how its cache was known.", Family::default());
        let predicted = page.counter(
            "predicted_cached_tokens",
            &["level"],
            "Prompt tokens predicted to be cached, of answers whose engine said how many were.",
            Family::default(),
        );
        let actual = page.counter("actual_cached_tokens", &["level"], "Prompt tokens that engines said were cached.", Family::default());
        Self {
            placed: by_level(&placed),
            predicted_cached: by_level(&predicted),
            actual_cached: by_level(&actual),
            cached_error: page.histogram(
                "cached_tokens_error",
                &[],
                "By how many tokens the cached part of a prompt was predicted wrongly, where the cache was known exactly.",
                Histogram::new([0.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0]),
            ),
            first_token: page.seconds("first_token", &[], "From a stream's dispatch to its first token.", seconds()),
            first_token_ratio: page.histogram(
                "first_token_ratio",
                &[],
                "Time to the first token of a stream, as a multiple of what was predicted.",
                Histogram::new([0.125, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0, 8.0, 16.0]),
            ),
            held: page.seconds("held", &[], "How long requests waited in the router for a replica with room.", seconds()),
            complete: outcome(Outcome::Complete),
            broken: outcome(Outcome::Broken),
            client_left: outcome(Outcome::ClientLeft),
            refused: page.counter("refused", &["reason"], "Requests that got no engine's answer, by why.", Family::default()),
            keys_read: {
                let help =
                    "How often the key file had changed and was read again, by how that ended; while it fails, the keys before it stay.";
                let family = page.counter("keys_read", &["outcome"], help, Family::<OutcomeLabel, Counter>::default());
                ["failed", "loaded"].map(|outcome| family.get_or_create(&OutcomeLabel { outcome }).clone())
            },
            retries: page.counter("retries", &[], "Attempts beyond a request's first.", Counter::default()),
            unknown_frames: page.counter(
                "unknown_frames",
                &[],
                "Frames of agents for requests that nobody knows any more.",
                Counter::default(),
            ),
            access_log_dropped: page.counter(
                "access_log_dropped",
                &[],
                "Lines of the access log that were lost, because writing it was stuck.",
                Counter::default(),
            ),
            first_byte: page.seconds("first_byte", &[], "From a request's arrival to the first byte of its answer.", seconds()),
            duration: page.seconds("answer", &[], "From a request's arrival to the last byte of its answer.", seconds()),
            events: page.counter("stream_events", &[], "Events of completed streams.", Counter::default()),
            tokens: page.counter(
                "completion_tokens",
                &[],
                "Tokens of completed streams, where their usage was asked for.",
                Counter::default(),
            ),
            page: {
                page.describe(figures::descriptions());
                page
            },
        }
    }
}

impl RouterMetrics {
    /// An answer has begun.
    pub fn first_byte(&self, begun: Instant) {
        self.first_byte.observe(begun.elapsed().as_secs_f64());
    }

    /// An answer that had begun has ended.
    pub fn ended(&self, outcome: Outcome, begun: Instant) {
        self.duration.observe(begun.elapsed().as_secs_f64());
        match outcome {
            Outcome::Complete => self.complete.inc(),
            Outcome::Broken => self.broken.inc(),
            Outcome::ClientLeft => self.client_left.inc(),
        };
    }

    /// A stream has ended whole.
    pub fn streamed(&self, events: u64, usage: Option<Usage>) {
        self.events.inc_by(events);
        self.tokens.inc_by(usage.map_or(0, |usage| usage.completion));
    }

    /// A request is sent to a replica whose cache is known at this level.
    pub fn placed(&self, level: Level) {
        of(level, &self.placed).inc();
    }

    /// A request was held for this long.
    pub fn held(&self, time: Duration) {
        self.held.observe(time.as_secs_f64());
    }

    /// A stream's first token came after `took` seconds, and not after those that were predicted.
    pub fn first_token(&self, predicted: f64, took: f64) {
        self.first_token.observe(took);
        self.first_token_ratio.observe(took / predicted.max(1e-6));
    }

    /// An engine said how many tokens of a prompt were cached.
    pub fn cached(&self, level: Level, predicted: u32, actual: u32) {
        of(level, &self.predicted_cached).inc_by(predicted.into());
        of(level, &self.actual_cached).inc_by(actual.into());
        if level == Level::Exact {
            self.cached_error.observe(predicted.abs_diff(actual).into());
        }
    }

    /// The key file had changed and was read again, or could not be.
    pub fn keys_read(&self, loaded: bool) {
        self.keys_read[usize::from(loaded)].inc();
    }

    /// How often the key file was read again: with success, and without.
    #[cfg(test)]
    pub(crate) fn keys_were_read(&self) -> (u64, u64) {
        (self.keys_read[1].get(), self.keys_read[0].get())
    }

    /// A request got no engine's answer.
    pub fn refused(&self, reason: Refused) {
        self.refused.get_or_create(&RefusedLabel { reason: reason.word() }).inc();
    }

    /// The page: the router's own figures, then those that agents reported, by node and replica.
    #[must_use]
    pub(crate) fn page(&self, now: &Now<'_>) -> String {
        let mut page = self.page.text();
        figures::write(&mut page, now);
        page
    }

    /// What is on the page, for the manual.
    #[must_use]
    pub fn described(&self) -> &[Described] {
        self.page.described()
    }
}
