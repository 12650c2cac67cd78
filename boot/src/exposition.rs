//! The two text formats of a metrics page: which of them a scraper is given, and how the older one is made of OpenMetrics.

use std::collections::HashSet;

use http::HeaderMap;
use http::header::ACCEPT;

/// A format of a metrics page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextFormat {
    /// OpenMetrics 1.0.0, for whoever names it.
    OpenMetrics,
    /// Prometheus' text 0.0.4, which everybody reads.
    Prometheus,
}

impl TextFormat {
    /// What the `Accept` of a request prefers. A wildcard names no format, so curl and browsers get what everybody reads.
    #[must_use]
    pub fn accepted_by(headers: &HeaderMap) -> Self {
        let openmetrics = quality(headers, "application/openmetrics-text", "1.0.0");
        if openmetrics > 0.0 && openmetrics >= quality(headers, "text/plain", "0.0.4") { Self::OpenMetrics } else { Self::Prometheus }
    }

    /// Its `Content-Type`.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// An OpenMetrics page in this format.
    #[must_use]
    pub fn convert(self, openmetrics: String) -> String {
        match self {
            Self::OpenMetrics => openmetrics,
            Self::Prometheus => to_prometheus(&openmetrics),
        }
    }
}

/// The greatest `q` with which `Accept` names a media type in this version or in none; 0 where it does not.
fn quality(headers: &HeaderMap, media_type: &str, version: &str) -> f32 {
    let lines = headers.get_all(ACCEPT).iter().filter_map(|line| line.to_str().ok());
    let qualities = lines.flat_map(|line| line.split(',')).filter_map(|range| {
        let (named, parameters) = range.split_once(';').unwrap_or((range, ""));
        let parameter = |wanted: &str| {
            let mut pairs = parameters.split(';').filter_map(|pair| pair.split_once('='));
            pairs.find(|(name, _)| name.trim().eq_ignore_ascii_case(wanted)).map(|(_, value)| value.trim().trim_matches('"'))
        };
        let is_meant = named.trim().eq_ignore_ascii_case(media_type) && parameter("version").is_none_or(|named| named == version);
        is_meant.then(|| parameter("q").map_or(1.0, |quality| quality.parse().unwrap_or(0.0)))
    });
    qualities.fold(0.0, f32::max)
}

/// The same samples in the text format 0.0.4, in which a counter is declared under its samples' name, and units and the end are not.
fn to_prometheus(openmetrics: &str) -> String {
    let counters: HashSet<&str> = openmetrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter")).collect();
    let mut page = String::with_capacity(openmetrics.len() + "_total".len() * 2 * counters.len());
    for line in openmetrics.split_terminator('\n') {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("UNIT" | "EOF"), ..) => continue,
            (Some("#"), Some(keyword), Some(name), Some(text)) if counters.contains(name) => {
                page.extend(["# ", keyword, " ", name, "_total ", text]);
            }
            _ => page.push_str(line),
        }
        page.push('\n');
    }
    page
}

#[cfg(test)]
mod tests;
