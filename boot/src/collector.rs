//! Export over gRPC to the OpenTelemetry collector named by standard environment variables: a
//! router's traces, and every role's events.
//!
//! The exporters themselves read the remaining variables (headers, batches, resource).

mod environment;
pub mod events;
mod traces;

use std::path::PathBuf;
use std::time::Duration;

use opentelemetry::{Key, KeyValue};
use opentelemetry_otlp::tonic_types::transport::{Certificate, ClientTlsConfig};
use opentelemetry_otlp::{ExporterBuildError, WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::Resource;
use tonic::metadata::{KeyAndMutValueRef, MetadataMap};

pub use traces::{SamplingRule, TraceSettings};

/// Default of OTEL_EXPORTER_OTLP_TIMEOUT.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CollectorSettings {
    /// URL of a collector that takes OTLP over gRPC.
    pub endpoint: String,
    /// File with authorities for the collector's certificate in PEM, in addition to the system's
    /// own.
    pub certificate: Option<PathBuf>,
    /// Time for one request to the collector.
    pub request_timeout: Duration,
}

/// A variable whose value is unusable. No value is repeated, because a URL may contain a password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{variable} {problem}")]
pub struct CollectorSettingsError {
    variable: &'static str,
    problem: String,
}

/// Reason why nothing can be sent to a collector.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error(transparent)]
    Settings(#[from] ExporterBuildError),
    #[error("OTEL_EXPORTER_OTLP_CERTIFICATE: cannot read {}: {source}", path.display())]
    Certificate { path: PathBuf, source: std::io::Error },
}

impl CollectorSettings {
    /// Settings for a collector at this URL, with the standard's defaults.
    #[must_use]
    pub fn for_endpoint(endpoint: String) -> Self {
        Self { endpoint, certificate: None, request_timeout: REQUEST_TIMEOUT }
    }

    /// Configures an exporter for this collector.
    ///
    /// # Errors
    /// When the certificate cannot be read.
    pub fn configure<B: WithExportConfig + WithTonicConfig>(&self, exporter: B) -> Result<B, ExportError> {
        let exporter = exporter.with_endpoint(self.endpoint.as_str()).with_timeout(self.request_timeout).with_interceptor(hide_values);
        Ok(if self.endpoint.starts_with("https:") { exporter.with_tls_config(self.tls()?) } else { exporter })
    }

    fn tls(&self) -> Result<ClientTlsConfig, ExportError> {
        let tls = ClientTlsConfig::new().with_enabled_roots();
        let Some(path) = &self.certificate else { return Ok(tls) };
        let pem = std::fs::read(path).map_err(|source| ExportError::Certificate { path: path.clone(), source })?;
        Ok(tls.ca_certificate(Certificate::from_pem(pem)))
    }
}

/// Marks header values as sensitive: they may contain a key, and HTTP/2 is logged at the level
/// `trace`.
fn hide_values(mut request: tonic::Request<()>) -> Result<tonic::Request<()>, tonic::Status> {
    let metadata: &mut MetadataMap = request.metadata_mut();
    for entry in metadata.iter_mut() {
        match entry {
            KeyAndMutValueRef::Ascii(_, value) => value.set_sensitive(true),
            KeyAndMutValueRef::Binary(_, value) => value.set_sensitive(true),
        }
    }
    Ok(request)
}

/// The sender as given by `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES`, else a service of
/// this name on this host.
#[must_use]
pub fn resource(service: &'static str) -> Resource {
    let of_environment = Resource::builder().build();
    let has_name = of_environment.get(&Key::new("service.name")).is_some_and(|name| !name.as_str().starts_with("unknown_service"));
    let mut resource = Resource::builder().with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
    if !has_name {
        resource = resource.with_service_name(service);
    }
    if of_environment.get(&Key::new("host.name")).is_none() {
        resource = resource.with_attribute(KeyValue::new("host.name", crate::this_host()));
    }
    resource.build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collector_headers_are_never_shown() {
        let mut request = tonic::Request::new(());
        request.metadata_mut().insert("authorization", "Bearer hidden".parse().unwrap());
        let shown = format!("{:?}", hide_values(request).unwrap().metadata());
        assert!(shown.contains("authorization") && !shown.contains("hidden"), "{shown}");
    }
}
