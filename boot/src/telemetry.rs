//! Logging: each event is a line on standard error or in a file, as text or JSON, filtered by level
//! and module.

use std::fs::File;
use std::io::IsTerminal;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::writer::BoxMakeWriter;
use tracing_subscriber::prelude::*;

use crate::collector::events::EventExport;

/// How log lines look.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One readable line.
    #[default]
    Text,
    /// One JSON object, for log collectors.
    Json,
}

/// The `[log]` section of the configuration.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// What is logged: `error`, `warn`, `info`, `debug` or `trace`, and by module:
    /// `info,hostler_router=debug`.
    pub level: String,
    /// `text`, or `json` for log collectors.
    pub format: LogFormat,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { level: "info".into(), format: LogFormat::Text }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("log.level: {level:?} is not a level (error, warn, info, debug, trace) nor a list such as \"info,hostler_router=debug\": {source}")]
pub struct LevelError {
    level: String,
    source: tracing_subscriber::filter::ParseError,
}

/// The file of a log, which can be exchanged for another while lines are written.
#[derive(Debug, Clone)]
pub struct LogFile(Arc<Mutex<Arc<File>>>);

impl LogFile {
    #[must_use]
    pub fn new(file: File) -> Self {
        Self(Arc::new(Mutex::new(Arc::new(file))))
    }

    /// Has the next lines written to this file.
    pub fn replace(&self, file: File) {
        *self.0.lock() = Arc::new(file);
    }

    fn current(&self) -> Arc<File> {
        Arc::clone(&self.0.lock())
    }
}

/// Exporter of this process's events, if a collector is configured.
static EVENTS: OnceLock<EventExport> = OnceLock::new();

/// Starts logging for the whole process. A second call has no effect.
///
/// # Errors
/// When the level cannot be read.
pub fn init(config: &LogConfig) -> Result<(), LevelError> {
    start(config, None, None)
}

/// Starts logging for a role, whose events also go to a collector if the environment names one.
/// `service` is their service name. With a file the lines are appended there. Needs a runtime.
///
/// # Errors
/// When the level cannot be read.
pub fn init_role(config: &LogConfig, service: &'static str, file: Option<LogFile>) -> Result<(), LevelError> {
    let events = EventExport::from_process(service);
    start(config, events.as_ref().ok().and_then(Option::as_ref), file)?;
    match events {
        Ok(Some(events)) => drop(EVENTS.set(events)),
        Ok(None) => {}
        // A wrong environment, written for other programs, must not keep a role from starting.
        Err(error) => tracing::warn!(%error, "no events are sent to a collector"),
    }
    Ok(())
}

/// Sends the last events at the end of a process.
pub async fn flush_events() {
    if let Some(events) = EVENTS.get() {
        events.flush().await;
    }
}

fn start(config: &LogConfig, events: Option<&EventExport>, file: Option<LogFile>) -> Result<(), LevelError> {
    let filter: Targets = config.level.parse().map_err(|source| LevelError { level: config.level.clone(), source })?;
    let has_colors = file.is_none() && std::io::stderr().is_terminal();
    let writer = file.map_or_else(|| BoxMakeWriter::new(std::io::stderr), |file| BoxMakeWriter::new(move || file.current()));
    let lines = tracing_subscriber::fmt::layer().with_writer(writer);
    let lines = match config.format {
        LogFormat::Text => lines.with_ansi(has_colors).with_target(false).with_filter(filter).boxed(),
        LogFormat::Json => lines.json().with_filter(filter).boxed(),
    };
    if tracing_subscriber::registry().with(lines).with(events.map(EventExport::layer)).try_init().is_err() {
        tracing::debug!("logging was started before; this call changes nothing");
    }
    Ok(())
}
