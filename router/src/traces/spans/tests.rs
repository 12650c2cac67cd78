use hostler_boot::TraceSettings;
use prometheus_client::metrics::counter::Counter;
use tokio::time::advance;

use super::*;
use crate::placement::record;
use crate::traces::exporter;

fn begin() -> RequestTrace {
    let queue = exporter::start(&TraceSettings::for_endpoint("http://127.0.0.1:9".into()), Counter::default()).unwrap();
    RequestTrace::new(7, Some(8), queue)
}

fn end(trace: &RequestTrace) -> RequestEnd<'static> {
    RequestEnd {
        method: &Method::POST,
        path: Some("/v1/chat/completions"),
        id: 0xabc,
        client_id: None,
        model: Some("m"),
        key: "",
        tenant: "",
        status: Some(200),
        outcome: "complete",
        cause: None,
        is_answered: true,
        usage: None,
        resumed: 0,
        bytes: 0,
        total: trace.received.1.elapsed(),
    }
}

/// This many spans of a trace.
pub(crate) fn spans(count: usize) -> Vec<SpanData> {
    let trace = begin();
    let one = request_span(&trace, &end(&trace), trace.received.1);
    vec![one; count]
}

/// Each span's name, the milliseconds from the request's arrival to its begin and end, and its
/// error.
fn shown(trace: &RequestTrace, spans: &[SpanData]) -> Vec<(String, u128, u128, String)> {
    let after = |time: SystemTime| time.duration_since(trace.received.0).unwrap().as_millis();
    let error = |span: &SpanData| if let Status::Error { description } = &span.status { description.to_string() } else { String::new() };
    spans.iter().map(|span| (span.name.to_string(), after(span.start_time), after(span.end_time), error(span))).collect()
}

async fn pass(milliseconds: u64) {
    advance(Duration::from_millis(milliseconds)).await;
}

#[tokio::test(start_paused = true)]
async fn each_step_of_a_request_has_its_span() {
    let decision = record(0xabc, None).await;
    let mut trace = begin();
    pass(10).await;
    trace.record_admission();
    pass(30).await;
    let (silent, _) = trace.begin_attempt(&decision, Duration::from_millis(20)).unwrap();
    pass(50).await;
    trace.end_attempt(silent, None);
    pass(5).await;
    let (answering, parent) = trace.begin_attempt(&decision, Duration::ZERO).unwrap();
    assert_eq!((parent.trace, parent.is_sampled), (7, true));
    trace.record_attempt_status(answering, 200);
    pass(100).await;
    trace.record_first_token(answering);
    pass(300).await;
    trace.record_end(None);
    pass(1).await;
    let spans = of_request(&trace, &end(&trace));
    let row = |name: &str, begun, ended, error: &str| (name.to_owned(), begun, ended, error.to_owned());
    assert_eq!(
        shown(&trace, &spans),
        [
            row("POST /v1/chat/completions", 0, 496, ""),
            row("admission", 0, 10, ""),
            row("placement", 10, 40, ""),
            row("queue", 20, 40, ""),
            row("text_completion m", 40, 90, "given_up"),
            row("placement", 90, 95, ""),
            row("text_completion m", 95, 495, ""),
        ]
    );
    let ids: Vec<SpanId> = spans.iter().map(|span| span.span_context.span_id()).collect();
    let parents: Vec<SpanId> = spans.iter().map(|span| span.parent_span_id).collect();
    assert_eq!(parents, [SpanId::from_bytes(8_u64.to_be_bytes()), ids[0], ids[0], ids[2], ids[0], ids[0], ids[0]]);
    assert_eq!(ids[6], SpanId::from_bytes(parent.span.to_be_bytes()), "what its engine was told");
}

#[tokio::test(start_paused = true)]
async fn a_search_without_a_replica_says_why() {
    let mut trace = begin();
    pass(10).await;
    trace.record_admission();
    pass(90).await;
    let refused = RequestEnd { status: Some(503), outcome: "refused", cause: Some("not_ready"), is_answered: false, ..end(&trace) };
    let shown = shown(&trace, &of_request(&trace, &refused));
    let errors: Vec<(&str, &str)> = shown.iter().map(|(name, _, _, error)| (&**name, &**error)).collect();
    assert_eq!(errors, [("POST /v1/chat/completions", "not_ready"), ("admission", ""), ("placement", "not_ready")]);
    assert_eq!((shown[2].1, shown[2].2), (10, 100));
}

#[tokio::test(start_paused = true)]
async fn a_client_leaving_before_placement_shows_as_waiting() {
    let mut trace = begin();
    trace.record_admission();
    pass(90).await;
    let left = RequestEnd { status: None, outcome: "client_left", is_answered: false, ..end(&trace) };
    let shown = shown(&trace, &of_request(&trace, &left));
    let (name, begun, ended, error) = &shown[2];
    assert_eq!((&**name, *begun, *ended, &**error), ("placement", 0, 90, ""));
}

#[tokio::test(start_paused = true)]
async fn a_silent_engines_attempt_is_marked_as_the_failure() {
    let decision = record(0xabc, None).await;
    let mut trace = begin();
    trace.record_admission();
    let (silent, _) = trace.begin_attempt(&decision, Duration::ZERO).unwrap();
    pass(1000).await;
    trace.end_attempt(silent, None);
    let refused = RequestEnd { status: Some(504), outcome: "refused", cause: Some("too_slow"), is_answered: false, ..end(&trace) };
    let shown = shown(&trace, &of_request(&trace, &refused));
    let errors: Vec<(&str, &str)> = shown.iter().map(|(name, _, _, error)| (&**name, &**error)).collect();
    assert_eq!(
        errors,
        [("POST /v1/chat/completions", "too_slow"), ("admission", ""), ("placement", ""), ("text_completion m", "too_slow")]
    );
}

#[tokio::test(start_paused = true)]
async fn a_trace_records_a_bounded_number_of_attempts() {
    let decision = record(0xabc, None).await;
    let mut trace = begin();
    let noted = (0..100).filter_map(|_| trace.begin_attempt(&decision, Duration::ZERO)).count();
    assert_eq!((noted, trace.attempts.len()), (32, 32));
}

#[test]
fn a_clients_text_cannot_control_a_terminal() {
    assert_eq!(clean("llama \u{1b}[31m\n\u{85}ü"), "llama \u{fffd}[31m\u{fffd}\u{fffd}ü");
}
