//! The access log: one line for each request when it has ended, however it ended.
//!
//! The edge begins an [`AccessEntry`] with each request. Whoever learns something about the request
//! records it there, and dropping the last clone writes the line. If the request has a trace, the
//! same records become its spans.
//!
//! A line has names, numbers and our own words: never a body, a query, a header's value or the text
//! of an error. Clients' names (path, model, their own id) are cut and escaped when they are
//! written.

mod attempt_entry;
mod line;
mod refusals;
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
use crate::token_ledger::TokenLedger;
use crate::traces::{RequestTrace, TraceParent};
pub(crate) use attempt_entry::AttemptEntry;
use line::AccessLine;
pub(crate) use refusals::{RefusalLog, RefusedRequest};
use writer::LineSender;
pub(crate) use writer::{AccessLogError, AccessLogWriter};

/// Request header: the client's name for its request.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Most bytes of a client's name for its request that are remembered.
const MAX_CLIENT_ID_BYTES: usize = 128;

/// By default it writes and remembers nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct AccessLog {
    lines: Option<LineSender>,
    /// Remembers refused requests, also where no lines are written.
    refusals: Option<RefusalLog>,
    usage: Option<TokenLedger>,
}

impl AccessLog {
    /// Adds ended requests to this ledger, too.
    #[must_use]
    pub(crate) fn with_usage(self, usage: Option<TokenLedger>) -> Self {
        Self { usage, ..self }
    }

    /// Writes to the file at `path`, or to standard error if that is empty. Lines that find no room
    /// are counted as `dropped`.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub(crate) fn start(format: AccessFormat, path: &std::path::Path, dropped: Counter) -> Result<(Self, AccessLogWriter), AccessLogError> {
        let refusals = Some(RefusalLog::default());
        if format == AccessFormat::Off {
            return Ok((Self { lines: None, refusals, usage: None }, AccessLogWriter::default()));
        }
        let (lines, writing) = writer::start(format, path, dropped)?;
        Ok((Self { lines: Some(lines), refusals, usage: None }, writing))
    }

    /// The latest refused requests.
    pub(crate) fn refusals(&self) -> RefusalLog {
        self.refusals.clone().unwrap_or_default()
    }

    /// Begins the entry of a request, with its trace if it has one.
    #[must_use]
    pub(crate) fn start_entry(
        &self,
        method: &Method,
        path: Option<&PathAndQuery>,
        headers: &HeaderMap,
        trace: Option<Box<RequestTrace>>,
    ) -> AccessEntry {
        if self.lines.is_none() && self.refusals.is_none() && self.usage.is_none() && trace.is_none() {
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
        AccessEntry(Some(Arc::new(OpenEntry { line: Mutex::new(Some(line)), log: self.clone(), trace: trace.map(Mutex::new) })))
    }
}

/// The entry of one request, shared by clones. Dropping the last clone writes the line and sends
/// the spans.
#[derive(Debug, Clone, Default)]
pub(crate) struct AccessEntry(Option<Arc<OpenEntry>>);

#[derive(Debug)]
struct OpenEntry {
    /// Taken when the line is written.
    line: Mutex<Option<Box<AccessLine>>>,
    log: AccessLog,
    trace: Option<Mutex<Box<RequestTrace>>>,
}

impl Drop for OpenEntry {
    fn drop(&mut self) {
        let Some(mut line) = self.line.get_mut().take() else { return };
        line.total = line.received_at.elapsed();
        line.ended_at = SystemTime::now();
        // Requests without a caller would crowd out the spans of callers with keys.
        if let Some(trace) = self.trace.take().filter(|_| line.has_caller) {
            trace.into_inner().finish(&line.request_end());
        }
        if let Some(refusals) = &self.log.refusals
            && let Some(refused) = RefusedRequest::of(&line)
        {
            refusals.record(refused);
        }
        if let Some(usage) = self.log.usage.as_ref().filter(|_| line.id != 0) {
            let (holder, counts) = line.usage_row();
            usage.record(holder, &counts, line.ended_at);
        }
        if let Some(lines) = &self.log.lines {
            lines.send(line);
        }
    }
}

impl AccessEntry {
    /// An entry that records nothing, for requests that no client has sent.
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

    /// The router's number of the request; `None` if it was refused before it was read.
    pub(crate) fn request_id(&self) -> Option<u64> {
        let open = self.0.as_ref()?;
        let line = open.line.lock();
        line.as_ref().map(|line| line.id).filter(|id| *id != 0)
    }

    /// Records that the request may be sent to an engine.
    pub(crate) fn record_admission(&self) {
        self.update_trace(RequestTrace::record_admission);
    }

    /// Records that the request is sent to this replica, as decided, after this time in the queue.
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

    /// Records that another replica is sought for a stream that still comes.
    pub(crate) fn record_search(&self) {
        self.update_trace(RequestTrace::record_search);
    }

    /// Sets how the stream is resumed if its engine dies.
    pub(crate) fn set_resume_tier(&self, tier: ResumeTier) {
        self.update(|line| line.resume = Some(tier));
    }

    /// Records that the stream goes on from another engine.
    pub(crate) fn record_resumption(&self) {
        self.update(|line| line.resumed += 1);
        self.update_trace(RequestTrace::record_resumption);
    }

    pub(crate) fn record_first_byte(&self) {
        self.update(|line| line.first_byte = line.first_byte.or(Some(line.received_at.elapsed())));
    }

    /// Records that no engine answers, because of `cause`. Only the first cause is logged.
    pub(crate) fn record_refusal(&self, cause: &'static str) {
        self.update(|line| line.cause = line.cause.or(Some(cause)));
    }

    /// Records the end of an answer that had begun. `cause` says why it broke.
    pub(crate) fn record_end(&self, outcome: AnswerOutcome, cause: Option<&'static str>, usage: Option<TokenUsage>) {
        self.update(|line| {
            line.outcome = Some(outcome);
            line.cause = line.cause.or(cause);
            line.usage = usage;
        });
        self.update_trace(|trace| trace.record_end(cause));
    }

    /// Sets the router's own count of an answer that does not say its usage.
    pub(crate) fn set_counted(&self, counted: TokenUsage) {
        self.update(|line| line.counted = Some(counted));
    }

    /// Sets how many bytes of an engine's answer were passed on.
    pub(crate) fn set_bytes(&self, bytes: u64) {
        self.update(|line| line.bytes = bytes);
    }

    /// Sets the status, and the length of a body that the router makes itself.
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
