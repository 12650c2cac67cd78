//! Durations in settings are written for people: `250ms`, `10s`, `5m`. Use with `#[serde(with = "hostler_boot::duration")]`.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serializer, de};

/// Writes a duration the way a person would.
///
/// # Errors
/// Only those of the serializer.
pub fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_duration(*duration))
}

/// Reads `250ms`, `10s`, `1h 30m`.
///
/// # Errors
/// Says what form is expected.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    humantime::parse_duration(&text)
        .map_err(|error| de::Error::custom(format!("a duration such as \"10s\" or \"5m\" was expected, not {text:?} ({error})")))
}
