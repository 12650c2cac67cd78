//! Reads an event stream as it passes, without changing a byte: whether it is finished or has
//! failed, and its usage.
//!
//! The scanner passes on whole events and buffers a last half one, so that an error event can
//! always be appended. A success needs a finish reason: engines send HTTP 200 and even `[DONE]`
//! after they have died. Finish reasons and usage are read by structure ([`AnswerParser`]), but
//! only in events that seem to have one.

use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memmem::Finder;

use super::answer_parser::{AnswerParser, FinishState, TokenUsage};
use super::engine_error::EngineEnd;
use super::event::{EventFields, event_end};
use super::text_length::text_bytes;
use hostler_api::Dialect;

/// A longer event is passed on in parts. Log probabilities of a long prompt make the largest.
const MAX_BUFFERED_EVENT_BYTES: usize = 256 * 1024;

/// The limit for events with tokens: those of a prompt of 128 KiB, whose tokens may be its bytes.
const MAX_TOKEN_EVENT_BYTES: usize = 1024 * 1024;

/// Bytes of a longer event that stay buffered, because two reads may split the mark of its end.
const OVERLAP_BYTES: usize = 4;

/// Hardly any token has more bytes of text. English has about half as many.
const MOST_BYTES_PER_TOKEN: u64 = 8;

#[derive(Debug, PartialEq, Eq)]
pub enum ChunkOutcome {
    /// Send these bytes, which may be none.
    Forward(Bytes),
    /// Send these bytes, then end the answer as broken. They end with the engine's own error event.
    Failed {
        bytes: Bytes,
        /// Where the error event begins in `bytes`.
        error_at: usize,
        /// The error says that the engine core is dead.
        is_engine_dead: bool,
    },
    /// Send these bytes, then the router's own error event: the engine aborted the answer while
    /// pretending to finish it.
    Aborted(Bytes),
}

#[derive(Debug)]
pub struct SseScanner {
    dialect: Dialect,
    /// A longer event is passed on in parts.
    max_event_bytes: usize,
    buffer: BytesMut,
    /// Set while the buffer holds a later part of an event whose beginning was passed on.
    partial_event: Option<Box<PartialEvent>>,
    has_finish: bool,
    has_done_marker: bool,
    usage: Option<TokenUsage>,
    event_count: u64,
    /// Bytes of generated text so far, if they are counted.
    text_bytes: Option<u64>,
}

/// An event that is passed on in parts.
#[derive(Debug)]
struct PartialEvent {
    parser: AnswerParser,
    is_final: bool,
    is_error: bool,
}

enum EventVerdict {
    Fine,
    Error { is_engine_dead: bool },
    Abort,
}

impl SseScanner {
    #[must_use]
    pub fn new(dialect: Dialect) -> Self {
        Self {
            dialect,
            max_event_bytes: MAX_BUFFERED_EVENT_BYTES,
            buffer: BytesMut::new(),
            partial_event: None,
            has_finish: false,
            has_done_marker: false,
            usage: None,
            event_count: 0,
            text_bytes: None,
        }
    }

    /// Lets events with the tokens of a long prompt through whole.
    pub(crate) fn expect_tokens(&mut self) {
        self.max_event_bytes = MAX_TOKEN_EVENT_BYTES;
    }

    /// Counts the text of processed events from now on.
    pub(crate) fn count_text(&mut self) {
        self.text_bytes = Some(0);
    }

    /// Whether the next bytes begin an event.
    #[must_use]
    pub(crate) fn is_between_events(&self) -> bool {
        self.buffer.is_empty() && self.partial_event.is_none()
    }

    /// Counts an event with nothing of interest but perhaps text.
    pub(crate) fn count_plain_event(&mut self, event: &[u8]) {
        self.event_count += 1;
        self.count_text_of(event);
    }

    fn count_text_of(&mut self, event: &[u8]) {
        if let Some(bytes) = &mut self.text_bytes {
            *bytes += text_bytes(self.dialect.text_fields(), event);
        }
    }

    /// Whether the last bytes passed on, or the next ones, are part of an event.
    #[must_use]
    pub(crate) fn is_within_event(&self) -> bool {
        self.partial_event.is_some()
    }

    /// Forgets the parts of a stream that the client lacks when it goes on elsewhere: the beginning
    /// of an event, and what the rest of the stream had said. `is_finished` if the client has the
    /// finish reason.
    pub(crate) fn rewind(&mut self, is_finished: bool) {
        self.buffer.clear();
        self.has_finish = is_finished;
        self.has_done_marker = false;
    }

    /// Reads bytes and returns those that may be sent.
    pub fn process(&mut self, bytes: Bytes) -> ChunkOutcome {
        let bytes = if self.buffer.is_empty() {
            bytes
        } else {
            let searched = self.buffer.len().saturating_sub(OVERLAP_BYTES);
            self.buffer.extend_from_slice(&bytes);
            // The event goes on. Bytes that were searched are neither searched again nor copied.
            if self.buffer.len() <= self.max_event_bytes && event_end(&self.buffer[searched..]).is_none() {
                return ChunkOutcome::Forward(Bytes::new());
            }
            self.buffer.split().freeze()
        };
        let mut begin = 0;
        while let Some(end) = event_end(&bytes[begin..]) {
            match self.scan_event(&bytes[begin..begin + end]) {
                EventVerdict::Fine => begin += end,
                EventVerdict::Error { is_engine_dead } => {
                    return ChunkOutcome::Failed { bytes: bytes.slice(..begin + end), error_at: begin, is_engine_dead };
                }
                EventVerdict::Abort => return ChunkOutcome::Aborted(bytes.slice(..begin)),
            }
            self.event_count += 1;
            self.partial_event = None;
        }
        if bytes.len() - begin > self.max_event_bytes {
            let end = bytes.len() - OVERLAP_BYTES;
            if matches!(self.scan_part(&bytes[begin..end]), EventVerdict::Abort) {
                return ChunkOutcome::Aborted(bytes.slice(..begin));
            }
            begin = end;
        }
        self.buffer.extend_from_slice(&bytes[begin..]);
        ChunkOutcome::Forward(bytes.slice(..begin))
    }

    /// The event that tells the client that its answer has failed. An event that was sent in part
    /// is closed first.
    #[must_use]
    pub fn error_event(&self, message: &str) -> Bytes {
        let event = self.dialect.error_event(message);
        if self.partial_event.is_some() { [b"\n\n", &event[..]].concat().into() } else { event }
    }

    /// Bytes that keep the connection alive now, unless an event is being sent in parts.
    #[must_use]
    pub(crate) fn keep_alive(&self) -> Option<Bytes> {
        self.partial_event.is_none().then(|| self.dialect.keep_alive())
    }

    /// Takes the buffered rest of a stream that has ended.
    pub fn take_rest(&mut self) -> Bytes {
        let rest = self.buffer.split().freeze();
        // An engine may leave out the last blank line.
        if !rest.is_empty() {
            self.scan_event(&rest);
            self.event_count += 1;
        }
        rest
    }

    /// Whether the ended stream was a complete answer.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        match self.dialect {
            Dialect::OpenAi => self.has_finish && self.has_done_marker,
            Dialect::Responses | Dialect::Anthropic => self.has_finish,
            Dialect::Other => true,
        }
    }

    #[must_use]
    pub fn usage(&self) -> Option<TokenUsage> {
        self.usage
    }

    #[must_use]
    pub fn event_count(&self) -> u64 {
        self.event_count
    }

    /// The least number of answer tokens so far.
    ///
    /// Each event counts as one, except the first, which has only a role, and the last. If text is
    /// counted, the tokens are at least as many as the text needs.
    #[must_use]
    pub(crate) fn least_tokens(&self) -> u64 {
        let of_text = self.text_bytes.unwrap_or_default() / MOST_BYTES_PER_TOKEN;
        self.event_count.saturating_sub(2).max(of_text)
    }

    fn scan_event(&mut self, event: &[u8]) -> EventVerdict {
        static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"usage\":{"));
        if self.partial_event.is_some() {
            return self.scan_last_part(event);
        }
        self.count_text_of(event);
        let EventFields { name, data } = EventFields::parse(event);
        if is_error(name, data) {
            return EventVerdict::Error { is_engine_dead: data.and_then(EngineEnd::read) == Some(EngineEnd::CoreDied) };
        }
        let ends = self.dialect.is_final_event(name);
        self.has_finish |= ends && !self.dialect.has_usage_field(name);
        let Some(data) = data else { return EventVerdict::Fine };
        match self.dialect {
            Dialect::OpenAi if data.starts_with(b"[DONE]") => self.has_done_marker = true,
            Dialect::OpenAi if has_finish_reason(data) => return self.apply_answer(&AnswerParser::parse(data, ""), false),
            // Clients may ask for usage in every event.
            Dialect::OpenAi if USAGE.find(data).is_some() => self.merge_usage(AnswerParser::parse_usage(data)),
            Dialect::OpenAi => {}
            Dialect::Other if USAGE.find(data).is_none() => {}
            Dialect::Responses | Dialect::Anthropic if !self.dialect.has_usage_field(name) => {}
            _ => return self.apply_answer(&AnswerParser::parse(data, self.dialect.nested_field()), ends),
        }
        EventVerdict::Fine
    }

    /// Reads a part of an event that is too long to be buffered.
    fn scan_part(&mut self, part: &[u8]) -> EventVerdict {
        let dialect = self.dialect;
        let long = match &mut self.partial_event {
            Some(long) => {
                long.parser.feed(part);
                long
            }
            none => {
                let EventFields { name, data } = EventFields::parse(part);
                let parser = if dialect.has_usage_field(name) {
                    AnswerParser::parse(data.unwrap_or_default(), dialect.nested_field())
                } else {
                    AnswerParser::inert()
                };
                none.insert(Box::new(PartialEvent { parser, is_final: dialect.is_final_event(name), is_error: is_error(name, data) }))
            }
        };
        if dialect == Dialect::OpenAi && long.parser.finish_state() == FinishState::Abort {
            EventVerdict::Abort
        } else {
            EventVerdict::Fine
        }
    }

    fn scan_last_part(&mut self, part: &[u8]) -> EventVerdict {
        let verdict = self.scan_part(part);
        let Some(long) = self.partial_event.take() else { return verdict };
        let verdict = match verdict {
            EventVerdict::Fine if long.is_error => EventVerdict::Error { is_engine_dead: false },
            EventVerdict::Fine => self.apply_answer(&long.parser, long.is_final),
            verdict => verdict,
        };
        // The rest must be read as part of the same event.
        self.partial_event = Some(long);
        verdict
    }

    /// Applies an event's statements about the answer. `ends` means that it ends a complete answer.
    fn apply_answer(&mut self, parser: &AnswerParser, ends: bool) -> EventVerdict {
        self.has_finish |= ends && parser.is_complete();
        if self.dialect == Dialect::OpenAi {
            match parser.finish_state() {
                FinishState::Abort => return EventVerdict::Abort,
                FinishState::Finished => self.has_finish = true,
                FinishState::None => {}
            }
        }
        self.merge_usage(parser.usage());
        EventVerdict::Fine
    }

    /// Adds to the usage so far. The last event of a message need not repeat the prompt's length.
    fn merge_usage(&mut self, usage: Option<TokenUsage>) {
        if let Some(usage) = usage {
            let before = self.usage.unwrap_or_default();
            self.usage = Some(TokenUsage {
                prompt_tokens: usage.prompt_tokens.max(before.prompt_tokens),
                cached_tokens: usage.cached_tokens.or(before.cached_tokens),
                ..usage
            });
        }
    }
}

/// Whether an event is an engine's error. Clients cannot influence an event's name or the first
/// field of its data.
fn is_error(name: &[u8], data: Option<&[u8]>) -> bool {
    name == b"error" || data.is_some_and(|data| data.starts_with(b"{\"error\":"))
}

/// Whether an event has a finish reason, which is `null` in nearly all events.
fn has_finish_reason(data: &[u8]) -> bool {
    static FINISH: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"finish_reason\":"));
    FINISH.find_iter(data).any(|at| data[at + FINISH.needle().len()..].trim_ascii_start().starts_with(b"\""))
}

#[cfg(test)]
mod tests;
