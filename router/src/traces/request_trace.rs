//! The record of one traced request, from its arrival to its end, when it becomes spans. Requests
//! without a trace have no such record.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::exporter::SpanQueue;
use super::trace_parent::TraceParent;
use crate::placement::PlacementDecision;

/// Most attempts that are recorded. A stream of hours may move that often; each of its attempts has
/// two spans.
const MAX_ATTEMPTS: usize = 32;

#[derive(Debug)]
pub(crate) struct RequestTrace {
    pub(super) trace: u128,
    /// The id of the request's own span.
    pub(super) span: u64,
    /// The client's span.
    pub(super) parent: Option<u64>,
    pub(super) received: (SystemTime, Instant),
    pub(super) admitted_at: Option<Instant>,
    /// Since when a replica was last sought.
    pub(super) sought_since: Instant,
    pub(super) attempts: Vec<AttemptTrace>,
    /// When the stream went on elsewhere.
    pub(super) resumed_at: Vec<Instant>,
    pub(super) queue: SpanQueue,
}

/// An attempt to have the request answered.
#[derive(Debug)]
pub(super) struct AttemptTrace {
    pub(super) span: u64,
    pub(super) decision: Arc<PlacementDecision>,
    pub(super) sought_since: Instant,
    pub(super) queued: Duration,
    pub(super) sent_at: Instant,
    pub(super) status: Option<u16>,
    pub(super) first_token_at: Option<Instant>,
    pub(super) ended_at: Option<Instant>,
    /// Why the attempt has failed.
    pub(super) cause: Option<&'static str>,
}

impl AttemptTrace {
    /// Whether the engine has said nothing, and nothing is known to have happened to the attempt.
    pub(super) fn is_unanswered(&self) -> bool {
        self.status.is_none() && self.cause.is_none()
    }
}

impl RequestTrace {
    pub(super) fn new(trace: u128, parent: Option<u64>, queue: SpanQueue) -> Self {
        let now = Instant::now();
        Self {
            trace,
            span: draw_span_id(),
            parent,
            received: (SystemTime::now(), now),
            admitted_at: None,
            sought_since: now,
            attempts: Vec::new(),
            resumed_at: Vec::new(),
            queue,
        }
    }

    pub(crate) fn id(&self) -> u128 {
        self.trace
    }

    /// Whether the client has begun the trace.
    pub(crate) fn has_parent(&self) -> bool {
        self.parent.is_some()
    }

    pub(crate) fn record_admission(&mut self) {
        let now = Instant::now();
        self.admitted_at = Some(now);
        self.sought_since = now;
    }

    /// Records that another replica is sought for a stream, which its engine continues meanwhile.
    pub(crate) fn record_search(&mut self) {
        self.sought_since = Instant::now();
    }

    /// Records an attempt that is sent now. Returns its number here, and the trace parent for its
    /// engine.
    pub(crate) fn begin_attempt(&mut self, decision: &Arc<PlacementDecision>, queued: Duration) -> Option<(usize, TraceParent)> {
        if self.attempts.len() >= MAX_ATTEMPTS {
            return None;
        }
        let span = draw_span_id();
        self.attempts.push(AttemptTrace {
            span,
            decision: decision.clone(),
            sought_since: self.sought_since,
            queued,
            sent_at: Instant::now(),
            status: None,
            first_token_at: None,
            ended_at: None,
            cause: None,
        });
        Some((self.attempts.len() - 1, TraceParent { trace: self.trace, span, is_sampled: true }))
    }

    pub(crate) fn record_attempt_status(&mut self, attempt: usize, status: u16) {
        self.attempts[attempt].status = Some(status);
    }

    pub(crate) fn record_first_token(&mut self, attempt: usize) {
        self.attempts[attempt].first_token_at.get_or_insert_with(Instant::now);
    }

    /// Records the end of an attempt, unless it has ended before.
    pub(crate) fn end_attempt(&mut self, attempt: usize, cause: Option<&'static str>) {
        let attempt = &mut self.attempts[attempt];
        if attempt.ended_at.is_none() {
            let now = Instant::now();
            (attempt.ended_at, attempt.cause) = (Some(now), cause);
            self.sought_since = now;
        }
    }

    pub(crate) fn record_resumption(&mut self) {
        self.resumed_at.push(Instant::now());
    }

    /// Records the end of an answer, and with it of the attempt that gave it.
    pub(crate) fn record_end(&mut self, cause: Option<&'static str>) {
        for attempt in 0..self.attempts.len() {
            self.end_attempt(attempt, cause);
        }
    }
}

/// Draws a span id. 0 would mean none.
pub(super) fn draw_span_id() -> u64 {
    fastrand::u64(1..)
}
