//! An engine's event stream on its way to a client of Ollama's API: every event becomes a line of JSON as it passes.
//!
//! Like the relay that it reads from, it is polled by the client's connection, holds no more than one event, and ends cleanly only when the
//! answer is whole: one that breaks ends with a line that says so, and then breaks.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use hostler_proto::lane::{Fault, StreamFault};
use http_body::{Body, Frame};
use tokio::time::{Instant, Sleep, sleep};

use super::answer::{
    AnswerEnd, AnswerPart, AnswerTimings, ChunkChoice, ChunkMessage, ChunkToolCall, ChunkUsage, CompletionChunk, OllamaToolCall,
    encode_line, error_body, error_message,
};
use super::request::OllamaRoute;
use crate::dispatch::Relay;

/// An event longer than this ends the answer. The largest come with log-probabilities, and have some ten kilobytes.
const MAX_EVENT_BYTES: usize = 1024 * 1024;

/// Arguments of all calls of an answer; they are told when they are complete.
const MAX_TOOL_CALL_BYTES: usize = 4 * 1024 * 1024;

/// Why an answer cannot be told on; its client is told so, and its connection broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::edge) struct TranslationError(pub(in crate::edge) String);

/// Turns the bytes of an event stream, however they are cut, into lines.
#[derive(Debug)]
pub(in crate::edge) struct OllamaTranslator {
    route: OllamaRoute,
    model: String,
    /// The line of the event stream that has come so far.
    partial_line: Vec<u8>,
    /// Lines for the client.
    lines: Vec<u8>,
    received_at: Instant,
    first_token_at: Option<Instant>,
    tool_calls: Vec<PartialToolCall>,
    finish_reason: Option<String>,
    usage: ChunkUsage,
}

/// A call as far as it has come.
#[derive(Debug, Default)]
struct PartialToolCall {
    id: Option<String>,
    name: String,
    arguments: String,
}

/// When something came.
#[derive(Debug, Clone, Copy)]
pub(in crate::edge) struct ArrivalTime {
    pub(in crate::edge) instant: Instant,
    pub(in crate::edge) time: SystemTime,
}

impl ArrivalTime {
    fn now() -> Self {
        Self { instant: Instant::now(), time: SystemTime::now() }
    }
}

impl OllamaTranslator {
    /// Tells an answer to a request that came at `begun`.
    pub(in crate::edge) fn new(form: OllamaRoute, model: String, begun: Instant) -> Self {
        let (partial_line, lines, tool_calls) = (Vec::new(), Vec::new(), Vec::new());
        Self {
            route: form,
            model,
            partial_line,
            lines,
            received_at: begun,
            first_token_at: None,
            tool_calls,
            finish_reason: None,
            usage: ChunkUsage::default(),
        }
    }

    /// Takes in what was read and gives what is to be sent, which may be nothing.
    ///
    /// # Errors
    /// When the engine says that it failed, or what it says cannot be told. What came before can be had from `lines` still.
    pub(in crate::edge) fn push(&mut self, mut bytes: &[u8], now: ArrivalTime) -> Result<Vec<u8>, TranslationError> {
        while let Some(end) = memchr::memchr(b'\n', bytes) {
            if self.partial_line.is_empty() {
                self.read_line(&bytes[..end], now)?;
            } else {
                self.partial_line.extend_from_slice(&bytes[..end]);
                let line = std::mem::take(&mut self.partial_line);
                self.read_line(&line, now)?;
            }
            bytes = &bytes[end + 1..];
        }
        if self.partial_line.len() + bytes.len() > MAX_EVENT_BYTES {
            return Err(TranslationError("the engine sent an event that is too large".to_owned()));
        }
        self.partial_line.extend_from_slice(bytes);
        Ok(self.take_lines())
    }

    /// What is to be sent and was not taken yet.
    pub(in crate::edge) fn take_lines(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.lines)
    }

    /// The last line, now that the stream has ended whole.
    ///
    /// # Errors
    /// When it was not.
    pub(in crate::edge) fn finish(&mut self, now: ArrivalTime) -> Result<Vec<u8>, TranslationError> {
        // An engine may leave out the last line's end.
        let rest = std::mem::take(&mut self.partial_line);
        self.read_line(&rest, now)?;
        let Some(finish) = self.finish_reason.take() else {
            return Err(TranslationError("the engine ended the answer before it was complete".to_owned()));
        };
        self.write_tool_calls(now)?;
        let first = self.first_token_at.unwrap_or(now.instant);
        let took =
            AnswerTimings { total: now.instant - self.received_at, prompt: Some(first - self.received_at), answer: now.instant - first };
        let end = AnswerEnd { finish_reason: &finish, usage: self.usage, timings: took };
        self.write_line(&AnswerPart { end: Some(end), ..AnswerPart::default() }, now);
        Ok(self.take_lines())
    }

    /// One line of the event stream. Engines write an event's data in one.
    fn read_line(&mut self, line: &[u8], now: ArrivalTime) -> Result<(), TranslationError> {
        let Some(data) = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) else { return Ok(()) };
        if data.is_empty() || data == b"[DONE]" {
            return Ok(());
        }
        let failed = |error: serde_json::Error| TranslationError(format!("an event of the engine cannot be read: {error}"));
        let CompletionChunk { choices, usage, error } = serde_json::from_slice(data).map_err(failed)?;
        if error.is_some() {
            return Err(TranslationError(error_message(data)));
        }
        self.usage = usage.unwrap_or(self.usage);
        choices.into_iter().try_for_each(|choice| self.read_choice(choice, now))
    }

    fn read_choice(&mut self, choice: ChunkChoice, now: ArrivalTime) -> Result<(), TranslationError> {
        let ChunkChoice { message, text, logprobs, finish_reason } = choice;
        let ChunkMessage { content, reasoning, tool_calls } = message.unwrap_or_default();
        let text = content.as_deref().or(text.as_deref()).unwrap_or_default();
        let thinking = reasoning.as_deref().filter(|thinking| !thinking.is_empty());
        let calls = tool_calls.unwrap_or_default();
        let logprobs = logprobs.and_then(|logprobs| logprobs.content);
        // The first event of a chat has a role and no token.
        if !text.is_empty() || thinking.is_some() || !calls.is_empty() {
            self.first_token_at.get_or_insert(now.instant);
        }
        if !text.is_empty() || thinking.is_some() || logprobs.is_some() {
            self.write_line(&AnswerPart { text, thinking, logprobs: logprobs.as_deref(), ..AnswerPart::default() }, now);
        }
        calls.into_iter().try_for_each(|call| self.read_tool_call(call))?;
        if let Some(finish) = finish_reason {
            self.write_tool_calls(now)?;
            self.finish_reason = Some(finish);
        }
        Ok(())
    }

    /// More of a call.
    fn read_tool_call(&mut self, call: ChunkToolCall) -> Result<(), TranslationError> {
        let ChunkToolCall { index, id, function } = call;
        // Calls come one after the other.
        if index >= self.tool_calls.len() {
            self.tool_calls.push(PartialToolCall::default());
        }
        let at = index.min(self.tool_calls.len() - 1);
        let begun = &mut self.tool_calls[at];
        begun.id = id.or(begun.id.take());
        begun.name.push_str(function.name.as_deref().unwrap_or_default());
        begun.arguments.push_str(function.arguments.as_deref().unwrap_or_default());
        let bytes: usize = self.tool_calls.iter().map(|call| call.name.len() + call.arguments.len()).sum();
        if bytes > MAX_TOOL_CALL_BYTES { Err(TranslationError("the model's calls of tools are too large".to_owned())) } else { Ok(()) }
    }

    /// Tells the calls, which are complete now: clients read their arguments as objects.
    fn write_tool_calls(&mut self, now: ArrivalTime) -> Result<(), TranslationError> {
        if self.tool_calls.is_empty() {
            return Ok(());
        }
        let calls = std::mem::take(&mut self.tool_calls).into_iter().enumerate();
        let calls = calls.map(|(index, call)| OllamaToolCall::new(index, call.id, call.name, &call.arguments));
        let calls = calls.collect::<Result<Vec<_>, String>>().map_err(TranslationError)?;
        self.write_line(&AnswerPart { tool_calls: &calls, ..AnswerPart::default() }, now);
        Ok(())
    }

    fn write_line(&mut self, told: &AnswerPart<'_>, now: ArrivalTime) {
        let line = encode_line(self.route, &self.model, told, now.time);
        self.lines.extend_from_slice(&line);
        self.lines.push(b'\n');
    }
}

/// The body of a streamed answer.
#[derive(Debug)]
pub(in crate::edge) struct OllamaBody {
    relay: Box<Relay>,
    translator: OllamaTranslator,
    state: OllamaBodyState,
}

#[derive(Debug)]
enum OllamaBodyState {
    Streaming,
    /// The client was told that the answer failed; the connection gets a moment to send that, then breaks.
    Flushing(Pin<Box<Sleep>>, String),
    Ended,
}

/// As long as the relay gives it: HTTP/2 throws away what is queued when a stream is reset.
const FLUSH_DELAY: Duration = Duration::from_millis(200);

impl OllamaBody {
    pub(in crate::edge) fn new(relay: Box<Relay>, teller: OllamaTranslator) -> Self {
        Self { relay, translator: teller, state: OllamaBodyState::Streaming }
    }

    /// The lines told so far, and the one that says why there will be no more.
    fn finish_with_error(&mut self, TranslationError(message): TranslationError) -> Vec<u8> {
        let mut lines = self.translator.take_lines();
        lines.extend_from_slice(error_body(&message).to_string().as_bytes());
        lines.push(b'\n');
        self.state = OllamaBodyState::Flushing(Box::pin(sleep(FLUSH_DELAY)), message);
        lines
    }
}

impl Body for OllamaBody {
    type Data = Bytes;
    type Error = StreamFault;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, StreamFault>>> {
        let retold = self.get_mut();
        loop {
            match &mut retold.state {
                OllamaBodyState::Streaming => {}
                OllamaBodyState::Flushing(moment, message) => {
                    ready!(moment.as_mut().poll(context));
                    let broken = StreamFault { fault: Fault::EngineLost, message: std::mem::take(message) };
                    retold.state = OllamaBodyState::Ended;
                    return Poll::Ready(Some(Err(broken)));
                }
                OllamaBodyState::Ended => return Poll::Ready(None),
            }
            let piece = ready!(Pin::new(&mut retold.relay).poll_frame(context));
            let now = ArrivalTime::now();
            let told = match piece {
                Some(Ok(frame)) => retold.translator.push(&frame.into_data().unwrap_or_default(), now),
                Some(Err(broken)) => Err(TranslationError(broken.message)),
                None => {
                    retold.state = OllamaBodyState::Ended;
                    retold.translator.finish(now)
                }
            };
            let lines = told.unwrap_or_else(|cut| retold.finish_with_error(cut));
            if !lines.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(lines.into()))));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.state, OllamaBodyState::Ended)
    }
}

#[cfg(test)]
mod tests;
