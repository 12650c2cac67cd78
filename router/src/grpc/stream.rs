//! Converts an event stream to typed events as it comes.
//!
//! The relay has already distinguished a whole stream from a broken one; a broken one ends in a
//! status here. Dropping the stream drops the relay, and with it the generation in its engine.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::BytesMut;
use futures_util::Stream;
use hostler_api::{ChunkUsage, CompletionChunk};
use hostler_proto::inference::v1 as wire;
use http_body::Body;
use tokio::time::{Sleep, sleep_until};
use tonic::Status;
use wire::generate_event::Event;

use super::answer;
use super::deadline::{self, Deadline};
use super::engine::EngineError;
use super::status;
use crate::access_log::AccessEntry;
use crate::dispatch::Relay;

/// Longest event that is read. Log probabilities of a long prompt make the longest.
const MAX_EVENT_BYTES: usize = 64 * 1024 * 1024;

#[derive(Debug)]
pub(super) struct GenerateEvents {
    /// `None` once the answer has ended, in whatever way.
    relay: Option<Box<Relay>>,
    deadline: Option<Pin<Box<Sleep>>>,
    decoder: SseDecoder,
    translator: EventTranslator,
    pending: VecDeque<wire::GenerateEvent>,
    failure: Option<Status>,
    log_entry: AccessEntry,
}

impl GenerateEvents {
    pub(super) fn new(relay: Box<Relay>, placement: wire::Placement, deadline: Deadline, entry: AccessEntry) -> Self {
        Self {
            relay: Some(relay),
            deadline: deadline.instant().map(|moment| Box::pin(sleep_until(moment))),
            decoder: SseDecoder::default(),
            translator: EventTranslator { placement, started: false, usage: None },
            pending: VecDeque::new(),
            failure: None,
            log_entry: entry,
        }
    }

    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Status>> {
        let Some(relay) = &mut self.relay else { return Poll::Ready(Ok(())) };
        if self.deadline.as_mut().is_some_and(|deadline| deadline.as_mut().poll(context).is_ready()) {
            self.log_entry.record_refusal("deadline");
            return Poll::Ready(Err(deadline::exceeded()));
        }
        match ready!(Pin::new(relay).poll_frame(context)) {
            Some(Ok(frame)) => {
                if let Ok(bytes) = frame.into_data() {
                    self.decoder.push(&bytes);
                    self.translate_events()?;
                }
            }
            Some(Err(broken)) => return Poll::Ready(Err(status::broken_answer(&broken))),
            None => {
                self.relay = None;
                self.decoder.finish();
                self.translate_events()?;
                self.pending.extend(self.translator.finish());
            }
        }
        Poll::Ready(Ok(()))
    }

    fn translate_events(&mut self) -> Result<(), Status> {
        while let Some(data) = self.decoder.next_event()? {
            self.translator.translate(&data, &mut self.pending)?;
        }
        Ok(())
    }
}

impl Stream for GenerateEvents {
    type Item = Result<wire::GenerateEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let events = &mut *self;
        loop {
            if let Some(event) = events.pending.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            // The failure follows the events that came before it in the same piece.
            if let Some(failure) = events.failure.take() {
                return Poll::Ready(Some(Err(failure)));
            }
            if events.relay.is_none() {
                return Poll::Ready(None);
            }
            if let Err(failure) = ready!(events.poll_read(context)) {
                events.relay = None;
                events.failure = Some(failure);
            }
        }
    }
}

/// Splits the bytes of an event stream into the data of its events.
#[derive(Debug, Default)]
struct SseDecoder {
    buffer: BytesMut,
    /// The buffer has no line end before this.
    searched_bytes: usize,
    /// Data of the incomplete event.
    data: Option<Vec<u8>>,
}

impl SseDecoder {
    fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Ends the input. Some engines leave out the last blank line.
    fn finish(&mut self) {
        self.buffer.extend_from_slice(b"\n\n");
    }

    /// The next complete event's data. Comments and other fields are skipped.
    fn next_event(&mut self) -> Result<Option<Vec<u8>>, Status> {
        while let Some(at) = memchr::memchr(b'\n', &self.buffer[self.searched_bytes..]) {
            let line = self.buffer.split_to(self.searched_bytes + at + 1);
            self.searched_bytes = 0;
            let line = line[..line.len() - 1].strip_suffix(b"\r").unwrap_or(&line[..line.len() - 1]);
            if line.is_empty() {
                if let Some(data) = self.data.take() {
                    return Ok(Some(data));
                }
            } else if let Some(value) = line.strip_prefix(b"data:") {
                let value = value.strip_prefix(b" ").unwrap_or(value);
                match &mut self.data {
                    Some(data) => {
                        data.push(b'\n');
                        data.extend_from_slice(value);
                    }
                    None => self.data = Some(value.to_vec()),
                }
            }
        }
        self.searched_bytes = self.buffer.len();
        if self.buffer.len() + self.data.as_ref().map_or(0, Vec::len) > MAX_EVENT_BYTES {
            return Err(status::unreadable_answer(&format!("an event is longer than {MAX_EVENT_BYTES} bytes")));
        }
        Ok(None)
    }
}

#[derive(Debug)]
struct EventTranslator {
    placement: wire::Placement,
    started: bool,
    usage: Option<ChunkUsage>,
}

impl EventTranslator {
    fn translate(&mut self, data: &[u8], events: &mut VecDeque<wire::GenerateEvent>) -> Result<(), Status> {
        if data == b"[DONE]" {
            return Ok(());
        }
        let mut answered: CompletionChunk = serde_json::from_slice(data).map_err(|error| status::unreadable_answer(&error.to_string()))?;
        if let Some(error) = answered.error {
            let error = serde_json::from_value(error).unwrap_or_else(|_| EngineError::default());
            return Err(status::engine_stream_error(&error));
        }
        if !std::mem::replace(&mut self.started, true) {
            let started = wire::Started {
                prompt_token_ids: answer::prompt_token_ids(&mut answered),
                id: answered.id.take().unwrap_or_default(),
                model: answered.model.take().unwrap_or_default(),
                placement: Some(std::mem::take(&mut self.placement)),
            };
            events.push_back(event(Event::Started(started)));
        }
        for choice in answered.choices {
            let finish = answer::finish(&choice);
            events.extend(answer::delta(choice).map(|delta| event(Event::Delta(delta))));
            events.extend(finish.map(|finish| event(Event::Finish(finish))));
        }
        self.usage = answered.usage.or(self.usage.take());
        Ok(())
    }

    /// The last message, about the whole answer.
    fn finish(&mut self) -> Option<wire::GenerateEvent> {
        self.usage.take().map(|usage| event(Event::Usage(answer::usage(&usage))))
    }
}

fn event(event: Event) -> wire::GenerateEvent {
    wire::GenerateEvent { event: Some(event) }
}

#[cfg(test)]
mod tests;
