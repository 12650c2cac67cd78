//! A collector of OpenTelemetry, in this process: it keeps the spans and events it receives, or
//! accepts them and never answers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hostler_boot::TraceSettings;
use opentelemetry_proto::tonic::collector::logs::v1::logs_service_server::{LogsService, LogsServiceServer};
use opentelemetry_proto::tonic::collector::logs::v1::{ExportLogsServiceRequest, ExportLogsServiceResponse};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value::Value as WireValue;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::logs::v1::LogRecord;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Response, Status};

use super::wait::until;

#[derive(Debug)]
pub(crate) struct Collector {
    pub(crate) address: SocketAddr,
    kept: Arc<Kept>,
    _server: AbortOnDropHandle<()>,
}

#[derive(Debug, Default)]
struct Kept {
    spans: Mutex<Vec<Collected>>,
    events: Mutex<Vec<CollectedEvent>>,
    /// Everything received, in its debug form.
    text: Mutex<String>,
    hangs: AtomicBool,
}

/// A span as it came.
#[derive(Debug, Clone)]
pub(crate) struct Collected {
    pub(crate) trace: String,
    pub(crate) id: String,
    /// Id of the parent; empty if there is none.
    pub(crate) parent: String,
    pub(crate) name: String,
    pub(crate) kind: SpanKind,
    pub(crate) attributes: BTreeMap<String, Value>,
    pub(crate) events: Vec<String>,
    /// Error of the span, if it has one.
    pub(crate) error: Option<String>,
    /// Times in nanoseconds.
    pub(crate) times: (u64, u64),
    /// Service name of the sender.
    pub(crate) service: Value,
}

/// An event as it came.
#[derive(Debug, Clone)]
pub(crate) struct CollectedEvent {
    pub(crate) name: String,
    pub(crate) severity: String,
    pub(crate) body: Value,
    pub(crate) attributes: BTreeMap<String, Value>,
    /// Service name of the sender.
    pub(crate) service: Value,
    pub(crate) host: Value,
}

impl Collector {
    pub(crate) async fn start() -> Self {
        Self::at("127.0.0.1:0".parse().unwrap()).await
    }

    pub(crate) async fn at(address: SocketAddr) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let kept = Arc::<Kept>::default();
        let (traces, logs) = (TraceServiceServer::new(Receiver(kept.clone())), LogsServiceServer::new(Receiver(kept.clone())));
        let serving = tonic::transport::Server::builder().add_service(traces).add_service(logs);
        let serving = serving.serve_with_incoming(TcpListenerStream::new(listener));
        let server = AbortOnDropHandle::new(tokio::spawn(async { serving.await.unwrap() }));
        Self { address, kept, _server: server }
    }

    /// Makes the collector accept everything from now on without ever answering.
    pub(crate) fn hang(&self) {
        self.kept.hangs.store(true, Ordering::Relaxed);
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Settings for a router that sends its spans at once.
    pub(crate) fn settings(&self) -> TraceSettings {
        TraceSettings { export_interval: Duration::from_millis(20), ..TraceSettings::for_endpoint(self.endpoint()) }
    }

    pub(crate) fn spans(&self) -> Vec<Collected> {
        self.kept.spans.lock().clone()
    }

    /// First event of this name that meets the condition, once it has come.
    pub(crate) async fn event(&self, name: &str, is: impl Fn(&CollectedEvent) -> bool) -> CollectedEvent {
        until(&format!("the event {name}"), async || {
            let events = self.kept.events.lock();
            events.iter().find(|event| event.name == name && is(event)).cloned().ok_or_else(|| format!("{events:#?}"))
        })
        .await
    }

    pub(crate) fn text(&self) -> String {
        self.kept.text.lock().clone()
    }

    /// Spans of the request with this number of the router's, the request's own first, once that
    /// has come.
    pub(crate) async fn trace(&self, request: &str) -> Vec<Collected> {
        self.trace_where(request, |span| span.attributes.get("hostler.request.id") == Some(&json!(request))).await
    }

    /// Spans of the request whose own span meets the condition.
    pub(crate) async fn trace_where(&self, what: &str, is: impl Fn(&Collected) -> bool) -> Vec<Collected> {
        until(&format!("the trace of {what}"), async || {
            let spans = self.spans();
            let Some(root) = spans.iter().find(|span| is(span)) else { return Err(format!("{spans:#?}")) };
            // The spans of a request are sent together, but may come in two batches.
            let of_trace = spans.iter().filter(|span| span.trace == root.trace && span.id != root.id).cloned();
            Ok([root.clone()].into_iter().chain(of_trace).collect())
        })
        .await
    }
}

impl Collected {
    pub(crate) fn attribute(&self, name: &str) -> Value {
        self.attributes.get(name).cloned().unwrap_or_default()
    }

    fn new(span: Span, service: Value) -> Self {
        let error = span.status.as_ref().filter(|status| status.code == 2).map(|status| status.message.clone());
        Self {
            trace: hex(&span.trace_id),
            id: hex(&span.span_id),
            parent: hex(&span.parent_span_id),
            kind: span.kind(),
            attributes: attributes(span.attributes),
            events: span.events.into_iter().map(|event| event.name).collect(),
            error,
            times: (span.start_time_unix_nano, span.end_time_unix_nano),
            name: span.name,
            service,
        }
    }
}

impl CollectedEvent {
    fn new(record: LogRecord, service: Value, host: Value) -> Self {
        let body = record.body.map(value).unwrap_or_default();
        Self { name: record.event_name, severity: record.severity_text, body, attributes: attributes(record.attributes), service, host }
    }
}

#[derive(Debug)]
struct Receiver(Arc<Kept>);

#[tonic::async_trait]
impl TraceService for Receiver {
    async fn export(&self, request: Request<ExportTraceServiceRequest>) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let request = self.0.receive(request).await;
        for of_resource in request.resource_spans {
            let service = attributes(of_resource.resource.unwrap_or_default().attributes).remove("service.name").unwrap_or_default();
            let spans = of_resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            self.0.spans.lock().extend(spans.map(|span| Collected::new(span, service.clone())));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

#[tonic::async_trait]
impl LogsService for Receiver {
    async fn export(&self, request: Request<ExportLogsServiceRequest>) -> Result<Response<ExportLogsServiceResponse>, Status> {
        let request = self.0.receive(request).await;
        for of_resource in request.resource_logs {
            let mut sender = attributes(of_resource.resource.unwrap_or_default().attributes);
            let mut take = |name: &str| sender.remove(name).unwrap_or_default();
            let (service, host) = (take("service.name"), take("host.name"));
            let records = of_resource.scope_logs.into_iter().flat_map(|scope| scope.log_records);
            self.0.events.lock().extend(records.map(|record| CollectedEvent::new(record, service.clone(), host.clone())));
        }
        Ok(Response::new(ExportLogsServiceResponse::default()))
    }
}

impl Kept {
    async fn receive<T: std::fmt::Debug>(&self, request: Request<T>) -> T {
        if self.hangs.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        let request = request.into_inner();
        self.text.lock().push_str(&format!("{request:?}\n"));
        request
    }
}

fn attributes(list: Vec<KeyValue>) -> BTreeMap<String, Value> {
    list.into_iter().map(|pair| (pair.key, pair.value.map(value).unwrap_or_default())).collect()
}

fn value(value: AnyValue) -> Value {
    match value.value {
        Some(WireValue::StringValue(text)) => text.into(),
        Some(WireValue::IntValue(number)) => number.into(),
        Some(WireValue::DoubleValue(number)) => number.into(),
        Some(WireValue::BoolValue(yes)) => yes.into(),
        other => panic!("no attribute has {other:?}"),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
