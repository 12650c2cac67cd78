//! A caller's state of its limits, as headers of OpenAI's API.

use http::header::{HeaderMap, HeaderName, HeaderValue};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RateLimit {
    pub limit: u64,
    pub remaining: u64,
    /// Milliseconds until the whole limit may be used again.
    pub reset_ms: u64,
}

impl RateLimit {
    /// The limit with the smaller share left.
    pub(super) fn min_by_share(self, other: Self) -> Self {
        let share = |one: &Self, of: &Self| u128::from(one.remaining) * u128::from(of.limit);
        if share(&other, &self) < share(&self, &other) { other } else { self }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RateLimits {
    /// Requests per minute.
    pub requests: Option<RateLimit>,
    /// The limit of tokens with the smallest share left.
    pub tokens: Option<RateLimit>,
}

/// The headers for requests and for tokens.
const HEADER_NAMES: [[HeaderName; 3]; 2] = [
    [
        HeaderName::from_static("x-ratelimit-limit-requests"),
        HeaderName::from_static("x-ratelimit-remaining-requests"),
        HeaderName::from_static("x-ratelimit-reset-requests"),
    ],
    [
        HeaderName::from_static("x-ratelimit-limit-tokens"),
        HeaderName::from_static("x-ratelimit-remaining-tokens"),
        HeaderName::from_static("x-ratelimit-reset-tokens"),
    ],
];

impl RateLimits {
    pub(crate) fn write_headers(&self, headers: &mut HeaderMap) {
        for ([limit, left, reset], rate) in HEADER_NAMES.into_iter().zip([self.requests, self.tokens]) {
            if let Some(rate) = rate {
                headers.insert(limit, rate.limit.into());
                headers.insert(left, rate.remaining.into());
                headers.insert(
                    reset,
                    HeaderValue::from_str(&format_duration(rate.reset_ms)).expect("digits and letters are a header's value"),
                );
            }
        }
    }
}

/// A duration as OpenAI writes it: `120ms`, `1.5s`, `6m0s`, `23h45m0s`.
fn format_duration(milliseconds: u64) -> String {
    let (seconds, rest) = (milliseconds / 1000, milliseconds % 1000);
    let fraction = if rest == 0 { String::new() } else { format!(".{rest:03}").trim_end_matches('0').to_owned() };
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    let last = format!("{}{fraction}s", seconds % 60);
    match (hours, minutes, seconds) {
        (0, 0, 0) => format!("{rest}ms"),
        (0, 0, _) => last,
        (0, ..) => format!("{minutes}m{last}"),
        _ => format!("{hours}h{minutes}m{last}"),
    }
}
