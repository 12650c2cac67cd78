//! The access log: one line for each request when it has ended, however it ended. The edge begins an [`AccessEntry`] with each request; whoever
//! learns something of the request notes it there, and the last one that lets go of it has the line written. Where the request has a trace, the same
//! notes become its spans.
//!
//! A line has names, numbers and words of ours: never a body, a query, a header's value or the text of an error. What clients name
//! (path, model, their own id) is cut and escaped where it is written.

mod attempt_entry;
mod line;
mod writer;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::Method;
use http::header::{HeaderMap, HeaderName};
use http::uri::PathAndQuery;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tokio::time::Instant;

use crate::client_text::cut;
use crate::config::AccessFormat;
use crate::keys::Caller;
use crate::outcome::AnswerOutcome;
use crate::placement::PlacementDecision;
use crate::resume_tier::ResumeTier;
use crate::sse::TokenUsage;
use crate::traces::{RequestTrace, TraceParent};
pub(crate) use attempt_entry::AttemptEntry;
use line::AccessLine;
use writer::LineSender;
pub(crate) use writer::{AccessLogError, AccessLogWriter};

/// On a request: what its client calls it.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// A client's name for its request is remembered up to this many bytes.
const MAX_CLIENT_ID_BYTES: usize = 128;

#[derive(Debug, Clone, Default)]
pub(crate) struct AccessLog(Option<LineSender>);

impl AccessLog {
    /// Writes to the file at `path`, or to standard error when that is empty. Lines for which there
    /// is no room are counted as `dropped`.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub(crate) fn start(format: AccessFormat, path: &std::path::Path, dropped: Counter) -> Result<(Self, AccessLogWriter), AccessLogError> {
        if format == AccessFormat::Off {
            return Ok((Self(None), AccessLogWriter::default()));
        }
        let (lines, writing) = writer::start(format, path, dropped)?;
        Ok((Self(Some(lines)), writing))
    }

    /// Begins what is noted of a request, with its trace if it has one.
    #[must_use]
    pub(crate) fn start_entry(
        &self,
        method: &Method,
        path: Option<&PathAndQuery>,
        headers: &HeaderMap,
        trace: Option<Box<RequestTrace>>,
    ) -> AccessEntry {
        if self.0.is_none() && trace.is_none() {
            return AccessEntry::none();
        }
        let trace_id = trace.as_ref().map(|trace| trace.id());
        let line = Box::new(AccessLine {
            method: method.clone(),
            path: path.map(|path| cut(path.path()).into()),
            client_id: client_id(headers),
            trace: trace_id.or_else(|| TraceParent::from_headers(headers).map(|parent| parent.trace)),
            ..AccessLine::new(Instant::now())
        });
        AccessEntry(Some(Arc::new(OpenEntry { line: Mutex::new(Some(line)), lines: self.0.clone(), trace: trace.map(Mutex::new) })))
    }
}

/// What is noted of one request. Clones share it; the line is written, and the spans are sent, when the last of them is dropped.
#[derive(Debug, Clone, Default)]
pub(crate) struct AccessEntry(Option<Arc<OpenEntry>>);

#[derive(Debug)]
struct OpenEntry {
    /// Taken when it is written.
    line: Mutex<Option<Box<AccessLine>>>,
    /// None where there is no access log.
    lines: Option<LineSender>,
    trace: Option<Mutex<Box<RequestTrace>>>,
}

impl Drop for OpenEntry {
    fn drop(&mut self) {
        let Some(mut line) = self.line.get_mut().take() else { return };
        line.total = line.received_at.elapsed();
        line.ended_at = SystemTime::now();
        // Requests without a caller would fill the queue of spans for those who have keys.
        if let Some(trace) = self.trace.take().filter(|_| line.has_caller) {
            trace.into_inner().finish(&line.request_end());
        }
        if let Some(lines) = &self.lines {
            lines.send(line);
        }
    }
}

impl AccessEntry {
    /// For requests that no client has sent: notes nothing.
    #[must_use]
    pub(crate) fn none() -> Self {
        Self(None)
    }

    pub(crate) fn set_caller(&self, caller: &Caller) {
        self.update(|line| {
            line.has_caller = true;
            line.key = caller.key.clone();
            line.tenant = caller.tenant.clone();
        });
    }

    pub(crate) fn set_request(&self, id: u64, model: Option<&str>) {
        self.update(|line| {
            line.id = id;
            line.model = model.map(|model| cut(model).into());
        });
    }

    /// It may be sent to an engine.
    pub(crate) fn record_admission(&self) {
        self.update_trace(RequestTrace::record_admission);
    }

    /// It is sent to this replica, as was decided, after it was queued for so long.
    pub(crate) fn record_attempt(
        &self,
        replica: &Arc<str>,
        attempt: usize,
        queued: Duration,
        decision: &Arc<PlacementDecision>,
    ) -> AttemptEntry {
        self.update(|line| {
            line.replica = Some(replica.clone());
            line.attempts = attempt;
            line.queued += queued;
        });
        let noted = self.update_trace(|trace| trace.begin_attempt(decision, queued)).flatten();
        let noted = self.0.as_ref().zip(noted);
        noted.map_or_else(AttemptEntry::default, |(entry, (number, parent))| AttemptEntry::new(entry, number, parent))
    }

    /// Another replica is sought for a stream that still comes.
    pub(crate) fn record_search(&self) {
        self.update_trace(RequestTrace::record_search);
    }

    /// What the client of a stream gets if its engine dies.
    pub(crate) fn set_resume_tier(&self, tier: ResumeTier) {
        self.update(|line| line.resume = Some(tier));
    }

    /// It goes on from another engine.
    pub(crate) fn record_resumption(&self) {
        self.update(|line| line.resumed += 1);
        self.update_trace(RequestTrace::record_resumption);
    }

    pub(crate) fn record_first_byte(&self) {
        self.update(|line| line.first_byte = line.first_byte.or(Some(line.received_at.elapsed())));
    }

    /// Notes that no engine answers, because of `cause`. Only the first cause is logged.
    pub(crate) fn record_refusal(&self, cause: &'static str) {
        self.update(|line| line.cause = line.cause.or(Some(cause)));
    }

    /// Notes the end of an answer that had begun; `cause` says why it broke.
    pub(crate) fn record_end(&self, outcome: AnswerOutcome, cause: Option<&'static str>, usage: Option<TokenUsage>) {
        self.update(|line| {
            line.outcome = Some(outcome);
            line.cause = line.cause.or(cause);
            line.usage = usage;
        });
        self.update_trace(|trace| trace.record_end(cause));
    }

    /// Bytes of an engine's answer that were passed on.
    pub(crate) fn set_bytes(&self, bytes: u64) {
        self.update(|line| line.bytes = bytes);
    }

    /// Notes the status, and the length of a body that the router makes itself.
    pub(crate) fn set_status(&self, status: u16, own_bytes: Option<u64>) {
        self.update(|line| {
            line.status = Some(status);
            line.bytes = own_bytes.unwrap_or(line.bytes);
        });
    }

    fn update(&self, note: impl FnOnce(&mut AccessLine)) {
        if let Some(open) = &self.0
            && let Some(line) = open.line.lock().as_mut()
        {
            note(line);
        }
    }

    fn update_trace<T>(&self, note: impl FnOnce(&mut RequestTrace) -> T) -> Option<T> {
        let trace = self.0.as_ref()?.trace.as_ref()?;
        Some(note(&mut trace.lock()))
    }
}

pub(crate) fn client_id(headers: &HeaderMap) -> Option<Arc<str>> {
    let name = headers.get(REQUEST_ID)?.to_str().ok()?;
    (name.len() <= MAX_CLIENT_ID_BYTES).then(|| name.into())
}

#[cfg(test)]
mod tests;
