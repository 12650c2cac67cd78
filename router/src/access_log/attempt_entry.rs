//! The log entry of one attempt, in the entry of its request. Only the request's trace lists
//! attempts one by one.

use std::sync::Arc;

use hostler_proto::lane::Header;

use super::OpenEntry;
use crate::outcome::LossCause;
use crate::traces::{RequestTrace, TraceParent};

/// An attempt. It ends when this is dropped, unless its end was recorded before.
#[derive(Debug, Default)]
pub(crate) struct AttemptEntry(Option<TracedAttempt>);

#[derive(Debug)]
struct TracedAttempt {
    entry: Arc<OpenEntry>,
    number: usize,
    parent: TraceParent,
}

impl AttemptEntry {
    pub(super) fn new(entry: &Arc<OpenEntry>, number: usize, parent: TraceParent) -> Self {
        Self(Some(TracedAttempt { entry: entry.clone(), number, parent }))
    }

    /// Makes the engine's spans join the trace, below this attempt.
    pub(crate) fn add_trace_parent(&self, headers: &mut Vec<Header>) {
        if let Some(TracedAttempt { entry, parent, .. }) = &self.0 {
            let begins_here = entry.trace.as_ref().is_some_and(|trace| !trace.lock().has_parent());
            parent.replace_in(headers, begins_here);
        }
    }

    /// Records the status of the engine's answer.
    pub(crate) fn record_status(&self, status: u16) {
        self.update(|trace, attempt| trace.record_attempt_status(attempt, status));
    }

    pub(crate) fn record_first_token(&self) {
        self.update(|trace, attempt| trace.record_first_token(attempt));
    }

    /// Records that the client does not get this attempt's answer, unless no other engine gives
    /// one.
    pub(crate) fn record_refusal(&self) {
        self.update(|trace, attempt| trace.end_attempt(attempt, None));
    }

    /// Records that the attempt failed because of `cause`.
    pub(crate) fn record_failure(&self, cause: LossCause) {
        self.update(|trace, attempt| trace.end_attempt(attempt, Some(cause.as_str())));
    }

    fn update(&self, note: impl FnOnce(&mut RequestTrace, usize)) {
        if let Some(TracedAttempt { entry, number, .. }) = &self.0
            && let Some(trace) = &entry.trace
        {
            note(&mut trace.lock(), *number);
        }
    }
}

impl Drop for AttemptEntry {
    fn drop(&mut self) {
        self.update(|trace, attempt| trace.end_attempt(attempt, None));
    }
}
