//! Traces for OpenTelemetry: the spans of a request, from its arrival to its end, sent to a
//! collector.
//!
//! Tracing is off until a standard environment variable names a collector
//! (`hostler_boot::collector`). Then a sampling rule decides at a request's arrival whether it has
//! a trace. The events of a request are recorded in its access entry, which keeps the
//! [`RequestTrace`] of a traced request. Spans have the access log's content: never a body, a
//! query, another header's value or the text of an error. docs/decisions/0027 gives the reasons for
//! this design.

mod exporter;
mod names;
mod request_trace;
mod spans;
mod trace_parent;

use std::sync::Arc;

use hostler_boot::{SamplingRule, TraceSettings};
use http::header::HeaderMap;
use prometheus_client::metrics::counter::Counter;

use exporter::SpanQueue;
pub(crate) use exporter::TraceExport;
pub(crate) use request_trace::RequestTrace;
pub(crate) use spans::RequestEnd;
pub(crate) use trace_parent::TraceParent;

/// Decides which requests have a trace.
#[derive(Debug, Clone, Default)]
pub(crate) struct Traces(Option<Arc<SampledTraces>>);

#[derive(Debug)]
struct SampledTraces {
    sampling: SamplingRule,
    queue: SpanQueue,
}

impl Traces {
    /// Sends traces as the settings say. Spans without room or without a collector are counted as
    /// `dropped`. There are no traces without settings, or if no exporter can be made from them.
    pub(crate) fn start(settings: Option<&TraceSettings>, dropped: Counter) -> (Self, TraceExport) {
        let Some(settings) = settings else { return Default::default() };
        match exporter::start(settings, dropped) {
            Ok(queue) => {
                let export = TraceExport::new(queue.clone());
                (Self(Some(Arc::new(SampledTraces { sampling: settings.sampling, queue }))), export)
            }
            Err(error) => {
                tracing::warn!(%error, "no traces are sent");
                Default::default()
            }
        }
    }

    /// The trace of a request with these headers, if it has one.
    #[must_use]
    pub(crate) fn begin(&self, headers: &HeaderMap) -> Option<Box<RequestTrace>> {
        let SampledTraces { sampling, queue } = self.0.as_deref()?;
        let parent = TraceParent::from_headers(headers);
        let trace = parent.map_or_else(|| fastrand::u128(1..), |parent| parent.trace);
        let is_sampled = sampling.is_sampled(trace, parent.map(|parent| parent.is_sampled));
        is_sampled.then(|| Box::new(RequestTrace::new(trace, parent.map(|parent| parent.span), queue.clone())))
    }
}
