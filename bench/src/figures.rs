//! What all samples of a load come to. Made once, after the load, by the `record`; every report shows these and computes nothing more.

use std::collections::BTreeMap;

use serde::Serialize;

#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Of all its requests.
    pub all: Totals,
    /// Of each kind of session, when there are several.
    pub kinds: BTreeMap<String, Totals>,
    pub series: Vec<Second>,
    /// What the fleet or engine said of itself, if it was asked.
    pub fleet: Option<FleetFigures>,
}

/// Sums and quantiles. Times in milliseconds, lengths of the load in seconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Totals {
    /// Requests that ended, in any way.
    pub requests: u64,
    /// Requests that were answered completely.
    pub complete: u64,
    /// The others, by how they ended (`status 429`, `broken`).
    pub failed: BTreeMap<String, u64>,
    /// The time over which the rates are taken: the load's duration where it is even, else up to
    /// the last end. Requests count by when they were due, rates by what arrived. So an even load
    /// is not charged for its beginning and its end.
    pub seconds: f64,
    pub requests_per_second: f64,
    /// Tokens per second, of complete answers.
    pub output_tokens_per_second: f64,
    /// Tokens per second of the prompts whose first token came, of complete answers.
    pub prompt_tokens_per_second: f64,
    /// Tokens of a prompt in the mean, of complete answers; `None` when the target did not count
    /// them.
    pub prompt_tokens_mean: Option<f64>,
    /// Tokens of a complete answer in the mean.
    pub output_tokens_mean: Option<f64>,
    /// Share of complete requests' prompt tokens that the target said were cached; `None` when it
    /// said nothing.
    pub cached_share: Option<f64>,
    /// Complete requests per second that met every limit; `None` without limits.
    pub goodput: Option<f64>,
    /// Share of all requests that met every limit.
    pub met: Option<f64>,
    /// From due to the first token.
    pub ttft_ms: Quantiles,
    /// Between tokens that follow each other, all of them together.
    pub itl_ms: Quantiles,
    /// Mean time between the tokens of one answer.
    pub tpot_ms: Quantiles,
    /// From due to the end.
    pub e2e_ms: Quantiles,
    /// How late the load generator itself was.
    pub late_ms: Quantiles,
}

/// Of times in milliseconds; all zero when nothing was measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Quantiles {
    /// Times that were measured.
    pub count: u64,
    /// Their mean.
    pub mean: f64,
    /// Half of the times are no longer.
    pub p50: f64,
    /// 90 % are no longer.
    pub p90: f64,
    /// 99 % are no longer.
    pub p99: f64,
    /// The longest.
    pub max: f64,
}

/// One second of a load, by when requests were due and tokens came.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Second {
    /// Seconds after the start.
    pub at: u32,
    /// Requests in flight at its end.
    pub in_flight: u32,
    /// Requests that ended well in it.
    pub complete: u32,
    /// Requests that failed in it.
    pub failed: u32,
    /// Events with tokens that came in it.
    pub tokens: u32,
    /// Median time to the first token of the requests whose first token came in it, in
    /// milliseconds; 0 without any.
    pub ttft_p50_ms: f64,
    /// Share of the KV cache in use, if known, 0 to 1.
    pub kv_use: Option<f64>,
}

/// What the target's own metrics said of the time of the load.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct FleetFigures {
    /// Share of prompt tokens that were found in a prefix cache.
    pub prefix_hit_rate: Option<f64>,
    /// Mean share of the KV cache in use, 0 to 1.
    pub kv_use_mean: Option<f64>,
    /// The largest seen.
    pub kv_use_max: Option<f64>,
}
