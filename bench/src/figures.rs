//! Figures of a load, computed once from all its samples by the `record`.
//!
//! Every report shows these and computes nothing more.

use std::collections::BTreeMap;

use serde::Serialize;

#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Totals of all requests.
    pub all: Totals,
    /// Totals of each kind of session, if there are several.
    pub kinds: BTreeMap<String, Totals>,
    pub series: Vec<Second>,
    /// Values that the fleet or engine reported, if it was queried.
    pub fleet: Option<FleetFigures>,
}

/// Sums and quantiles. Times in milliseconds, lengths of the load in seconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Totals {
    /// Requests that ended, in any way.
    pub requests: u64,
    /// Requests that were answered completely.
    pub complete: u64,
    /// Other requests, by how they ended (`status 429`, `broken`).
    pub failed: BTreeMap<String, u64>,
    /// Time over which the rates are computed: the load's duration if it is even, else up to the
    /// last end.
    ///
    /// Requests count by when they were due, rates by the tokens that arrived. So an even load is
    /// not charged for its beginning and its end.
    pub seconds: f64,
    pub requests_per_second: f64,
    /// Tokens per second, of complete answers.
    pub output_tokens_per_second: f64,
    /// Tokens per second of the prompts whose first token came, of complete answers.
    pub prompt_tokens_per_second: f64,
    /// Mean tokens of a prompt, of complete answers; `None` if the target did not count them.
    pub prompt_tokens_mean: Option<f64>,
    /// Mean tokens of a complete answer.
    pub output_tokens_mean: Option<f64>,
    /// Share of complete requests' prompt tokens that the target reported as cached; `None` if it
    /// reported none.
    pub cached_share: Option<f64>,
    /// Complete requests per second that met every limit; `None` without limits.
    pub goodput: Option<f64>,
    /// Share of all requests that met every limit.
    pub met: Option<f64>,
    /// Time from due to the first token.
    pub ttft_ms: Quantiles,
    /// Time between consecutive tokens, all of them together.
    pub itl_ms: Quantiles,
    /// Mean time between the tokens of one answer.
    pub tpot_ms: Quantiles,
    /// Time from due to the end.
    pub e2e_ms: Quantiles,
    /// Lateness of the load generator itself.
    pub late_ms: Quantiles,
}

/// Quantiles of times in milliseconds; all zero if nothing was measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Quantiles {
    /// Number of measured times.
    pub count: u64,
    /// Mean of the times.
    pub mean: f64,
    /// Median: half of the times are no longer.
    pub p50: f64,
    /// 90 % of the times are no longer.
    pub p90: f64,
    /// 99 % of the times are no longer.
    pub p99: f64,
    /// Longest time.
    pub max: f64,
}

/// One second of a load, by when requests were due and tokens came.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Second {
    /// Seconds after the start.
    pub at: u32,
    /// Requests in flight at the end of the second.
    pub in_flight: u32,
    /// Requests that ended well in this second.
    pub complete: u32,
    /// Requests that failed in this second.
    pub failed: u32,
    /// Events with tokens that came in this second.
    pub tokens: u32,
    /// Median time to the first token of the requests whose first token came in this second, in
    /// milliseconds; 0 without any.
    pub ttft_p50_ms: f64,
    /// Share of the KV cache in use, if known, 0 to 1.
    pub kv_use: Option<f64>,
}

/// Values from the target's own metrics during the load.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct FleetFigures {
    /// Share of prompt tokens that were found in a prefix cache.
    pub prefix_hit_rate: Option<f64>,
    /// Mean share of the KV cache in use, 0 to 1.
    pub kv_use_mean: Option<f64>,
    /// Largest share seen.
    pub kv_use_max: Option<f64>,
}
