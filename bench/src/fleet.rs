//! Values that engines and routers report while they are loaded: KV use and prefix cache, from
//! their metrics.
//!
//! A page may be one engine's, or cover all engines of a fleet. A page without these values is
//! useless but no error.

use std::time::Duration;

use crate::client::{Client, ClientError};
use crate::figures::FleetFigures;
use crate::target::Target;

/// Time limit for a page, which is requested once a second.
const PAGE_TIMEOUT: Duration = Duration::from_millis(900);

/// Names of the share of the KV cache in use: vLLM's, vLLM's earlier one, SGLang's, Hostler's.
const KV_USE: [&str; 4] = ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "hostler_replica_kv_use"];
/// Names of the tokens looked up in prefix caches.
///
/// The first occurs also without the ending that some exporters leave out.
const QUERIES: [&str; 3] = ["vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries", "hostler_replica_prefix_queries_total"];
const HITS: [&str; 3] = ["vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits", "hostler_replica_prefix_hits_total"];

pub(crate) struct FleetProbe {
    client: Client,
    path: String,
    first: Option<FleetSample>,
    last: Option<FleetSample>,
    kv_sum: f64,
    kv_max: f64,
    kv_count: u32,
}

/// Relevant values of one page.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct FleetSample {
    /// Lookups of all engines together.
    queries: Option<f64>,
    hits: Option<f64>,
    /// Mean over engines.
    kv_use: Option<f64>,
}

impl FleetSample {
    /// Parses a page in the text format of Prometheus or OpenMetrics.
    pub(crate) fn of(page: &str) -> Self {
        let (mut queries, mut hits, mut kv_sum, mut engines) = (None, None, 0.0, 0.0);
        for line in page.lines() {
            let Some((name, value)) = sample(line) else { continue };
            if QUERIES.contains(&name) {
                queries = Some(queries.unwrap_or(0.0) + value);
            } else if HITS.contains(&name) {
                hits = Some(hits.unwrap_or(0.0) + value);
            } else if KV_USE.contains(&name) {
                kv_sum += value;
                engines += 1.0;
            }
        }
        Self { queries, hits, kv_use: (engines > 0.0).then(|| kv_sum / engines) }
    }

    pub(crate) fn says_something(&self) -> bool {
        self.queries.or(self.hits).or(self.kv_use).is_some()
    }
}

/// Name and value of a line; `None` for comments and non-numbers.
fn sample(line: &str) -> Option<(&str, f64)> {
    if line.starts_with('#') {
        return None;
    }
    let name = line.split(['{', ' ']).next()?;
    // A label may contain spaces and braces, but nothing after the last brace does. A timestamp may
    // follow the value.
    let values = line.rsplit_once('}').map_or(line.strip_prefix(name)?, |(_, values)| values);
    let value: f64 = values.split_ascii_whitespace().next()?.parse().ok()?;
    value.is_finite().then_some((name, value))
}

impl FleetProbe {
    pub(crate) fn new(page: Target) -> Self {
        let (client, path) = (Client::new(page.place), page.path);
        Self { client, path, first: None, last: None, kv_sum: 0.0, kv_max: 0.0, kv_count: 0 }
    }

    pub(crate) async fn try_page(page: &Target, most: Duration) -> Result<bool, ClientError> {
        let page_bytes = Client::new(page.place.clone()).get(&page.path, None, most).await?;
        Ok(FleetSample::of(&String::from_utf8_lossy(&page_bytes)).says_something())
    }

    /// Reads the page now, and returns the share of the KV cache in use.
    ///
    /// A missing page only leaves a gap.
    pub(crate) async fn ask(&mut self) -> Option<f64> {
        let page = self.client.get(&self.path, None, PAGE_TIMEOUT).await.ok()?;
        let reading = FleetSample::of(&String::from_utf8_lossy(&page));
        self.take(reading);
        reading.kv_use
    }

    fn take(&mut self, reading: FleetSample) {
        self.first.get_or_insert(reading);
        self.last = Some(reading);
        if let Some(kv_use) = reading.kv_use {
            self.kv_sum += kv_use;
            self.kv_max = self.kv_max.max(kv_use);
            self.kv_count += 1;
        }
    }

    /// Result of all readings; `None` without any.
    pub(crate) fn figures(&self) -> Option<FleetFigures> {
        let (first, last) = (self.first?, self.last?);
        let grown = |of: fn(&FleetSample) -> Option<f64>| Some(of(&last)? - of(&first)?);
        let (queries, hits) = (grown(|reading| reading.queries), grown(|reading| reading.hits));
        // Counters shrink if an engine has restarted.
        let prefix_hit_rate =
            queries.zip(hits).filter(|(queries, hits)| *queries > 0.0 && *hits >= 0.0).map(|(queries, hits)| hits / queries);
        let counted = self.kv_count > 0;
        Some(FleetFigures {
            prefix_hit_rate,
            kv_use_mean: counted.then(|| self.kv_sum / f64::from(self.kv_count)),
            kv_use_max: counted.then_some(self.kv_max),
        })
    }
}

#[cfg(test)]
mod tests;
