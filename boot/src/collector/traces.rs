//! Where traces are sent, and which requests have one. The program reads this for a router, and an
//! agent for its engines.

use std::str::FromStr;
use std::time::Duration;

use super::environment::{Environment, TRACES, unusable};
use super::{CollectorSettings, CollectorSettingsError};

/// Defaults of OpenTelemetry's specification, changed by OTEL_BSP_*.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(30);
const EXPORT_INTERVAL: Duration = Duration::from_secs(5);
const MAX_WAITING_SPANS: u64 = 2048;

/// Most spans that may wait: a queue allocates room for all of them at its start. A span takes 400
/// bytes there and about as much elsewhere.
const MOST_WAITING_SPANS: u64 = 100_000;

#[derive(Debug, Clone, PartialEq)]
pub struct TraceSettings {
    pub collector: CollectorSettings,
    pub sampling: SamplingRule,
    /// Time for one batch of spans, including all retries.
    pub export_timeout: Duration,
    /// How long spans gather.
    pub export_interval: Duration,
    /// Most spans that wait; further ones are dropped.
    pub max_waiting_spans: usize,
}

impl TraceSettings {
    /// Settings for a collector at this URL, with the standard's defaults.
    #[must_use]
    pub fn for_endpoint(endpoint: String) -> Self {
        Self::for_collector(CollectorSettings::for_endpoint(endpoint))
    }

    fn for_collector(collector: CollectorSettings) -> Self {
        Self {
            collector,
            sampling: SamplingRule::default(),
            export_timeout: EXPORT_TIMEOUT,
            export_interval: EXPORT_INTERVAL,
            max_waiting_spans: usize::try_from(MAX_WAITING_SPANS).unwrap_or(usize::MAX),
        }
    }

    /// Settings from this process's environment; `None` if it asks for no traces.
    ///
    /// # Errors
    /// When it asks for traces, and a value is unusable.
    pub fn from_process() -> Result<Option<Self>, CollectorSettingsError> {
        Self::from_environment(|name| std::env::var(name).ok())
    }

    /// Settings from these variables. An empty variable counts as not set.
    ///
    /// # Errors
    /// As for `from_process`.
    pub fn from_environment(variable: impl Fn(&'static str) -> Option<String>) -> Result<Option<Self>, CollectorSettingsError> {
        let environment = Environment::new(variable);
        let Some(collector) = environment.collector(&TRACES)? else { return Ok(None) };
        let plain = Self::for_collector(collector);
        Ok(Some(Self {
            sampling: sampling(&environment)?,
            export_timeout: environment.milliseconds(["OTEL_BSP_EXPORT_TIMEOUT"])?.unwrap_or(plain.export_timeout),
            export_interval: environment.milliseconds(["OTEL_BSP_SCHEDULE_DELAY"])?.unwrap_or(plain.export_interval),
            max_waiting_spans: environment.queue_size("OTEL_BSP_MAX_QUEUE_SIZE", MOST_WAITING_SPANS)?.unwrap_or(plain.max_waiting_spans),
            ..plain
        }))
    }
}

/// Rule for which requests have a trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingRule {
    /// Whether a client's own decision counts.
    pub follows_parent: bool,
    /// Traced share of all other requests, from 0 to 1.
    pub ratio: f64,
}

impl Default for SamplingRule {
    fn default() -> Self {
        Self { follows_parent: true, ratio: 1.0 }
    }
}

impl SamplingRule {
    /// Whether a trace of this id is recorded; `parent` is the decision of its client, if any.
    ///
    /// All SDKs decide by the id alike, so that traces are complete.
    #[must_use]
    pub fn is_sampled(&self, trace: u128, parent: Option<bool>) -> bool {
        parent.filter(|_| self.follows_parent).unwrap_or_else(|| self.is_in_ratio(trace))
    }

    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the ratio is from 0 to 1")]
    fn is_in_ratio(self, trace: u128) -> bool {
        let bound = (self.ratio * (1_u64 << 63) as f64) as u64;
        (trace as u64) >> 1 < bound
    }
}

fn sampling(environment: &Environment<impl Fn(&'static str) -> Option<String>>) -> Result<SamplingRule, CollectorSettingsError> {
    let name = environment.get("OTEL_TRACES_SAMPLER");
    let name = name.as_deref().unwrap_or("parentbased_traceidratio");
    let ratio = match name.trim_start_matches("parentbased_") {
        "always_on" => 1.0,
        "always_off" => 0.0,
        "traceidratio" => ratio(environment)?,
        _ => {
            let problem = "is none of always_on, always_off and traceidratio, nor one of these with parentbased_ before it";
            return Err(unusable("OTEL_TRACES_SAMPLER", problem));
        }
    };
    Ok(SamplingRule { follows_parent: name.starts_with("parentbased_"), ratio })
}

fn ratio(environment: &Environment<impl Fn(&'static str) -> Option<String>>) -> Result<f64, CollectorSettingsError> {
    let name = "OTEL_TRACES_SAMPLER_ARG";
    let Some(value) = environment.get(name) else { return Ok(1.0) };
    f64::from_str(&value).ok().filter(|ratio| (0.0..=1.0).contains(ratio)).ok_or_else(|| unusable(name, "is no number from 0 to 1"))
}

#[cfg(test)]
mod tests;
