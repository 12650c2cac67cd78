//! Records a stream's events as they pass, so that its request can be sent again if its engine is
//! lost.
//!
//! The record removes from the replay's events what the client already has. Events of a replay get
//! the ids of the first stream. Most events differ from the previous one in one text alone. Of
//! these, only the text is read: the rest has been read before.

use bytes::{Bytes, BytesMut};

use super::super::memory::RecordMemory;
use super::choices::{self, ChoiceEvent};
use super::event::{self, Retold, Text};
use super::messages;
use super::plan::ReplayApi;
use super::transcript::{Channel, Difference, LaneAt, LastTold, Transcript};
use crate::sse::event_end;

/// Longest event of a replay that is waited for.
const MAX_EVENT_BYTES: usize = 1024 * 1024;

/// Longest text surroundings that are remembered.
const MAX_FORM_BYTES: usize = 1024;

/// The record of one stream.
#[derive(Debug)]
pub(crate) struct ReplayRecord {
    api: ReplayApi,
    transcript: Transcript,
    /// The common beginning of all events, if there is one; empty before the first event.
    head: Bytes,
    has_usage: bool,
    /// The client has a finish reason.
    is_finished: bool,
    form: Option<CommonForm>,
    replay: Option<Replay>,
    /// The replay has diverged.
    differs: bool,
}

/// The surroundings of a text of this channel, in events with nothing else.
#[derive(Debug)]
struct CommonForm {
    before: Box<[u8]>,
    behind: Box<[u8]>,
    lane: LaneAt,
    channel: Channel,
}

/// The stream of the engine that starts over.
#[derive(Debug, Default)]
struct Replay {
    /// How the replay's own events begin.
    head: Bytes,
    /// The beginning of an event.
    buffer: BytesMut,
}

impl ReplayRecord {
    #[must_use]
    pub(crate) fn new(api: ReplayApi, memory: &RecordMemory) -> Self {
        let transcript = Transcript::new(memory);
        Self { api, transcript, head: Bytes::new(), has_usage: false, is_finished: false, form: None, replay: None, differs: false }
    }

    /// Whether the events are those of a replay.
    #[must_use]
    pub(crate) fn is_replaying(&self) -> bool {
        self.replay.is_some()
    }

    /// Reads an event that differs from an earlier one in one text alone. Such an event ends or
    /// fails no answer and has no usage. `false` for any other event.
    pub(crate) fn observe_common(&mut self, event: &[u8]) -> bool {
        let Some(form) = self.form.as_ref().filter(|_| self.transcript.is_whole()) else { return false };
        let Some(text) = form.text(event) else { return false };
        // New text cannot differ.
        let _ = self.transcript.tell_text(form.lane, form.channel, &text.0);
        true
    }

    /// Records the content of whole events that the client gets.
    pub(crate) fn observe(&mut self, events: &[u8]) {
        let mut begin = 0;
        while begin < events.len() && self.transcript.is_whole() {
            // The last event of a stream may lack its blank line.
            let end = event_end(&events[begin..]).map_or(events.len(), |length| begin + length);
            let event = &events[begin..end];
            self.transcript.last = LastTold::default();
            match self.tell(event) {
                Ok(_) => self.learn_form(event),
                Err(Difference) => self.give_up(),
            }
            begin = end;
        }
    }

    /// Stops recording for good.
    pub(crate) fn give_up(&mut self) {
        self.transcript.give_up();
    }

    /// Whether everything that the client has is recorded.
    #[must_use]
    pub(crate) fn is_known(&self) -> bool {
        self.transcript.is_whole() && !self.transcript.is_empty()
    }

    /// Begins to compare with a replay.
    pub(crate) fn rewind(&mut self) {
        self.transcript.rewind();
        self.replay = Some(Replay::default());
    }

    /// Whether the client has a finish reason.
    #[must_use]
    pub(crate) fn is_finished(&self) -> bool {
        self.is_finished
    }

    /// Whether the client has everything that came.
    #[must_use]
    pub(crate) fn is_told(&self) -> bool {
        self.transcript.is_told() && self.replay.as_ref().is_none_or(|replay| replay.buffer.is_empty())
    }

    /// The new part of the replay's events that this piece completes.
    ///
    /// # Errors
    /// If the replay differs from the stream before it.
    pub(crate) fn retell(&mut self, piece: &[u8]) -> Result<Bytes, Difference> {
        let output = self.retell_events(piece);
        self.differs |= output.is_err();
        output
    }

    /// Whether the replay has diverged.
    #[must_use]
    pub(crate) fn differs(&self) -> bool {
        self.differs
    }

    fn retell_events(&mut self, piece: &[u8]) -> Result<Bytes, Difference> {
        let mut buffer = self.replay.as_mut().map(|replay| std::mem::take(&mut replay.buffer)).unwrap_or_default();
        buffer.extend_from_slice(piece);
        let mut output = BytesMut::with_capacity(buffer.len() + 64);
        while let Some(end) = event_end(&buffer) {
            let event = buffer.split_to(end);
            match self.tell(&event)? {
                Retold::Known => {}
                Retold::New => self.push_with_head(&event, &mut output),
                Retold::Partly(rest) => self.push_with_head(&rest, &mut output),
                Retold::Failed => {
                    output.extend_from_slice(&event);
                    output.extend_from_slice(&buffer.split());
                }
            }
        }
        if buffer.len() > MAX_EVENT_BYTES {
            return Err(Difference);
        }
        if let Some(replay) = &mut self.replay {
            replay.buffer = buffer;
        }
        Ok(output.freeze())
    }

    fn tell(&mut self, event: &[u8]) -> Result<Retold, Difference> {
        if event.starts_with(b":") {
            return Ok(Retold::New);
        }
        let data = event::data(event).ok_or(Difference)?;
        if data.starts_with(b"{\"error\":") || event.starts_with(b"event: error\n") {
            return Ok(Retold::Failed);
        }
        match self.api {
            ReplayApi::Chat | ReplayApi::Completions => self.tell_choice(event, data),
            ReplayApi::Messages => messages::tell(event, data, &mut self.transcript),
        }
    }

    fn tell_choice(&mut self, event: &[u8], data: &[u8]) -> Result<Retold, Difference> {
        if data == b"[DONE]" {
            return if self.transcript.is_told() { Ok(Retold::New) } else { Err(Difference) };
        }
        let parsed = ChoiceEvent::parse(data).ok_or(Difference)?;
        if !matches!(parsed, ChoiceEvent::Aborted) {
            self.check_head(event)?;
        }
        match parsed {
            ChoiceEvent::Aborted => Ok(Retold::Failed),
            ChoiceEvent::Usage if !self.transcript.is_told() => Err(Difference),
            ChoiceEvent::Usage if std::mem::replace(&mut self.has_usage, true) => Ok(Retold::Known),
            ChoiceEvent::Usage => Ok(Retold::New),
            ChoiceEvent::Of(choice) => {
                self.is_finished |= choice.is_last();
                choice.tell(event, &mut self.transcript)
            }
        }
    }

    /// Checks the common beginning that all events of a stream have.
    fn check_head(&mut self, event: &[u8]) -> Result<(), Difference> {
        let head = self.replay.as_mut().map_or(&mut self.head, |replay| &mut replay.head);
        if head.is_empty() {
            *head = Bytes::copy_from_slice(choices::head(event).ok_or(Difference)?);
        }
        if event.starts_with(head) { Ok(()) } else { Err(Difference) }
    }

    /// Appends the replay's event with the head of the stream that it continues.
    fn push_with_head(&self, event: &[u8], output: &mut BytesMut) {
        let head = self.replay.as_ref().map_or(&[][..], |replay| &replay.head);
        match event.strip_prefix(head) {
            Some(rest) if !head.is_empty() => {
                output.extend_from_slice(&self.head);
                output.extend_from_slice(rest);
            }
            _ => output.extend_from_slice(event),
        }
    }

    /// Remembers the surroundings of an event's only text.
    fn learn_form(&mut self, event: &[u8]) {
        let LastTold { pieces: 1, text: Some((lane, channel, address, length)) } = self.transcript.last else { return };
        let begin = address.wrapping_sub(event.as_ptr().addr());
        // A text with escapes was unescaped elsewhere.
        let Some(behind) = begin.checked_add(length).and_then(|end| event.get(end..)) else { return };
        let Some(before) = event.get(..begin) else { return };
        let has_usage = memchr::memmem::find(event, b"\"usage\"").is_some();
        if !has_usage && before.ends_with(b"\"") && behind.starts_with(b"\"") && before.len() + behind.len() <= MAX_FORM_BYTES {
            self.form = Some(CommonForm { before: before.into(), behind: behind.into(), lane, channel });
        }
    }
}

impl CommonForm {
    /// The text of an event that has nothing else.
    fn text<'a>(&self, event: &'a [u8]) -> Option<Text<'a>> {
        let length = event.strip_prefix(&*self.before)?.strip_suffix(&*self.behind)?.len();
        // Include the quotes: a text contains no others.
        let quoted = &event[self.before.len() - 1..=self.before.len() + length];
        serde_json::from_slice(quoted).ok()
    }
}

#[cfg(test)]
mod tests;
