//! OpenTelemetry's standard environment variables. An empty variable counts as not set.

use std::str::FromStr;
use std::time::Duration;

use http::Uri;

use super::{CollectorSettings, CollectorSettingsError};

/// Variables of one kind of telemetry. Those for this kind alone take precedence over those for
/// all.
pub(super) struct Signal {
    exporter: &'static str,
    endpoint: [&'static str; 2],
    protocol: [&'static str; 2],
    timeout: [&'static str; 2],
    certificate: [&'static str; 2],
}

pub(super) const TRACES: Signal = Signal {
    exporter: "OTEL_TRACES_EXPORTER",
    endpoint: ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"],
    protocol: ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"],
    timeout: ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"],
    certificate: ["OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE"],
};

pub(super) const LOGS: Signal = Signal {
    exporter: "OTEL_LOGS_EXPORTER",
    endpoint: ["OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"],
    protocol: ["OTEL_EXPORTER_OTLP_LOGS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"],
    timeout: ["OTEL_EXPORTER_OTLP_LOGS_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"],
    certificate: ["OTEL_EXPORTER_OTLP_LOGS_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE"],
};

pub(super) struct Environment<F>(F);

impl<F: Fn(&'static str) -> Option<String>> Environment<F> {
    pub(super) fn new(variable: F) -> Self {
        Self(variable)
    }

    pub(super) fn get(&self, name: &'static str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    /// The first of these variables that is set.
    fn first<const N: usize>(&self, names: [&'static str; N]) -> Option<(&'static str, String)> {
        names.into_iter().find_map(|name| Some((name, self.get(name)?)))
    }

    pub(super) fn milliseconds<const N: usize>(&self, names: [&'static str; N]) -> Result<Option<Duration>, CollectorSettingsError> {
        let Some((name, value)) = self.first(names) else { return Ok(None) };
        let milliseconds = u64::from_str(&value).ok().filter(|milliseconds| *milliseconds > 0);
        milliseconds
            .map(|milliseconds| Some(Duration::from_millis(milliseconds)))
            .ok_or_else(|| unusable(name, "is no number of milliseconds"))
    }

    /// Queue size, from 1 to `most`.
    pub(super) fn queue_size(&self, name: &'static str, most: u64) -> Result<Option<usize>, CollectorSettingsError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let size = u64::from_str(&value).ok().filter(|size| (1..=most).contains(size));
        let size = size.ok_or_else(|| unusable(name, format!("is no number from 1 to {most}")))?;
        Ok(usize::try_from(size).ok())
    }

    /// The collector of this signal; `None` if nobody asks for one.
    pub(super) fn collector(&self, signal: &Signal) -> Result<Option<CollectorSettings>, CollectorSettingsError> {
        let Some((endpoint_variable, endpoint)) = self.first(signal.endpoint) else { return Ok(None) };
        if self.get("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        match self.get(signal.exporter).as_deref() {
            None | Some("otlp") => {}
            Some("none") => return Ok(None),
            Some(_) => return Err(unusable(signal.exporter, "is neither `otlp` nor `none`, and there is no other exporter here")),
        }
        if let Some((variable, protocol)) = self.first(signal.protocol)
            && protocol != "grpc"
        {
            let problem = "is not `grpc`, which is the only protocol here: set it to that and the endpoint to the collector's port for gRPC, by \
                           default 4317";
            return Err(unusable(variable, problem));
        }
        check_endpoint(&endpoint).map_err(|problem| unusable(endpoint_variable, problem))?;
        let plain = CollectorSettings::for_endpoint(endpoint);
        Ok(Some(CollectorSettings {
            certificate: self.first(signal.certificate).map(|(_, path)| path.into()),
            request_timeout: self.milliseconds(signal.timeout)?.unwrap_or(plain.request_timeout),
            ..plain
        }))
    }
}

pub(super) fn unusable(variable: &'static str, problem: impl Into<String>) -> CollectorSettingsError {
    CollectorSettingsError { variable, problem: problem.into() }
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
