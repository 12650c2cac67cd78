//! Where traces are sent, and which requests have one, as OpenTelemetry's standard environment variables say. Read by the program for a router, and by
//! an agent for its engines. What else those variables say (headers, batches, resource) the exporter reads itself.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use http::Uri;

/// Defaults of OpenTelemetry's specification, by OTEL_BSP_* and OTEL_EXPORTER_OTLP_TIMEOUT.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(30);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const EXPORT_INTERVAL: Duration = Duration::from_secs(5);
const MAX_WAITING_SPANS: u64 = 2048;

/// A queue has room for all of them from the start; a span takes 400 bytes there and about as much elsewhere.
const MOST_WAITING_SPANS: u64 = 100_000;

#[derive(Debug, Clone, PartialEq)]
pub struct TraceSettings {
    /// A URL of a collector that takes OTLP over gRPC.
    pub endpoint: String,
    /// Authorities of the collector's certificate, in PEM, beside the system's own.
    pub certificate: Option<PathBuf>,
    pub sampling: SamplingRule,
    /// For one request to the collector.
    pub request_timeout: Duration,
    /// For one batch of spans, however often it is tried.
    pub export_timeout: Duration,
    /// How long spans gather.
    pub export_interval: Duration,
    /// More spans than this do not wait; they are dropped.
    pub max_waiting_spans: usize,
}

/// A variable whose value cannot be used. No value is repeated: a URL may have a password in it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{variable} {problem}")]
pub struct TraceSettingsError {
    variable: &'static str,
    problem: String,
}

impl TraceSettings {
    /// For a collector at this URL, all else as the standard has it.
    #[must_use]
    pub fn for_endpoint(endpoint: String) -> Self {
        Self {
            endpoint,
            certificate: None,
            sampling: SamplingRule::default(),
            request_timeout: REQUEST_TIMEOUT,
            export_timeout: EXPORT_TIMEOUT,
            export_interval: EXPORT_INTERVAL,
            max_waiting_spans: usize::try_from(MAX_WAITING_SPANS).unwrap_or(usize::MAX),
        }
    }

    /// As this process's environment says; `None` where traces are not asked for.
    ///
    /// # Errors
    /// When they are, and a value cannot be used.
    pub fn from_process() -> Result<Option<Self>, TraceSettingsError> {
        Self::from_environment(|name| std::env::var(name).ok())
    }

    /// As these variables say. A variable that is empty counts as not set.
    ///
    /// # Errors
    /// As for `from_process`.
    pub fn from_environment(variable: impl Fn(&'static str) -> Option<String>) -> Result<Option<Self>, TraceSettingsError> {
        let environment = Environment(|name| variable(name).filter(|value| !value.is_empty()));
        let endpoint = environment.first(["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"]);
        let Some((endpoint_variable, endpoint)) = endpoint else { return Ok(None) };
        if environment.get("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        match environment.get("OTEL_TRACES_EXPORTER").as_deref() {
            None | Some("otlp") => {}
            Some("none") => return Ok(None),
            Some(_) => return Err(unusable("OTEL_TRACES_EXPORTER", "is neither `otlp` nor `none`, and there is no other exporter here")),
        }
        if let Some((variable, protocol)) = environment.first(["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"])
            && protocol != "grpc"
        {
            let problem = "is not `grpc`, which is the only protocol here: set it to that and the endpoint to the collector's port for gRPC, by \
                           default 4317";
            return Err(unusable(variable, problem));
        }
        check_endpoint(&endpoint).map_err(|problem| unusable(endpoint_variable, problem))?;
        let plain = Self::for_endpoint(endpoint);
        let request_timeout = environment.milliseconds(["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"])?;
        let certificate = environment.first(["OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE"]);
        Ok(Some(Self {
            certificate: certificate.map(|(_, path)| path.into()),
            sampling: environment.sampling()?,
            request_timeout: request_timeout.unwrap_or(plain.request_timeout),
            export_timeout: environment.milliseconds(["OTEL_BSP_EXPORT_TIMEOUT"])?.unwrap_or(plain.export_timeout),
            export_interval: environment.milliseconds(["OTEL_BSP_SCHEDULE_DELAY"])?.unwrap_or(plain.export_interval),
            max_waiting_spans: environment.waiting_spans()?.unwrap_or(plain.max_waiting_spans),
            ..plain
        }))
    }
}

/// Which requests have a trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingRule {
    /// Whether a client's own decision counts.
    pub follows_parent: bool,
    /// The part of all others, from 0 to 1.
    pub ratio: f64,
}

impl Default for SamplingRule {
    fn default() -> Self {
        Self { follows_parent: true, ratio: 1.0 }
    }
}

impl SamplingRule {
    /// Whether there is to be a trace of this id; `parent` is whether its client has one. All SDKs decide alike by the id, so that a trace is whole.
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

fn unusable(variable: &'static str, problem: impl Into<String>) -> TraceSettingsError {
    TraceSettingsError { variable, problem: problem.into() }
}

fn check_endpoint(endpoint: &str) -> Result<(), &'static str> {
    let uri = endpoint.parse::<Uri>().ok().filter(|uri| uri.host().is_some() && matches!(uri.scheme_str(), Some("http" | "https")));
    match uri {
        None => Err("is no URL such as http://localhost:4317"),
        Some(uri) if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) => Err(
            "has a user in it, which everybody would see in engines' command lines: give what proves who you are in OTEL_EXPORTER_OTLP_HEADERS",
        ),
        Some(uri) if !matches!(uri.path(), "" | "/") => {
            Err("has a path, which gRPC has no use for: name the collector's port for gRPC, as in http://localhost:4317")
        }
        Some(_) => Ok(()),
    }
}

/// The variables, without those that are empty.
struct Environment<F>(F);

impl<F: Fn(&'static str) -> Option<String>> Environment<F> {
    fn get(&self, name: &'static str) -> Option<String> {
        (self.0)(name)
    }

    /// The first of these that is set.
    fn first<const N: usize>(&self, names: [&'static str; N]) -> Option<(&'static str, String)> {
        names.into_iter().find_map(|name| Some((name, self.get(name)?)))
    }

    fn milliseconds<const N: usize>(&self, names: [&'static str; N]) -> Result<Option<Duration>, TraceSettingsError> {
        let Some((name, value)) = self.first(names) else { return Ok(None) };
        let milliseconds = u64::from_str(&value).ok().filter(|milliseconds| *milliseconds > 0);
        milliseconds
            .map(|milliseconds| Some(Duration::from_millis(milliseconds)))
            .ok_or_else(|| unusable(name, "is no number of milliseconds"))
    }

    fn waiting_spans(&self) -> Result<Option<usize>, TraceSettingsError> {
        let name = "OTEL_BSP_MAX_QUEUE_SIZE";
        let Some(value) = self.get(name) else { return Ok(None) };
        let spans = u64::from_str(&value).ok().filter(|spans| (1..=MOST_WAITING_SPANS).contains(spans));
        let spans = spans.ok_or_else(|| unusable(name, format!("is no number from 1 to {MOST_WAITING_SPANS}")))?;
        Ok(usize::try_from(spans).ok())
    }

    fn sampling(&self) -> Result<SamplingRule, TraceSettingsError> {
        let name = self.get("OTEL_TRACES_SAMPLER");
        let name = name.as_deref().unwrap_or("parentbased_traceidratio");
        let ratio = match name.trim_start_matches("parentbased_") {
            "always_on" => 1.0,
            "always_off" => 0.0,
            "traceidratio" => self.ratio()?,
            _ => {
                let problem = "is none of always_on, always_off and traceidratio, nor one of these with parentbased_ before it";
                return Err(unusable("OTEL_TRACES_SAMPLER", problem));
            }
        };
        Ok(SamplingRule { follows_parent: name.starts_with("parentbased_"), ratio })
    }

    fn ratio(&self) -> Result<f64, TraceSettingsError> {
        let name = "OTEL_TRACES_SAMPLER_ARG";
        let Some(value) = self.get(name) else { return Ok(1.0) };
        f64::from_str(&value).ok().filter(|ratio| (0.0..=1.0).contains(ratio)).ok_or_else(|| unusable(name, "is no number from 0 to 1"))
    }
}

#[cfg(test)]
mod tests;
