//! Durations in settings, written for people: `250ms`, `10s`, `5m`. Use with
//! `#[serde(with = "hostler_boot::duration")]`.

use std::fmt;
use std::time::Duration;

use serde::{Deserializer, Serializer, de};

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
/// The error says which form is expected.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    deserializer.deserialize_any(DurationText)
}

/// A duration that may be absent, written as an empty text. The setting's documentation says what
/// applies then.
///
/// Use with `#[serde(with = "hostler_boot::duration::optional")]`.
pub mod optional {
    use super::{Deserializer, Duration, DurationText, Serializer, de, fmt};

    /// Like `duration::serialize`; an absent duration is an empty text.
    ///
    /// # Errors
    /// Only those of the serializer.
    pub fn serialize<S: Serializer>(duration: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
        match duration {
            Some(duration) => super::serialize(duration, serializer),
            None => serializer.serialize_str(""),
        }
    }

    /// Like `duration::deserialize`; an empty text is no duration.
    ///
    /// # Errors
    /// The error says which form is expected.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
        deserializer.deserialize_any(OptionalText)
    }

    struct OptionalText;

    impl de::Visitor<'_> for OptionalText {
        type Value = Option<Duration>;

        fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
            DurationText.expecting(out)
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
            if text.trim().is_empty() { Ok(None) } else { DurationText.visit_str(text).map(Some) }
        }

        fn visit_i64<E: de::Error>(self, number: i64) -> Result<Self::Value, E> {
            DurationText.visit_i64(number).map(Some)
        }

        fn visit_u64<E: de::Error>(self, number: u64) -> Result<Self::Value, E> {
            DurationText.visit_u64(number).map(Some)
        }

        fn visit_f64<E: de::Error>(self, number: f64) -> Result<Self::Value, E> {
            DurationText.visit_f64(number).map(Some)
        }
    }
}

struct DurationText;

impl de::Visitor<'_> for DurationText {
    type Value = Duration;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a duration such as \"10s\" or \"5m\"")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Duration, E> {
        humantime::parse_duration(text).map_err(|error| match text.trim().parse::<f64>() {
            Ok(_) => unit_missing(text.trim()),
            Err(_) => E::custom(format!("a duration such as \"10s\" or \"5m\" was expected, not {text:?} ({error})")),
        })
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Duration, E> {
        Err(unit_missing(number))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Duration, E> {
        Err(unit_missing(number))
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Duration, E> {
        Err(unit_missing(number))
    }
}

fn unit_missing<E: de::Error>(number: impl fmt::Display) -> E {
    E::custom(format!("a duration with its unit was expected, not {number}: write \"{number}s\" for seconds, or \"{number}ms\""))
}
