//! What a load measured, as a table for people and as JSON for scripts.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::histogram::Histogram;

/// How one request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Success,
    Status,
    Unreachable,
    Transport,
    Truncated,
    Aborted,
    ErrorEvent,
}

/// Requests that failed, by the way they did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Errors {
    /// Answered with another status than 200.
    pub status: u64,
    /// The connection failed or broke.
    pub transport: u64,
    /// Not complete within the time for one request.
    pub timeout: u64,
    /// A stream that ended cleanly without a finish reason or without `[DONE]`.
    pub truncated: u64,
    /// A stream that ended with finish reason `abort`.
    pub aborted: u64,
    /// A stream that contained an error event.
    pub error_event: u64,
}

/// Times in milliseconds; all zero when nothing was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Quantiles {
    /// Half of the times are no longer.
    pub p50: f64,
    /// 90 % of the times are no longer.
    pub p90: f64,
    /// 99 % of the times are no longer.
    pub p99: f64,
    /// The longest time.
    pub max: f64,
}

/// The outcome of a load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LoadReport {
    /// Requests that ended, in any way.
    pub requests: u64,
    /// Requests that were answered completely.
    pub succeeded: u64,
    /// The others.
    pub errors: Errors,
    /// Events read, `[DONE]` included.
    pub events: u64,
    /// Length of the load in seconds.
    pub seconds: f64,
    /// Time to the first event.
    pub first_event_ms: Quantiles,
    /// Time between events that follow each other.
    pub between_events_ms: Quantiles,
    /// Time of whole successful requests.
    pub request_ms: Quantiles,
}

/// Counts while the load runs.
#[derive(Debug, Default)]
pub(super) struct Tally {
    requests: u64,
    succeeded: u64,
    errors: Errors,
    events: u64,
    first: Histogram,
    between: Histogram,
    whole: Histogram,
}

impl Tally {
    /// The first read of a stream; further events in it came at the same time.
    pub(super) fn first_event(&mut self, time: Duration, events: u64) {
        self.events += events;
        self.first.add(time, 1);
        self.between.add(Duration::ZERO, events - 1);
    }

    /// A later read.
    pub(super) fn next_events(&mut self, time: Duration, events: u64) {
        self.events += events;
        self.between.add(time, 1);
        self.between.add(Duration::ZERO, events - 1);
    }

    pub(super) fn request_time(&mut self, time: Duration) {
        self.whole.add(time, 1);
    }

    /// Counts a request that ended; `None` is one that took too long. True if it
    /// could not be sent at all.
    pub(super) fn record(&mut self, outcome: Option<Outcome>) -> bool {
        self.requests += 1;
        let count = match outcome {
            Some(Outcome::Success) => &mut self.succeeded,
            Some(Outcome::Status) => &mut self.errors.status,
            Some(Outcome::Unreachable | Outcome::Transport) => &mut self.errors.transport,
            Some(Outcome::Truncated) => &mut self.errors.truncated,
            Some(Outcome::Aborted) => &mut self.errors.aborted,
            Some(Outcome::ErrorEvent) => &mut self.errors.error_event,
            None => &mut self.errors.timeout,
        };
        *count += 1;
        outcome == Some(Outcome::Unreachable)
    }

    pub(super) fn report(&self, time: Duration) -> LoadReport {
        LoadReport {
            requests: self.requests,
            succeeded: self.succeeded,
            errors: self.errors,
            events: self.events,
            seconds: time.as_secs_f64(),
            first_event_ms: Quantiles::of(&self.first),
            between_events_ms: Quantiles::of(&self.between),
            request_ms: Quantiles::of(&self.whole),
        }
    }
}

impl Quantiles {
    fn of(histogram: &Histogram) -> Self {
        Self { p50: histogram.quantile(0.5), p90: histogram.quantile(0.9), p99: histogram.quantile(0.99), max: histogram.longest() }
    }
}

impl Errors {
    /// Requests that failed in any way.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.status + self.transport + self.timeout + self.truncated + self.aborted + self.error_event
    }
}

impl LoadReport {
    /// Requests that ended in one second, on average.
    #[must_use]
    pub fn requests_per_second(&self) -> f64 {
        per_second(self.requests, self.seconds)
    }

    /// Events read in one second, on average.
    #[must_use]
    pub fn events_per_second(&self) -> f64 {
        per_second(self.events, self.seconds)
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^52")]
fn per_second(count: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Errors { status, transport, timeout, truncated, aborted, error_event } = self.errors;
        let Self { requests, succeeded, events, seconds, .. } = self;
        writeln!(
            formatter,
            "{requests} requests in {seconds:.2} s ({:.1}/s), {succeeded} succeeded, {} failed",
            self.requests_per_second(),
            self.errors.total()
        )?;
        writeln!(formatter, "{events} events ({:.0}/s)", self.events_per_second())?;
        if self.errors.total() > 0 {
            writeln!(
                formatter,
                "failed: {status} by status, {transport} by connection, {timeout} by timeout, {truncated} truncated, {aborted} aborted, {error_event} with an error event"
            )?;
        }
        writeln!(formatter, "{:<16}{:>10}{:>10}{:>10}{:>10}", "ms", "p50", "p90", "p99", "max")?;
        let rows = [("first event", self.first_event_ms), ("between events", self.between_events_ms), ("request", self.request_ms)];
        for (name, Quantiles { p50, p90, p99, max }) in rows {
            writeln!(formatter, "{name:<16}{p50:>10.2}{p90:>10.2}{p99:>10.2}{max:>10.2}")?;
        }
        Ok(())
    }
}
