//! Converts the record of a request to its spans. Pure, except for the ids that are drawn.

use std::time::{Duration, SystemTime};

use hostler_api::Route;
use http::Method;
use opentelemetry::trace::{Event, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue, Value};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};
use tokio::time::Instant;

use super::names;
use super::request_trace::{AttemptTrace, RequestTrace, draw_span_id};
use crate::client_text::cut;
use crate::outcome::AnswerOutcome;
use crate::sse::TokenUsage;

/// Shortest time that counts as queueing: the search for a replica itself takes some of it.
const SHORTEST_QUEUE: Duration = Duration::from_millis(1);

/// The end of a request, as in its line of the access log.
#[derive(Debug)]
pub(crate) struct RequestEnd<'a> {
    pub(crate) method: &'a Method,
    pub(crate) path: Option<&'a str>,
    /// 0 means that the request was for no engine.
    pub(crate) id: u64,
    pub(crate) client_id: Option<&'a str>,
    pub(crate) model: Option<&'a str>,
    pub(crate) key: &'a str,
    pub(crate) tenant: &'a str,
    pub(crate) status: Option<u16>,
    pub(crate) outcome: &'static str,
    /// Why the request was refused or broke.
    pub(crate) cause: Option<&'static str>,
    /// Whether an engine's answer had begun.
    pub(crate) is_answered: bool,
    pub(crate) usage: Option<TokenUsage>,
    pub(crate) resumed: u32,
    pub(crate) bytes: u64,
    pub(crate) total: Duration,
}

impl RequestTrace {
    /// Sends the request's spans.
    pub(crate) fn finish(self, end: &RequestEnd<'_>) {
        self.queue.send(of_request(&self, end));
    }
}

/// The spans of a request, the request's own first.
fn of_request(trace: &RequestTrace, end: &RequestEnd<'_>) -> Vec<SpanData> {
    let ended_at = trace.received.1 + end.total;
    let mut spans = vec![request_span(trace, end, ended_at)];
    if end.id != 0 {
        spans.push(admission_span(trace, end, ended_at));
    }
    for (number, attempt) in trace.attempts.iter().enumerate() {
        let is_last = number + 1 == trace.attempts.len();
        spans.extend(placement_spans(trace, attempt));
        spans.push(attempt_span(trace, attempt, end, ended_at, is_last));
    }
    spans.extend(vain_placement_span(trace, end, ended_at));
    spans
}

fn request_span(trace: &RequestTrace, end: &RequestEnd<'_>, ended_at: Instant) -> SpanData {
    let route = end.path.and_then(names::route);
    let method = names::method(end.method);
    let mut attributes = Attributes::default();
    attributes.add(names::METHOD, method);
    attributes.add_some(names::ROUTE, route);
    attributes.add_text(names::PATH, end.path);
    attributes.add_some(names::STATUS, end.status.map(i64::from));
    attributes.add_some(names::OPERATION, engine_path(trace).or(end.path).and_then(|path| Route::of(path).operation()));
    attributes.add_text(names::MODEL, end.model);
    attributes.add_usage(end.usage);
    attributes.add_some(names::REQUEST_ID, (end.id != 0).then(|| format!("{:016x}", end.id)));
    attributes.add_text(names::CLIENT_ID, end.client_id);
    attributes.add_text(names::KEY, Some(end.key).filter(|key| !key.is_empty()));
    attributes.add_text(names::TENANT, Some(end.tenant).filter(|tenant| !tenant.is_empty()));
    attributes.add(names::OUTCOME, end.outcome);
    attributes.add_some(names::ATTEMPTS, Some(trace.attempts.len()).filter(|count| *count > 0).map(count));
    attributes.add_some(names::RESUMED, Some(i64::from(end.resumed)).filter(|count| *count > 0));
    attributes.add(names::BYTES, i64::try_from(end.bytes).unwrap_or(i64::MAX));
    attributes.add_some(names::ERROR, end.cause);
    // By the conventions, a client's own error is none of the server.
    let has_failed = end.status.is_some_and(|status| status >= 500) || end.outcome == "broken";
    let method = if method == "_OTHER" { "HTTP" } else { method };
    let name = route.map_or_else(|| method.to_owned(), |route| format!("{method} {route}"));
    SpanData {
        name: name.into(),
        span_kind: SpanKind::Server,
        parent_span_id: SpanId::from_bytes(trace.parent.unwrap_or_default().to_be_bytes()),
        parent_span_is_remote: true,
        events: events(trace.resumed_at.iter().map(|at| Event::new(names::RESUMPTION, wall_time(trace, *at), Vec::new(), 0))),
        ..span(trace, trace.span, (trace.received.1, ended_at), attributes, has_failed.then_some(end.cause).flatten())
    }
}

/// The time from a request's arrival until it was admitted: its body was read, its key may send it,
/// its tenant has room.
fn admission_span(trace: &RequestTrace, end: &RequestEnd<'_>, ended_at: Instant) -> SpanData {
    let failure = if trace.admitted_at.is_none() { end.cause } else { None };
    let mut attributes = Attributes::default();
    attributes.add_some(names::ERROR, failure);
    let until = trace.admitted_at.unwrap_or(ended_at);
    child(trace.span, names::ADMISSION, span(trace, draw_span_id(), (trace.received.1, until), attributes, failure))
}

/// The choice of an attempt's replica, and within it the time in the queue.
fn placement_spans(trace: &RequestTrace, attempt: &AttemptTrace) -> Vec<SpanData> {
    let decision = &attempt.decision;
    let (replica, choice) = decision.choice();
    let mut attributes = Attributes::default();
    attributes.add(names::REPLICA, replica.to_owned());
    attributes.add(names::REASON, decision.reason());
    attributes.add(names::CANDIDATES, count(decision.decision.candidates));
    attributes.add(names::CACHE_LEVEL, decision.level.as_str());
    attributes.add(names::PROMPT_TOKENS, i64::from(decision.prompt_tokens));
    attributes.add(names::CACHED_TOKENS, i64::from(choice.candidate.matched));
    attributes.add(names::UNCACHED_TOKENS, i64::from(choice.uncached));
    attributes.add(names::PREDICTED_SECONDS, choice.terms.first_token());
    let placement = span(trace, draw_span_id(), (attempt.sought_since, attempt.sent_at), attributes, None);
    let placement = child(trace.span, names::PLACEMENT, placement);
    if attempt.queued < SHORTEST_QUEUE {
        return vec![placement];
    }
    let since = attempt.sent_at.checked_sub(attempt.queued).map_or(attempt.sought_since, |since| since.max(attempt.sought_since));
    let id = u64::from_be_bytes(placement.span_context.span_id().to_bytes());
    let queue = child(id, names::QUEUE, span(trace, draw_span_id(), (since, attempt.sent_at), Attributes::default(), None));
    vec![placement, queue]
}

/// The search for a replica that ended without one.
fn vain_placement_span(trace: &RequestTrace, end: &RequestEnd<'_>, ended_at: Instant) -> Option<SpanData> {
    // Otherwise the wait for an attempt was in vain.
    let was_sought = trace.attempts.last().is_none_or(|attempt| !attempt.is_unanswered());
    // A client that has left has waited all the same, and nobody gives a cause for that.
    let has_failed = end.cause.is_some() || end.outcome == AnswerOutcome::ClientLeft.as_str();
    if trace.admitted_at.is_none() || end.is_answered || end.id == 0 || !was_sought || !has_failed {
        return None;
    }
    let mut attributes = Attributes::default();
    attributes.add_some(names::ERROR, end.cause);
    let vain = span(trace, draw_span_id(), (trace.sought_since, ended_at), attributes, end.cause);
    Some(child(trace.span, names::PLACEMENT, vain))
}

fn attempt_span(trace: &RequestTrace, attempt: &AttemptTrace, end: &RequestEnd<'_>, ended_at: Instant, is_last: bool) -> SpanData {
    let decision = &attempt.decision;
    let operation = Route::of(&decision.path).operation();
    let refused = attempt.status.filter(|status| *status >= 400);
    let unanswered = if is_last { end.cause } else { Some(names::GIVEN_UP) };
    let failure = attempt.cause.or(refused.map(|_| "engine")).or(unanswered.filter(|_| attempt.is_unanswered()));
    let mut attributes = Attributes::default();
    attributes.add(names::ATTEMPT, i64::from(decision.attempt));
    attributes.add(names::REPLICA, decision.choice().0.to_owned());
    attributes.add_some(names::OPERATION, operation);
    attributes.add(names::PROVIDER, names::VLLM);
    attributes.add_text(names::MODEL, decision.model.as_deref());
    attributes.add_some(names::STATUS, attempt.status.map(i64::from));
    attributes.add_some(names::ERROR, failure);
    let first_token = attempt.first_token_at;
    attributes.add_some(names::FIRST_CHUNK_SECONDS, first_token.map(|at| at.saturating_duration_since(attempt.sent_at).as_secs_f64()));
    attributes.add_usage(end.usage.filter(|_| is_last));
    let operation = operation.unwrap_or("request");
    let name = decision.model.as_deref().map_or_else(|| operation.to_owned(), |model| format!("{operation} {}", clean(model)));
    SpanData {
        name: name.into(),
        span_kind: SpanKind::Client,
        parent_span_id: SpanId::from_bytes(trace.span.to_be_bytes()),
        events: events(first_token.map(|at| Event::new(names::FIRST_TOKEN, wall_time(trace, at), Vec::new(), 0))),
        ..span(trace, attempt.span, (attempt.sent_at, attempt.ended_at.unwrap_or(ended_at)), attributes, failure)
    }
}

/// The engine's path that the request was sent to. For other APIs it differs from the request's
/// path.
fn engine_path(trace: &RequestTrace) -> Option<&str> {
    trace.attempts.first().map(|attempt| &*attempt.decision.path)
}

fn child(parent: u64, name: &'static str, span: SpanData) -> SpanData {
    SpanData { name: name.into(), parent_span_id: SpanId::from_bytes(parent.to_be_bytes()), ..span }
}

/// A span within this process that has no name and no parent yet.
fn span(
    trace: &RequestTrace,
    id: u64,
    (begun, ended): (Instant, Instant),
    attributes: Attributes,
    failure: Option<&'static str>,
) -> SpanData {
    let (trace_id, span_id) = (TraceId::from_bytes(trace.trace.to_be_bytes()), SpanId::from_bytes(id.to_be_bytes()));
    SpanData {
        // The client's `tracestate` is left out: it is the client's own text.
        span_context: SpanContext::new(trace_id, span_id, TraceFlags::SAMPLED, false, TraceState::NONE),
        parent_span_id: SpanId::INVALID,
        parent_span_is_remote: false,
        span_kind: SpanKind::Internal,
        name: "".into(),
        start_time: wall_time(trace, begun),
        end_time: wall_time(trace, ended),
        attributes: attributes.0,
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: SpanLinks::default(),
        status: failure.map_or(Status::Unset, |failure| Status::Error { description: failure.into() }),
        instrumentation_scope: InstrumentationScope::builder("hostler").with_version(env!("CARGO_PKG_VERSION")).build(),
    }
}

fn events(list: impl IntoIterator<Item = Event>) -> SpanEvents {
    let mut events = SpanEvents::default();
    events.events = list.into_iter().collect();
    events
}

/// The wall-clock time of a moment. The wall clock may jump while a request runs, so all times are
/// computed from the request's arrival.
fn wall_time(trace: &RequestTrace, at: Instant) -> SystemTime {
    trace.received.0 + at.saturating_duration_since(trace.received.1)
}

fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// A client's or an agent's text, cut, without anything that could control a terminal.
fn clean(text: &str) -> String {
    cut(text).chars().map(|letter| if letter.is_control() { char::REPLACEMENT_CHARACTER } else { letter }).collect()
}

#[derive(Default)]
struct Attributes(Vec<KeyValue>);

impl Attributes {
    fn add(&mut self, name: &'static str, value: impl Into<Value>) {
        self.0.push(KeyValue::new(name, value));
    }

    fn add_some(&mut self, name: &'static str, value: Option<impl Into<Value>>) {
        self.0.extend(value.map(|value| KeyValue::new(name, value)));
    }

    fn add_text(&mut self, name: &'static str, value: Option<&str>) {
        self.add_some(name, value.map(clean));
    }

    fn add_usage(&mut self, usage: Option<TokenUsage>) {
        let tokens = |tokens: u64| i64::try_from(tokens).unwrap_or(i64::MAX);
        self.add_some(names::INPUT_TOKENS, usage.map(|usage| tokens(usage.prompt_tokens)));
        self.add_some(names::OUTPUT_TOKENS, usage.map(|usage| tokens(usage.completion_tokens)));
        self.add_some(names::CACHED_INPUT_TOKENS, usage.and_then(|usage| usage.cached_tokens).map(tokens));
    }
}

#[cfg(test)]
pub(super) mod tests;
