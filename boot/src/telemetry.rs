//! Logging: one line an event on standard error, as text or JSON, filtered by level and module.

use std::io::IsTerminal;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

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
    /// What is logged: `error`, `warn`, `info`, `debug` or `trace`, and by module: `info,hostler_router=debug`.
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

/// Starts logging for the whole process. A second call has no effect.
///
/// # Errors
/// When the level cannot be read.
pub fn init(config: &LogConfig) -> Result<(), LevelError> {
    let filter: Targets = config.level.parse().map_err(|source| LevelError { level: config.level.clone(), source })?;
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let started = match config.format {
        LogFormat::Text => {
            let lines = lines.with_ansi(std::io::stderr().is_terminal()).with_target(false);
            tracing_subscriber::registry().with(lines.with_filter(filter)).try_init()
        }
        LogFormat::Json => tracing_subscriber::registry().with(lines.json().with_filter(filter)).try_init(),
    };
    if started.is_err() {
        tracing::debug!("logging was started before; this call changes nothing");
    }
    Ok(())
}
