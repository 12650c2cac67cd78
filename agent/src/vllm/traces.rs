//! Spans of engines, and their destination. vLLM 0.32 was examined, in its sources and by running
//! it.
//!
//! With `--otlp-traces-endpoint` its Python front-end sends one span for each request,
//! `llm_request`, below the `traceparent` that the request came with, over gRPC without TLS. It
//! needs packages that not every installation has, and does not start with the flag if they are
//! absent. Its Rust front-end has no such flag.

use hostler_boot::{CollectorSettingsError, TraceSettings};

use super::releases::TRACES_SINCE;
use super::version::InstalledVllm;

/// Flag that makes an engine send spans.
pub(crate) const TRACES_FLAG: &str = "--otlp-traces-endpoint";

/// Variables of an engine that sends spans.
///
/// Routers decide which requests have a trace; the agent's own test completions have none.
pub(crate) const TRACES_ENVIRONMENT: [(&str, &str); 2] = [("OTEL_SERVICE_NAME", "vllm"), ("OTEL_TRACES_SAMPLER", "parentbased_always_off")];

/// Destination of engines' spans.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum EngineTraces {
    /// Nobody has requested spans.
    #[default]
    Unasked,
    /// Spans go to the collector at this URL.
    SentTo(String),
    Impossible {
        because: String,
    },
}

impl EngineTraces {
    /// Possible destination with the installed vLLM, as the agent's environment asks.
    pub(crate) fn of(requested: Result<Option<TraceSettings>, CollectorSettingsError>, installed: Option<&InstalledVllm>) -> Self {
        let settings = match requested {
            Ok(None) => return Self::Unasked,
            Ok(Some(settings)) => settings,
            Err(error) => return Self::Impossible { because: error.to_string() },
        };
        let obstacle = match installed {
            _ if settings.collector.endpoint.starts_with("https:") => {
                Some("vLLM sends traces over gRPC without TLS only: name a collector on this host or network by http://".to_owned())
            }
            None => Some("the version of vLLM is unknown".to_owned()),
            Some(installed) if installed.version < TRACES_SINCE => {
                Some(format!("vLLM {} has no traces that routers can continue", installed.version))
            }
            Some(installed) if !installed.has_opentelemetry => {
                Some("vLLM's Python lacks OpenTelemetry: install opentelemetry-sdk and opentelemetry-exporter-otlp there".to_owned())
            }
            Some(_) => None,
        };
        obstacle.map_or(Self::SentTo(settings.collector.endpoint), |because| Self::Impossible { because })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vllm::VllmVersion;
    use crate::vllm::parsers::InstalledParsers;

    fn requested(endpoint: &str) -> Result<Option<TraceSettings>, CollectorSettingsError> {
        Ok(Some(TraceSettings::for_endpoint(endpoint.into())))
    }

    fn installed(minor: u32, has_opentelemetry: bool) -> InstalledVllm {
        InstalledVllm {
            version: VllmVersion::new(0, minor),
            interpreter: None,
            lacks_bytecode: false,
            rust_front_end: None,
            has_opentelemetry,
            parsers: InstalledParsers::default(),
        }
    }

    #[test]
    fn engines_send_spans_only_where_asked_and_able() {
        let newest = installed(32, true);
        assert_eq!(EngineTraces::of(Ok(None), Some(&newest)), EngineTraces::Unasked);
        let sent = EngineTraces::SentTo("http://collector:4317".into());
        assert_eq!(EngineTraces::of(requested("http://collector:4317"), Some(&newest)), sent);
        let protocol = ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json");
        let wrong = TraceSettings::from_environment(|name| Some(if name == protocol.0 { protocol.1 } else { "" }.into()));
        assert_eq!(EngineTraces::of(wrong, Some(&newest)), EngineTraces::Unasked, "no endpoint");
        for (endpoint, installed, words) in [
            ("https://collector:4317", Some(newest), "without TLS only"),
            ("http://collector:4317", None, "version of vLLM is unknown"),
            ("http://collector:4317", Some(installed(10, true)), "vLLM 0.10.0"),
            ("http://collector:4317", Some(installed(32, false)), "opentelemetry-exporter-otlp"),
        ] {
            let EngineTraces::Impossible { because } = EngineTraces::of(requested(endpoint), installed.as_ref()) else {
                panic!("{endpoint}")
            };
            assert!(because.contains(words), "{because}");
        }
    }
}
