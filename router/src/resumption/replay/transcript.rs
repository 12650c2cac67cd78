//! The content that a stream's client has, independent of how an engine groups tokens into events.
//!
//! A replay is compared with it piece by piece; any excess is new and joins the transcript. Each
//! choice has a lane, and the tokens of its log probabilities, which may come before or after their
//! text, have another. Within a lane, a byte that no text contains precedes each change of channel.

use super::super::memory::{RecordMemory, RecordShare};

/// Longest stream that is resumed.
const MAX_STREAM_BYTES: usize = 1024 * 1024;

/// Most lanes of a stream that is resumed.
const MAX_LANES: usize = 64;

/// Least memory of a lane that is not empty.
const MIN_LANE_BYTES: usize = 256;

/// A byte that occurs in no UTF-8.
const TAG: u8 = 0xff;

/// The replay has diverged, or nobody can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Difference;

/// The field that a text belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Channel {
    pub(super) kind: u8,
    /// Index of a tool call or a content block.
    pub(super) index: u32,
}

impl Channel {
    pub(super) fn new(kind: u8, index: u32) -> Self {
        Self { kind, index }
    }

    fn tag(self) -> [u8; 6] {
        let [a, b, c, d] = self.index.to_be_bytes();
        [TAG, self.kind, a, b, c, d]
    }
}

/// The index of a lane in its transcript.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LaneAt(usize);

#[derive(Debug)]
pub(super) struct Transcript {
    lanes: Vec<TranscriptLane>,
    /// Everything passed on so far is recorded.
    is_whole: bool,
    share: RecordShare,
    pub(super) last: LastTold,
}

/// The pieces recorded since this was cleared.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LastTold {
    pub(super) pieces: usize,
    /// The last text: its lane and channel, and its bytes' address and length.
    pub(super) text: Option<(LaneAt, Channel, usize, usize)>,
}

#[derive(Debug)]
struct TranscriptLane {
    name: (u32, u8),
    sent: Vec<u8>,
    /// How much of `sent` a replay has matched so far; all of it without a replay.
    at: usize,
    /// The channel of the previous text.
    channel: Option<Channel>,
}

impl Transcript {
    pub(super) fn new(memory: &RecordMemory) -> Self {
        Self { lanes: Vec::new(), is_whole: true, share: memory.share(), last: LastTold::default() }
    }

    /// The lane of this name, which is added if new.
    pub(super) fn lane(&mut self, name: (u32, u8)) -> Result<LaneAt, Difference> {
        if let Some(at) = self.lanes.iter().position(|lane| lane.name == name) {
            return Ok(LaneAt(at));
        }
        if self.lanes.len() == MAX_LANES {
            return Err(Difference);
        }
        self.lanes.push(TranscriptLane { name, sent: Vec::new(), at: 0, channel: None });
        Ok(LaneAt(self.lanes.len() - 1))
    }

    /// Compares a text and appends its new part. Returns how many of its bytes were known.
    pub(super) fn tell_text(&mut self, LaneAt(at): LaneAt, channel: Channel, text: &str) -> Result<usize, Difference> {
        if text.is_empty() {
            return Ok(0);
        }
        self.last.pieces += 1;
        self.last.text = Some((LaneAt(at), channel, text.as_ptr().addr(), text.len()));
        if self.lanes[at].channel != Some(channel) {
            self.tell_whole(at, &channel.tag())?;
            self.lanes[at].channel = Some(channel);
        }
        let lane = &mut self.lanes[at];
        let known = lane.left().len().min(text.len());
        if !lane.left().starts_with(&text.as_bytes()[..known]) || !text.is_char_boundary(known) {
            return Err(Difference);
        }
        lane.at += known;
        self.append(at, &text.as_bytes()[known..]);
        Ok(known)
    }

    /// Compares a piece that comes whole or not at all. Returns whether it was known.
    pub(super) fn tell_mark(&mut self, LaneAt(at): LaneAt, kind: u8, parts: &[&str]) -> Result<bool, Difference> {
        self.last.pieces += 1;
        let mut mark = vec![TAG, kind];
        for part in parts {
            mark.extend_from_slice(part.as_bytes());
            mark.push(TAG);
        }
        mark.push(TAG);
        self.lanes[at].channel = None;
        self.tell_whole(at, &mark)
    }

    /// Whether a replay has repeated everything recorded.
    pub(super) fn is_told(&self) -> bool {
        self.lanes.iter().all(|lane| lane.left().is_empty())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lanes.iter().all(|lane| lane.sent.is_empty())
    }

    /// Whether the record is complete.
    pub(super) fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Stops recording, and forgets everything unless a replay still has to repeat some of it.
    pub(super) fn give_up(&mut self) {
        self.is_whole = false;
        if self.is_told() {
            self.lanes.iter_mut().for_each(|lane| (lane.sent, lane.at) = (Vec::new(), 0));
            self.share.release();
        }
    }

    /// Begins a replay.
    pub(super) fn rewind(&mut self) {
        for lane in &mut self.lanes {
            (lane.at, lane.channel) = (0, None);
        }
    }

    fn tell_whole(&mut self, at: usize, piece: &[u8]) -> Result<bool, Difference> {
        let lane = &mut self.lanes[at];
        if lane.left().is_empty() {
            self.append(at, piece);
            return Ok(false);
        }
        if !lane.left().starts_with(piece) {
            return Err(Difference);
        }
        lane.at += piece.len();
        Ok(true)
    }

    fn append(&mut self, at: usize, piece: &[u8]) {
        let lane = &self.lanes[at];
        if piece.is_empty() {
            return;
        }
        let has_room = self.is_whole && (lane.sent.capacity() - lane.sent.len() >= piece.len() || self.grow(at, piece.len()));
        if !has_room {
            return self.give_up();
        }
        let lane = &mut self.lanes[at];
        lane.sent.extend_from_slice(piece);
        lane.at = lane.sent.len();
    }

    /// Makes room for so many more bytes; `false` if there is none.
    fn grow(&mut self, at: usize, more: usize) -> bool {
        let taken: usize = self.lanes.iter().map(|lane| lane.sent.capacity()).sum();
        let sent = &mut self.lanes[at].sent;
        let roomy = (2 * (sent.len() + more)).max(MIN_LANE_BYTES);
        let room = taken - sent.capacity() + roomy;
        let may_grow = room <= MAX_STREAM_BYTES && self.share.grow_to(room);
        if may_grow {
            sent.reserve_exact(roomy - sent.len());
        }
        may_grow
    }
}

impl TranscriptLane {
    /// The part that a replay has still to repeat.
    fn left(&self) -> &[u8] {
        &self.sent[self.at..]
    }
}

#[cfg(test)]
mod tests;
