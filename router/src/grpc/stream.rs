//! An event stream as typed events, while it comes. The relay beside it has already told a whole stream from a broken one; a broken one ends
//! in a status here. Dropping the stream drops the relay, and with it the generation in its engine.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::BytesMut;
use futures_util::Stream;
use hostler_proto::inference::v1 as wire;
use http_body::Body;
use tokio::time::{Sleep, sleep_until};
use tonic::Status;
use wire::generate_event::Event;

use super::answer;
use super::deadline::{self, Deadline};
use super::engine::{Answered, Usage};
use super::status;
use crate::dispatch::Relay;
use crate::access_log::Entry;
use crate::placement::PlacementDecision;

/// The longest event that is read. Log probabilities of a long prompt make the longest.
const MOST_EVENT: usize = 64 * 1024 * 1024;

/// The events of one answer.
#[derive(Debug)]
pub(super) struct Events {
    /// Gone when the answer has ended, in whatever way.
    relay: Option<Box<Relay>>,
    deadline: Option<Pin<Box<Sleep>>>,
    lines: Lines,
    translation: Translation,
    ready: VecDeque<wire::GenerateEvent>,
    failure: Option<Status>,
    entry: Entry,
}

impl Events {
    pub(super) fn new(relay: Box<Relay>, record: &PlacementDecision, deadline: Deadline, entry: Entry) -> Self {
        Self {
            relay: Some(relay),
            deadline: deadline.moment().map(|moment| Box::pin(sleep_until(moment))),
            lines: Lines::default(),
            translation: Translation { placement: answer::placement(record), started: false, usage: None },
            ready: VecDeque::new(),
            failure: None,
            entry,
        }
    }

    /// Reads a piece of the answer, or its end.
    fn read(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Status>> {
        let Some(relay) = &mut self.relay else { return Poll::Ready(Ok(())) };
        if self.deadline.as_mut().is_some_and(|deadline| deadline.as_mut().poll(context).is_ready()) {
            self.entry.refused("deadline");
            return Poll::Ready(Err(deadline::passed()));
        }
        match ready!(Pin::new(relay).poll_frame(context)) {
            Some(Ok(frame)) => {
                if let Ok(bytes) = frame.into_data() {
                    self.lines.push(&bytes);
                    self.translate()?;
                }
            }
            Some(Err(broken)) => return Poll::Ready(Err(status::broken(&broken))),
            None => {
                self.relay = None;
                self.lines.end();
                self.translate()?;
                self.ready.extend(self.translation.end());
            }
        }
        Poll::Ready(Ok(()))
    }

    fn translate(&mut self) -> Result<(), Status> {
        while let Some(data) = self.lines.event()? {
            self.translation.event(&data, &mut self.ready)?;
        }
        Ok(())
    }
}

impl Stream for Events {
    type Item = Result<wire::GenerateEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let events = &mut *self;
        loop {
            if let Some(event) = events.ready.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            // After what came before it in the same piece.
            if let Some(failure) = events.failure.take() {
                return Poll::Ready(Some(Err(failure)));
            }
            if events.relay.is_none() {
                return Poll::Ready(None);
            }
            if let Err(failure) = ready!(events.read(context)) {
                events.relay = None;
                events.failure = Some(failure);
            }
        }
    }
}

/// The data of an event stream's events, one after the other, as its bytes come in.
#[derive(Debug, Default)]
struct Lines {
    held: BytesMut,
    /// What is held has no end of line before this.
    looked: usize,
    /// Of the event whose end has not come.
    data: Option<Vec<u8>>,
}

impl Lines {
    fn push(&mut self, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
    }

    /// No more will come. Some engines leave out the last blank line.
    fn end(&mut self) {
        self.held.extend_from_slice(b"\n\n");
    }

    /// The next event's data, if the event is there. Comments and other fields are passed over.
    fn event(&mut self) -> Result<Option<Vec<u8>>, Status> {
        while let Some(at) = memchr::memchr(b'\n', &self.held[self.looked..]) {
            let line = self.held.split_to(self.looked + at + 1);
            self.looked = 0;
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
        self.looked = self.held.len();
        if self.held.len() + self.data.as_ref().map_or(0, Vec::len) > MOST_EVENT {
            return Err(status::not_understood(&format!("an event is longer than {MOST_EVENT} bytes")));
        }
        Ok(None)
    }
}

/// From an engine's events to ours.
#[derive(Debug)]
struct Translation {
    placement: wire::Placement,
    started: bool,
    usage: Option<Usage>,
}

impl Translation {
    fn event(&mut self, data: &[u8], events: &mut VecDeque<wire::GenerateEvent>) -> Result<(), Status> {
        if data == b"[DONE]" {
            return Ok(());
        }
        let mut answered: Answered = serde_json::from_slice(data).map_err(|error| status::not_understood(&error.to_string()))?;
        if let Some(error) = &answered.error {
            return Err(status::in_stream(error));
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
        for choice in answered.choices.unwrap_or_default() {
            let finish = answer::finish(&choice);
            events.extend(answer::delta(choice).map(|delta| event(Event::Delta(delta))));
            events.extend(finish.map(|finish| event(Event::Finish(finish))));
        }
        self.usage = answered.usage.or(self.usage.take());
        Ok(())
    }

    /// What is told of the whole answer.
    fn end(&mut self) -> Option<wire::GenerateEvent> {
        self.usage.take().map(|usage| event(Event::Usage(answer::usage(&usage))))
    }
}

fn event(event: Event) -> wire::GenerateEvent {
    wire::GenerateEvent { event: Some(event) }
}

#[cfg(test)]
mod tests;
