use super::*;
use crate::traces::spans::tests::spans;

fn settings(endpoint: &str) -> TraceSettings {
    TraceSettings::for_endpoint(endpoint.into())
}

#[tokio::test]
async fn spans_of_a_trace_wait_or_drop_together() {
    let dropped = Counter::default();
    // Nothing is sent within this test: spans gather for seconds.
    let queue = start(&TraceSettings { max_waiting_spans: 7, ..settings("http://127.0.0.1:9") }, dropped.clone()).unwrap();
    for (count, expected) in [(4, 0), (4, 4), (3, 4), (1, 5)] {
        queue.send(spans(count));
        assert_eq!(dropped.get(), expected);
    }
    assert_eq!(queue.backlog.waiting.load(Ordering::Relaxed), 7);
}

#[tokio::test]
async fn spans_refused_by_a_collector_are_counted_and_dropped() {
    let dropped = Counter::default();
    let hasty = TraceSettings {
        export_interval: Duration::from_millis(10),
        export_timeout: Duration::from_secs(2),
        ..settings("http://127.0.0.1:9")
    };
    let queue = start(&hasty, dropped.clone()).unwrap();
    queue.send(spans(3));
    let lost = async {
        while dropped.get() < 3 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(20), lost).await.unwrap();
    assert_eq!(queue.backlog.waiting.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_collectors_certificate_is_checked_by_system_or_named_authorities() {
    assert!(start(&settings("https://127.0.0.1:9"), Counter::default()).is_ok());
    let mut named = settings("https://127.0.0.1:9");
    named.collector.certificate = Some("/no/such/ca.pem".into());
    let error = start(&named, Counter::default()).unwrap_err().to_string();
    assert!(error.starts_with("OTEL_EXPORTER_OTLP_CERTIFICATE: cannot read /no/such/ca.pem: "), "{error}");
}
