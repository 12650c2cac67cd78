//! An engine's event stream on its way to a client of Ollama's API: every event becomes a line of JSON as it passes.
//!
//! Like the relay that it reads from, it is polled by the client's connection, holds no more than one event, and ends cleanly only when the
//! answer is whole: one that breaks ends with a line that says so, and then breaks.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use hostler_proto::lane::{Broken, Fault};
use http_body::{Body, Frame};
use tokio::time::{Instant, Sleep, sleep};

use super::answer::{Call, Choice, Completion, End, Message, Told, ToldCall, Took, Usage, error, message_of, tell};
use super::request::Form;
use crate::dispatch::Relay;

/// An event longer than this ends the answer. The largest come with log-probabilities, and have some ten kilobytes.
const MOST_EVENT_BYTES: usize = 1024 * 1024;

/// Arguments of all calls of an answer; they are told when they are complete.
const MOST_CALL_BYTES: usize = 4 * 1024 * 1024;

/// Why an answer cannot be told on; its client is told so, and its connection broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cut(pub(super) String);

/// Turns the bytes of an event stream, however they are cut, into lines.
#[derive(Debug)]
pub(super) struct Teller {
    form: Form,
    model: String,
    /// The line of the event stream that has come so far.
    held: Vec<u8>,
    /// Lines for the client.
    lines: Vec<u8>,
    begun: Instant,
    first: Option<Instant>,
    calls: Vec<Begun>,
    finish: Option<String>,
    usage: Usage,
}

/// A call as far as it has come.
#[derive(Debug, Default)]
struct Begun {
    id: Option<String>,
    name: String,
    arguments: String,
}

/// When something came.
#[derive(Debug, Clone, Copy)]
pub(super) struct Now {
    pub(super) instant: Instant,
    pub(super) time: SystemTime,
}

impl Now {
    fn read() -> Self {
        Self { instant: Instant::now(), time: SystemTime::now() }
    }
}

impl Teller {
    /// Tells an answer to a request that came at `begun`.
    pub(super) fn new(form: Form, model: String, begun: Instant) -> Self {
        let (held, lines, calls) = (Vec::new(), Vec::new(), Vec::new());
        Self { form, model, held, lines, begun, first: None, calls, finish: None, usage: Usage::default() }
    }

    /// Takes in what was read and gives what is to be sent, which may be nothing.
    ///
    /// # Errors
    /// When the engine says that it failed, or what it says cannot be told. What came before can be had from `lines` still.
    pub(super) fn take(&mut self, mut bytes: &[u8], now: Now) -> Result<Vec<u8>, Cut> {
        while let Some(end) = memchr::memchr(b'\n', bytes) {
            if self.held.is_empty() {
                self.line(&bytes[..end], now)?;
            } else {
                self.held.extend_from_slice(&bytes[..end]);
                let line = std::mem::take(&mut self.held);
                self.line(&line, now)?;
            }
            bytes = &bytes[end + 1..];
        }
        if self.held.len() + bytes.len() > MOST_EVENT_BYTES {
            return Err(Cut("the engine sent an event that is too large".to_owned()));
        }
        self.held.extend_from_slice(bytes);
        Ok(self.lines())
    }

    /// What is to be sent and was not taken yet.
    pub(super) fn lines(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.lines)
    }

    /// The last line, now that the stream has ended whole.
    ///
    /// # Errors
    /// When it was not.
    pub(super) fn end(&mut self, now: Now) -> Result<Vec<u8>, Cut> {
        // An engine may leave out the last line's end.
        let rest = std::mem::take(&mut self.held);
        self.line(&rest, now)?;
        let Some(finish) = self.finish.take() else {
            return Err(Cut("the engine ended the answer before it was complete".to_owned()));
        };
        self.tell_calls(now)?;
        let first = self.first.unwrap_or(now.instant);
        let took = Took { total: now.instant - self.begun, prompt: Some(first - self.begun), answer: now.instant - first };
        let end = End { finish: &finish, usage: self.usage, took };
        self.tell(&Told { end: Some(end), ..Told::default() }, now);
        Ok(self.lines())
    }

    /// One line of the event stream. Engines write an event's data in one.
    fn line(&mut self, line: &[u8], now: Now) -> Result<(), Cut> {
        let Some(data) = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) else { return Ok(()) };
        if data.is_empty() || data == b"[DONE]" {
            return Ok(());
        }
        let failed = |error: serde_json::Error| Cut(format!("an event of the engine cannot be read: {error}"));
        let Completion { choices, usage, error } = serde_json::from_slice(data).map_err(failed)?;
        if error.is_some() {
            return Err(Cut(message_of(data)));
        }
        self.usage = usage.unwrap_or(self.usage);
        choices.into_iter().try_for_each(|choice| self.choice(choice, now))
    }

    fn choice(&mut self, choice: Choice, now: Now) -> Result<(), Cut> {
        let Choice { message, text, logprobs, finish_reason } = choice;
        let Message { content, reasoning, tool_calls } = message.unwrap_or_default();
        let text = content.as_deref().or(text.as_deref()).unwrap_or_default();
        let thinking = reasoning.as_deref().filter(|thinking| !thinking.is_empty());
        let calls = tool_calls.unwrap_or_default();
        let logprobs = logprobs.and_then(|logprobs| logprobs.content);
        // The first event of a chat has a role and no token.
        if !text.is_empty() || thinking.is_some() || !calls.is_empty() {
            self.first.get_or_insert(now.instant);
        }
        if !text.is_empty() || thinking.is_some() || logprobs.is_some() {
            self.tell(&Told { text, thinking, logprobs: logprobs.as_deref(), ..Told::default() }, now);
        }
        calls.into_iter().try_for_each(|call| self.call(call))?;
        if let Some(finish) = finish_reason {
            self.tell_calls(now)?;
            self.finish = Some(finish);
        }
        Ok(())
    }

    /// More of a call.
    fn call(&mut self, call: Call) -> Result<(), Cut> {
        let Call { index, id, function } = call;
        // Calls come one after the other.
        if index >= self.calls.len() {
            self.calls.push(Begun::default());
        }
        let at = index.min(self.calls.len() - 1);
        let begun = &mut self.calls[at];
        begun.id = id.or(begun.id.take());
        begun.name.push_str(function.name.as_deref().unwrap_or_default());
        begun.arguments.push_str(function.arguments.as_deref().unwrap_or_default());
        let bytes: usize = self.calls.iter().map(|call| call.name.len() + call.arguments.len()).sum();
        if bytes > MOST_CALL_BYTES { Err(Cut("the model's calls of tools are too large".to_owned())) } else { Ok(()) }
    }

    /// Tells the calls, which are complete now: clients read their arguments as objects.
    fn tell_calls(&mut self, now: Now) -> Result<(), Cut> {
        if self.calls.is_empty() {
            return Ok(());
        }
        let calls = std::mem::take(&mut self.calls).into_iter().enumerate();
        let calls = calls.map(|(index, call)| ToldCall::new(index, call.id, call.name, &call.arguments));
        let calls = calls.collect::<Result<Vec<_>, String>>().map_err(Cut)?;
        self.tell(&Told { calls: &calls, ..Told::default() }, now);
        Ok(())
    }

    fn tell(&mut self, told: &Told<'_>, now: Now) {
        let line = tell(self.form, &self.model, told, now.time);
        self.lines.extend_from_slice(&line);
        self.lines.push(b'\n');
    }
}

/// The body of a streamed answer.
#[derive(Debug)]
pub(in crate::edge) struct Retold {
    relay: Box<Relay>,
    teller: Teller,
    state: State,
}

#[derive(Debug)]
enum State {
    Streaming,
    /// The client was told that the answer failed; the connection gets a moment to send that, then breaks.
    Flushing(Pin<Box<Sleep>>, String),
    Ended,
}

/// As long as the relay gives it: HTTP/2 throws away what is queued when a stream is reset.
const FLUSH: Duration = Duration::from_millis(200);

impl Retold {
    pub(super) fn new(relay: Box<Relay>, teller: Teller) -> Self {
        Self { relay, teller, state: State::Streaming }
    }

    /// The lines told so far, and the one that says why there will be no more.
    fn cut_off(&mut self, Cut(message): Cut) -> Vec<u8> {
        let mut lines = self.teller.lines();
        lines.extend_from_slice(error(&message).to_string().as_bytes());
        lines.push(b'\n');
        self.state = State::Flushing(Box::pin(sleep(FLUSH)), message);
        lines
    }
}

impl Body for Retold {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let retold = self.get_mut();
        loop {
            match &mut retold.state {
                State::Streaming => {}
                State::Flushing(moment, message) => {
                    ready!(moment.as_mut().poll(context));
                    let broken = Broken { fault: Fault::EngineLost, message: std::mem::take(message) };
                    retold.state = State::Ended;
                    return Poll::Ready(Some(Err(broken)));
                }
                State::Ended => return Poll::Ready(None),
            }
            let piece = ready!(Pin::new(&mut retold.relay).poll_frame(context));
            let now = Now::read();
            let told = match piece {
                Some(Ok(frame)) => retold.teller.take(&frame.into_data().unwrap_or_default(), now),
                Some(Err(broken)) => Err(Cut(broken.message)),
                None => {
                    retold.state = State::Ended;
                    retold.teller.end(now)
                }
            };
            let lines = told.unwrap_or_else(|cut| retold.cut_off(cut));
            if !lines.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(lines.into()))));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.state, State::Ended)
    }
}

#[cfg(test)]
mod tests;
