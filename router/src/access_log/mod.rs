//! The access log: one line for each request when it has ended, however it ended. The edge begins an [`AccessEntry`] with each request; whoever
//! learns something of the request notes it there, and the last one that lets go of it has the line written.
//!
//! A line has names, numbers and words of ours: never a body, a query, a header's value or the text of an error. What clients name
//! (path, model, their own id) is cut and escaped where it is written.

mod line;
mod writer;

use std::sync::Arc;
use std::time::SystemTime;

use http::Method;
use http::header::{HeaderMap, HeaderName};
use http::uri::PathAndQuery;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tokio::time::Instant;

use crate::config::AccessFormat;
use crate::keys::Caller;
use crate::outcome::AnswerOutcome;
use crate::resume_tier::ResumeTier;
use crate::sse::TokenUsage;
use line::AccessLine;
use writer::LineSender;
pub(crate) use writer::{AccessLogError, AccessLogWriter};

/// W3C's Trace Context, of which a line has the trace.
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

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

    #[must_use]
    pub(crate) fn start_entry(&self, method: &Method, path: Option<&PathAndQuery>, headers: &HeaderMap) -> AccessEntry {
        let Some(lines) = &self.0 else { return AccessEntry::none() };
        let line = Box::new(AccessLine {
            method: method.clone(),
            path: path.map(|path| line::truncate(path.path())),
            client_id: client_id(headers),
            trace: headers.get(TRACEPARENT).and_then(|parent| trace_id(parent.as_bytes())),
            ..AccessLine::new(Instant::now())
        });
        AccessEntry(Some(Arc::new(OpenEntry { line: Mutex::new(Some(line)), lines: lines.clone() })))
    }
}

/// What is noted of one request. Clones share it; the line is written when the last of them is
/// dropped.
#[derive(Debug, Clone, Default)]
pub(crate) struct AccessEntry(Option<Arc<OpenEntry>>);

#[derive(Debug)]
struct OpenEntry {
    /// Taken when it is written.
    line: Mutex<Option<Box<AccessLine>>>,
    lines: LineSender,
}

impl Drop for OpenEntry {
    fn drop(&mut self) {
        if let Some(mut line) = self.line.get_mut().take() {
            line.total = line.received_at.elapsed();
            line.ended_at = SystemTime::now();
            self.lines.send(line);
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
            line.key = caller.key.clone();
            line.tenant = caller.tenant.clone();
        });
    }

    pub(crate) fn set_request(&self, id: u64, model: Option<&str>) {
        self.update(|line| {
            line.id = id;
            line.model = model.map(line::truncate);
        });
    }

    /// It is sent to this replica, after it was queued for so long.
    pub(crate) fn record_attempt(&self, replica: &Arc<str>, attempt: usize, queued: std::time::Duration) {
        self.update(|line| {
            line.replica = Some(replica.clone());
            line.attempts = attempt;
            line.queued += queued;
        });
    }

    /// What the client of a stream gets if its engine dies.
    pub(crate) fn set_resume_tier(&self, tier: ResumeTier) {
        self.update(|line| line.resume = Some(tier));
    }

    /// It goes on from another engine.
    pub(crate) fn record_resumption(&self) {
        self.update(|line| line.resumed += 1);
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
}

pub(crate) fn client_id(headers: &HeaderMap) -> Option<Arc<str>> {
    let name = headers.get(REQUEST_ID)?.to_str().ok()?;
    (name.len() <= MAX_CLIENT_ID_BYTES).then(|| name.into())
}

/// The trace id in W3C's `traceparent`: version, trace, parent and flags in hexadecimal, separated
/// by hyphens.
fn trace_id(parent: &[u8]) -> Option<u128> {
    let is_apart = |at: usize| parent.get(at) == Some(&b'-');
    let digits = parent.get(3..35).filter(|_| is_apart(2) && is_apart(35))?;
    let is_lower_hex = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
    let digits = std::str::from_utf8(digits).ok().filter(|digits| digits.as_bytes().iter().all(is_lower_hex))?;
    u128::from_str_radix(digits, 16).ok().filter(|trace| *trace != 0)
}

#[cfg(test)]
mod tests;
