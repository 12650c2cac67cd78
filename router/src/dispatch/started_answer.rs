//! An attempt that an engine has begun to answer, and what its beginning reveals.

use std::future::poll_fn;
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use hostler_proto::lane::{Fault, ResponseHead, StreamFault, WINDOW_BYTES};
use memchr::memmem::Finder;

use super::{ABORT_MESSAGE, END_MESSAGE, OutboundRequest, Work};
use crate::access_log::AttemptEntry;
use crate::fan_out::AnswerExchange;
use crate::fleet::{InFlight, Replica};
use crate::placement::{PlacementDecision, PlacementFeedback};
use crate::sse::{AnswerParser, ChunkOutcome, Dialect, EngineEnd, FinishState, SseScanner, TokenUsage};

/// An answer without this text was not cut short by stopping its engine.
static ABORT_MARKER: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"abort\""));

/// An attempt whose head and first bytes have come.
pub(super) struct StartedAnswer {
    pub(super) head: ResponseHead,
    pub(super) first_chunk: Option<Bytes>,
    pub(super) exchange: AnswerExchange,
    /// Taken when another replica is tried.
    pub(super) in_flight: Option<InFlight>,
    pub(super) replica: Arc<Replica>,
    pub(super) feedback: PlacementFeedback,
    pub(super) decision: Arc<PlacementDecision>,
    pub(super) entry: AttemptEntry,
    /// Known if the answer was read whole.
    pub(super) usage: Option<TokenUsage>,
    /// More of a plain answer follows, which may report usage.
    pub(super) has_unread_body: bool,
    /// Only comments have come so far.
    pub(super) awaits_first_event: bool,
}

impl StartedAnswer {
    /// Whether another replica may do better: the engine is full, crashing or has crashed. An event
    /// stream says so with status 200.
    pub(super) fn is_retryable(&self) -> bool {
        let fails_at_once = || self.first_chunk.as_ref().is_some_and(|first| first.starts_with(b"data: {\"error\":")) && self.is_stream();
        matches!(self.head.status, 500 | 503) || fails_at_once()
    }

    /// The fault of the engine itself, if that and not the request caused an error: its core is
    /// dead, or it is stopping and has begun nothing.
    pub(super) fn engine_fault(&self) -> Option<StreamFault> {
        let error = self.first_chunk.as_ref().filter(|_| self.is_retryable())?;
        let (fault, message) = match EngineEnd::read(error)? {
            EngineEnd::CoreDied => (Fault::EngineLost, "the engine's core died"),
            EngineEnd::Stopping => (Fault::NotReady, "the engine was stopping"),
        };
        Some(StreamFault { fault, message: message.into() })
    }

    /// Fails if the engine ended a generation's stream before its first token, because it was
    /// stopped or without a reason. Nothing has reached the client yet.
    pub(super) fn check_stream_start(&self, outgoing: &OutboundRequest) -> Result<(), StreamFault> {
        let OutboundRequest { work, dialect, .. } = *outgoing;
        if self.head.status != 200 || !work.generates() || dialect == Dialect::Other || !self.is_stream() {
            return Ok(());
        }
        let Some(first) = &self.first_chunk else {
            return Err(StreamFault { fault: Fault::Protocol, message: END_MESSAGE.into() });
        };
        let is_aborted = || matches!(SseScanner::new(dialect).process(first.clone()), ChunkOutcome::Aborted(_));
        if ABORT_MARKER.find(first).is_some() && is_aborted() {
            return Err(StreamFault { fault: Fault::EngineStopped, message: ABORT_MESSAGE.into() });
        }
        Ok(())
    }

    /// Waits for the rest of a JSON answer, up to one credit window. Engines write a JSON answer at
    /// once, when it is complete.
    ///
    /// An answer that breaks off, or was cut short because its engine was stopped, is lost before
    /// anything has reached the client. If nothing was to be computed, text that looks like an
    /// abort or like usage is the client's own.
    pub(super) async fn buffer_json_body(&mut self, work: Work) -> Result<(), StreamFault> {
        if !self.head.has_content_type(b"application/json") {
            return Ok(());
        }
        let mut body = self.first_chunk.take().unwrap_or_default();
        let mut is_whole = false;
        while !is_whole && body.len() < WINDOW_BYTES {
            match poll_fn(|context| self.exchange.poll_body(context)).await? {
                Some(more) => body = [body, more].concat().into(),
                None => is_whole = true,
            }
        }
        if work.generates() && ABORT_MARKER.find(&body).is_some() && AnswerParser::parse(&body, "").finish_state() == FinishState::Abort {
            return Err(StreamFault { fault: Fault::EngineStopped, message: ABORT_MESSAGE.into() });
        }
        if work.is_some() && is_whole {
            self.usage = AnswerParser::parse_usage(&body);
        }
        self.has_unread_body = work.is_some() && !is_whole;
        self.first_chunk = (!body.is_empty()).then_some(body);
        Ok(())
    }

    pub(super) fn is_stream(&self) -> bool {
        self.head.has_content_type(b"text/event-stream")
    }
}
