//! Parts common to all dialects of an event stream: finding an event's JSON, the fate of the event,
//! and replacing parts of it.

use std::borrow::Cow;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::transcript::{Channel, Difference, LaneAt, Transcript};

/// The fate of a replay's event.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Retold {
    /// The client has all of it, or the event is empty.
    Known,
    /// All of it is new.
    New,
    /// Part of it is new: these bytes.
    Partly(Vec<u8>),
    /// The engine says that it failed or was stopped, for the scanner to find. No answer follows.
    Failed,
}

/// A string, borrowed from its event unless it has escapes.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(transparent)]
pub(super) struct Text<'a>(#[serde(borrow)] pub(super) Cow<'a, str>);

/// Compares the parts of one event with the transcript.
pub(super) struct Telling<'t> {
    pub(super) transcript: &'t mut Transcript,
    pub(super) lane: LaneAt,
    /// Part of the event is new.
    pub(super) has_new: bool,
    /// Part of the event is known.
    pub(super) has_known: bool,
}

impl<'t> Telling<'t> {
    pub(super) fn new(transcript: &'t mut Transcript, lane: LaneAt) -> Self {
        Self { transcript, lane, has_new: false, has_known: false }
    }

    /// Compares a text, and leaves its new part in `text`.
    pub(super) fn text(&mut self, channel: Channel, text: &mut Option<Text<'_>>) -> Result<(), Difference> {
        let Some(Text(piece)) = text else { return Ok(()) };
        let known = self.transcript.tell_text(self.lane, channel, piece)?;
        self.has_known |= known > 0;
        self.has_new |= known < piece.len();
        if known > 0 {
            *piece = Cow::Owned(piece[known..].to_owned());
        }
        Ok(())
    }

    /// Compares a piece that comes whole. Returns whether it was known.
    pub(super) fn mark(&mut self, kind: u8, parts: &[&str]) -> Result<bool, Difference> {
        let is_known = self.transcript.tell_mark(self.lane, kind, parts)?;
        self.has_known |= is_known;
        self.has_new |= !is_known;
        Ok(is_known)
    }
}

/// The JSON of an event.
pub(super) fn data(event: &[u8]) -> Option<&[u8]> {
    let line = if event.starts_with(b"event: ") { &event[memchr::memchr(b'\n', event)? + 1..] } else { event };
    line.strip_prefix(b"data: ").map(<[u8]>::trim_ascii_end)
}

/// The place of a value within its event.
pub(super) fn place(event: &[u8], value: &RawValue) -> Range<usize> {
    let begin = value.get().as_ptr().addr() - event.as_ptr().addr();
    begin..begin + value.get().len()
}

/// The event with other values at these places, which are in ascending order.
pub(super) fn replace(event: &[u8], values: &[(Range<usize>, String)]) -> Vec<u8> {
    let mut replaced = Vec::with_capacity(event.len() + 64);
    let mut copied = 0;
    for (place, value) in values {
        replaced.extend_from_slice(&event[copied..place.start]);
        replaced.extend_from_slice(value.as_bytes());
        copied = place.end;
    }
    replaced.extend_from_slice(&event[copied..]);
    replaced
}

pub(super) fn json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_default()
}
