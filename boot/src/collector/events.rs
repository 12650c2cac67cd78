//! Sends events to the collector.
//!
//! Each named log line (docs/logs.md) becomes an OpenTelemetry event of that name, and its fields
//! become attributes. A dead or hanging collector delays nothing: events that it does not take, or
//! that find no room meanwhile, are only in the log.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use opentelemetry::logs::{AnyValue, LogRecord, Logger, LoggerProvider, Severity};
use opentelemetry_otlp::LogExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::logs::{BatchConfigBuilder, BatchLogProcessor, LogBatch, SdkLogRecord, SdkLogger, SdkLoggerProvider};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::time::timeout;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::LookupSpan;

use super::environment::{Environment, LOGS};
use super::{CollectorSettings, CollectorSettingsError, ExportError, resource};

/// Log field that holds the event's name.
const NAME: &str = "event";

/// Time for sending the last events on shutdown.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Defaults of OpenTelemetry's specification, changed by OTEL_BLRP_*.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(30);
const EXPORT_INTERVAL: Duration = Duration::from_secs(1);
const MAX_WAITING_EVENTS: usize = 2048;
const MAX_BATCH: usize = 512;

/// Most events that may wait: a queue allocates room for all of them at its start.
const MOST_WAITING_EVENTS: u64 = 100_000;

/// Most bytes of each text.
const MAX_TEXT_BYTES: usize = 1024;

#[derive(Debug, Clone, PartialEq, Eq)]
struct EventSettings {
    collector: CollectorSettings,
    /// Time for one batch, including the connection that it may need.
    export_timeout: Duration,
    /// How long events gather.
    export_interval: Duration,
    max_waiting_events: usize,
}

impl EventSettings {
    /// Settings from these variables; `None` if they ask for no events.
    fn from_environment(variable: impl Fn(&'static str) -> Option<String>) -> Result<Option<Self>, CollectorSettingsError> {
        let environment = Environment::new(variable);
        let Some(collector) = environment.collector(&LOGS)? else { return Ok(None) };
        Ok(Some(Self {
            collector,
            export_timeout: environment.milliseconds(["OTEL_BLRP_EXPORT_TIMEOUT"])?.unwrap_or(EXPORT_TIMEOUT),
            export_interval: environment.milliseconds(["OTEL_BLRP_SCHEDULE_DELAY"])?.unwrap_or(EXPORT_INTERVAL),
            max_waiting_events: environment.queue_size("OTEL_BLRP_MAX_QUEUE_SIZE", MOST_WAITING_EVENTS)?.unwrap_or(MAX_WAITING_EVENTS),
        }))
    }
}

/// Exporter of events, with a thread of its own.
#[derive(Debug)]
pub struct EventExport(SdkLoggerProvider);

/// Reason why no events are sent.
#[derive(Debug, thiserror::Error)]
pub enum EventExportError {
    #[error(transparent)]
    Settings(#[from] CollectorSettingsError),
    #[error(transparent)]
    Export(#[from] ExportError),
}

impl EventExport {
    /// Starts the export that this process's environment asks for, if any. Needs the runtime on
    /// which connections are to live.
    ///
    /// # Errors
    /// When the environment asks for events, and a value is unusable.
    pub fn from_process(service: &'static str) -> Result<Option<Self>, EventExportError> {
        let settings = EventSettings::from_environment(|name| std::env::var(name).ok())?;
        Ok(settings.map(|settings| Self::start(&settings, service)).transpose()?)
    }

    fn start(settings: &EventSettings, service: &'static str) -> Result<Self, ExportError> {
        let exporter = settings.collector.configure(LogExporter::builder().with_tonic())?.build()?;
        let deadline = settings.export_timeout;
        let exporter = WatchedExporter { exporter, runtime: Handle::current(), deadline, is_failing: AtomicBool::new(false) };
        let batches = BatchConfigBuilder::default()
            .with_max_queue_size(settings.max_waiting_events)
            .with_max_export_batch_size(settings.max_waiting_events.min(MAX_BATCH))
            .with_scheduled_delay(settings.export_interval)
            .build();
        let processor = BatchLogProcessor::builder(exporter).with_batch_config(batches).build();
        Ok(Self(SdkLoggerProvider::builder().with_resource(resource(service)).with_log_processor(processor).build()))
    }

    /// Log layer that takes the events.
    #[must_use]
    pub fn layer<S: Subscriber + for<'span> LookupSpan<'span>>(&self) -> impl Layer<S> + use<S> {
        let is_event = |metadata: &Metadata<'_>| *metadata.level() <= Level::INFO && metadata.fields().field(NAME).is_some();
        EventLayer(self.0.logger("hostler")).with_filter(filter_fn(is_event).with_max_level_hint(LevelFilter::INFO))
    }

    /// Waits briefly until recorded events have reached the collector. A stuck thread is left
    /// behind.
    pub async fn flush(&self) {
        let provider = self.0.clone();
        let flushing = tokio::task::spawn_blocking(move || provider.shutdown_with_timeout(FLUSH_TIMEOUT));
        if !matches!(timeout(FLUSH_TIMEOUT, flushing).await, Ok(Ok(Ok(())))) {
            tracing::debug!("the last events did not reach the collector");
        }
    }
}

struct EventLayer(SdkLogger);

impl<S: Subscriber> Layer<S> for EventLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut record = self.0.create_log_record();
        let level = *event.metadata().level();
        record.set_timestamp(SystemTime::now());
        record.set_severity_number(severity(level));
        record.set_severity_text(level.as_str());
        event.record(&mut Fields(&mut record));
        self.0.emit(record);
    }
}

fn severity(level: Level) -> Severity {
    match level {
        Level::ERROR => Severity::Error,
        Level::WARN => Severity::Warn,
        _ => Severity::Info,
    }
}

/// Writes the fields of a log line into a record.
struct Fields<'a>(&'a mut SdkLogRecord);

impl Fields<'_> {
    fn add(&mut self, field: &Field, value: AnyValue) {
        match field.name() {
            "message" => self.0.set_body(value),
            name => self.0.add_attribute(format!("hostler.{name}"), value),
        }
    }
}

impl Visit for Fields<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == NAME {
            self.0.set_event_name(intern(value));
        } else {
            self.add(field, first_line(value).to_owned().into());
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, first_line(&format!("{value:?}")).to_owned().into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, i64::try_from(value).map_or_else(|_| value.to_string().into(), AnyValue::from));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value.into());
    }
}

/// First line of a text, without the last lines of an engine's log that may follow. The exception
/// that an engine names as the cause of its end is within the first line.
fn first_line(text: &str) -> &str {
    let line = text.lines().next().unwrap_or_default();
    &line[..line.floor_char_boundary(MAX_TEXT_BYTES)]
}

/// Interns a name for the life of the process, as records require. Names are literals of this
/// program, so they are few.
fn intern(name: &str) -> &'static str {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut names = NAMES.lock();
    if let Some(known) = names.get(name) {
        return known;
    }
    let kept: &'static str = name.to_owned().leak();
    names.insert(kept);
    kept
}

/// Exporter that sends batches within their time, and logs once when that fails.
#[derive(Debug)]
struct WatchedExporter {
    exporter: LogExporter,
    runtime: Handle,
    deadline: Duration,
    is_failing: AtomicBool,
}

impl opentelemetry_sdk::logs::LogExporter for WatchedExporter {
    async fn export(&self, batch: LogBatch<'_>) -> OTelSdkResult {
        // The processor's thread has no timers of its own.
        let sending = {
            let _timers = self.runtime.enter();
            timeout(self.deadline, self.exporter.export(batch))
        };
        let sent = sending.await.unwrap_or(Err(OTelSdkError::Timeout(self.deadline)));
        match &sent {
            Err(error) if !self.is_failing.swap(true, Ordering::Relaxed) => {
                tracing::warn!(%error, "events do not reach the collector; the log has them all. For a collector of traces alone set OTEL_LOGS_EXPORTER=none");
            }
            Ok(()) if self.is_failing.swap(false, Ordering::Relaxed) => tracing::info!("events reach the collector again"),
            _ => {}
        }
        sent
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<EventSettings>, CollectorSettingsError> {
        EventSettings::from_environment(|name| variables.iter().find(|(set, _)| *set == name).map(|(_, value)| (*value).to_owned()))
    }

    const ENDPOINT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317");

    #[test]
    fn events_go_to_their_own_or_the_general_collector() {
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[ENDPOINT, ("OTEL_LOGS_EXPORTER", "none")]), Ok(None));
        assert_eq!(read(&[("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:4317")]), Ok(None));
        let own = [ENDPOINT, ("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "http://logs:4317"), ("OTEL_BLRP_MAX_QUEUE_SIZE", "7")];
        let read = read(&own).unwrap().unwrap();
        assert_eq!((read.collector.endpoint.as_str(), read.max_waiting_events), ("http://logs:4317", 7));
    }

    #[test]
    fn an_invalid_collector_value_is_named() {
        for (variable, value) in [
            ("OTEL_BLRP_SCHEDULE_DELAY", "0"),
            ("OTEL_BLRP_EXPORT_TIMEOUT", "soon"),
            ("OTEL_BLRP_MAX_QUEUE_SIZE", "0"),
            ("OTEL_BLRP_MAX_QUEUE_SIZE", "100001"),
            ("OTEL_EXPORTER_OTLP_LOGS_PROTOCOL", "http/json"),
        ] {
            let error = read(&[ENDPOINT, (variable, value)]).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{variable} is no")), "{error}");
        }
    }

    #[test]
    fn a_text_is_cut_at_its_first_line_and_limit() {
        assert_eq!(first_line("it hung; its last lines:\na prompt"), "it hung; its last lines:");
        assert_eq!(first_line(""), "");
        assert_eq!(first_line(&"é".repeat(1000)).len(), MAX_TEXT_BYTES);
    }

    #[test]
    fn an_interned_name_is_stored_once() {
        let (one, other) = (intern("engine_ready"), intern(&String::from("engine_ready")));
        assert!(std::ptr::eq(one, other));
    }
}
