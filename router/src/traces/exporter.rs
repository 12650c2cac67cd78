//! The way of spans to the collector: a bounded queue, followed by OpenTelemetry's batch processor
//! with its own thread. A dead or hanging collector holds up nothing: spans that find no room are
//! counted and dropped, and the log says so once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use hostler_boot::TraceSettings;
use hostler_boot::collector::{ExportError, resource};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{BatchConfigBuilder, BatchSpanProcessor, SpanData, SpanExporter, SpanProcessor};
use prometheus_client::metrics::counter::Counter;
use tokio::runtime::Handle;
use tokio::time::timeout;

/// How long the last spans may take on shutdown.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// The service's name, unless the environment has another one.
const SERVICE: &str = "hostler-router";

/// Spans on their way to the collector. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct SpanQueue {
    processor: Arc<BatchSpanProcessor>,
    backlog: Arc<Backlog>,
}

/// How many spans wait, or are being sent.
#[derive(Debug)]
struct Backlog {
    waiting: AtomicUsize,
    most: usize,
    dropped: Counter,
    /// Whether the queue has overflowed, which is logged once.
    has_overflowed: AtomicBool,
}

impl SpanQueue {
    /// Sends spans without waiting. The spans of one trace are kept or dropped together.
    pub(super) fn send(&self, spans: Vec<SpanData>) {
        let Backlog { waiting, most, dropped, has_overflowed } = &*self.backlog;
        let fits = |waiting: usize| Some(waiting + spans.len()).filter(|more| more <= most);
        if waiting.try_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok() {
            spans.into_iter().for_each(|span| self.processor.on_end(span));
            return;
        }
        dropped.inc_by(spans.len() as u64);
        if !has_overflowed.swap(true, Ordering::Relaxed) {
            tracing::warn!(most, "spans of traces are dropped: more wait for the collector than OTEL_BSP_MAX_QUEUE_SIZE allows");
        }
    }
}

/// Sends the last spans on shutdown.
#[derive(Debug, Default)]
pub(crate) struct TraceExport(Option<SpanQueue>);

impl TraceExport {
    pub(super) fn new(queue: SpanQueue) -> Self {
        Self(Some(queue))
    }

    /// Waits briefly until everything sent has reached the collector. A stuck thread is left
    /// behind.
    pub(crate) async fn flush(self) {
        let Some(queue) = self.0 else { return };
        let flushing = tokio::task::spawn_blocking(move || queue.processor.shutdown_with_timeout(FLUSH_TIMEOUT));
        if !matches!(timeout(FLUSH_TIMEOUT, flushing).await, Ok(Ok(Ok(())))) {
            tracing::debug!("the last spans of traces did not reach the collector");
        }
    }
}

/// Starts the thread. This needs the runtime on which connections will live.
///
/// # Errors
/// If no connection can be made with the settings and the environment.
pub(super) fn start(settings: &TraceSettings, dropped: Counter) -> Result<SpanQueue, ExportError> {
    let exporter = settings.collector.configure(opentelemetry_otlp::SpanExporter::builder().with_tonic())?.build()?;
    let backlog = Arc::new(Backlog {
        waiting: AtomicUsize::new(0),
        most: settings.max_waiting_spans,
        dropped,
        has_overflowed: AtomicBool::new(false),
    });
    let exporter = WatchedExporter {
        exporter: Arc::new(exporter),
        runtime: Handle::current(),
        deadline: settings.export_timeout,
        backlog: backlog.clone(),
        is_failing: AtomicBool::new(false),
    };
    let batches = BatchConfigBuilder::default()
        .with_max_queue_size(settings.max_waiting_spans)
        .with_scheduled_delay(settings.export_interval)
        .build();
    let mut processor = BatchSpanProcessor::builder(exporter).with_batch_config(batches).build();
    processor.set_resource(&resource(SERVICE));
    Ok(SpanQueue { processor: Arc::new(processor), backlog })
}

/// Sends batches within their time, and counts lost ones.
#[derive(Debug)]
struct WatchedExporter {
    exporter: Arc<opentelemetry_otlp::SpanExporter>,
    runtime: Handle,
    deadline: Duration,
    backlog: Arc<Backlog>,
    /// Whether sending fails. A failure is logged once, until sending works again.
    is_failing: AtomicBool,
}

impl WatchedExporter {
    fn record_end(&self, spans: usize, sent: &OTelSdkResult) {
        self.backlog.waiting.fetch_sub(spans, Ordering::Relaxed);
        if let Err(error) = sent {
            self.backlog.dropped.inc_by(spans as u64);
            if !self.is_failing.swap(true, Ordering::Relaxed) {
                tracing::warn!(%error, "traces do not reach the collector; requests are answered without");
            }
        } else if self.is_failing.swap(false, Ordering::Relaxed) {
            tracing::info!("traces reach the collector again");
        }
    }
}

impl SpanExporter for WatchedExporter {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let (spans, exporter, deadline) = (batch.len(), self.exporter.clone(), self.deadline);
        // The processor's thread has no timers, and the connection lives on the runtime.
        let sending = self.runtime.spawn(async move { timeout(deadline, exporter.export(batch)).await });
        let sent = match sending.await {
            Ok(Ok(sent)) => sent,
            Ok(Err(_)) => Err(OTelSdkError::Timeout(deadline)),
            Err(_) => Err(OTelSdkError::AlreadyShutdown),
        };
        self.record_end(spans, &sent);
        sent
    }

    fn set_resource(&mut self, resource: &Resource) {
        if let Some(exporter) = Arc::get_mut(&mut self.exporter) {
            exporter.set_resource(resource);
        }
    }
}

#[cfg(test)]
mod tests;
