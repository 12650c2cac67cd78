//! Records the tokens of a stream as its events pass, and removes them from the events. The client
//! gets the bytes that the engine would have sent without being asked for tokens.
//!
//! Nearly all events have one form, known to the byte: the head of the stream, a text, and the end
//! with its tokens. Of these only the tokens are looked at. All others are read as JSON. An event
//! that is not understood ends the record, and from then on tokens are only removed.

use bytes::{Bytes, BytesMut};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::KnownTokens;
use super::event_form::EventForm;
use super::memory::{RecordMemory, RecordShare};
use super::sampling::StreamApi;
use super::token_fields::{CommonEvent, count_answer_tokens, count_ids, has_tokens, remove_tokens};
use crate::sse::event_end;

/// Most memory of a resumable stream's tokens: about 160,000 tokens.
const MAX_STREAM_BYTES: usize = 1024 * 1024;

/// The tokens of one stream.
#[derive(Debug)]
pub(crate) struct TokenRecord {
    api: StreamApi,
    /// The front-end's form of events, once the first has come.
    form: Option<&'static EventForm>,
    /// How each event begins, up to its list of choices; empty before the first one.
    head: Bytes,
    /// The head, with the part between it and a text.
    prefix: Bytes,
    /// The tokens of the prompt, then those of the answer, separated by commas.
    ids: Vec<u8>,
    /// Length of the prompt's part.
    prompt_bytes: usize,
    /// Length up to the last text. Any tokens behind it are part of a character.
    shown_bytes: usize,
    /// Tokens of the answer that were forgotten.
    forgotten_tokens: u64,
    /// Events without text that the client has received since the last text.
    textless_events: u32,
    /// How many of those events the continuation repeats.
    repeated_events: u32,
    is_finished: bool,
    /// Everything so far was understood and recorded.
    is_complete: bool,
    share: RecordShare,
}

/// The parts of an event that concern tokens.
#[derive(Deserialize)]
struct TokenEvent<'a> {
    #[serde(borrow)]
    choices: Vec<TokenChoice<'a>>,
    #[serde(borrow)]
    prompt_token_ids: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct TokenChoice<'a> {
    index: u64,
    #[serde(borrow)]
    delta: Option<TextDelta<'a>>,
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    #[serde(borrow)]
    finish_reason: Option<&'a RawValue>,
    #[serde(borrow)]
    prompt_token_ids: Option<&'a RawValue>,
    #[serde(borrow)]
    token_ids: Option<&'a RawValue>,
}

/// The delta of a chat that is nothing but text.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TextDelta<'a> {
    #[serde(borrow, default, rename = "role")]
    _role: Option<&'a RawValue>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
}

impl TokenRecord {
    /// The record of a stream whose engine returns tokens.
    #[must_use]
    pub(crate) fn new(api: StreamApi, memory: &RecordMemory) -> Self {
        Self {
            api,
            form: None,
            head: Bytes::new(),
            prefix: Bytes::new(),
            ids: Vec::new(),
            prompt_bytes: 0,
            shown_bytes: 0,
            forgotten_tokens: 0,
            textless_events: 0,
            repeated_events: 0,
            is_finished: false,
            is_complete: true,
            share: memory.share(),
        }
    }

    /// Removes the tokens from an event of the common form, which ends or fails no answer and has
    /// no usage.
    ///
    /// Returns the bytes to send, and the end to send after them. `None` for any other event.
    pub(crate) fn process_common(&mut self, event: &Bytes) -> Option<(Bytes, &'static [u8])> {
        let form = self.form.filter(|_| self.is_complete)?;
        let common = CommonEvent::parse(form, &self.prefix, event)?;
        let kept = common.kept;
        if self.take_common(&common) {
            return Some((Bytes::new(), b""));
        }
        Some((event.slice(..kept), form.end))
    }

    /// Removes the tokens from whole events.
    pub(crate) fn process(&mut self, events: Bytes) -> Bytes {
        // Events without tokens cost one search.
        if !self.is_complete && !has_tokens(&events) {
            return events;
        }
        let mut passed = BytesMut::with_capacity(events.len());
        let mut begin = 0;
        while begin < events.len() {
            // The last event of a stream may lack its blank line.
            let end = event_end(&events[begin..]).map_or(events.len(), |length| begin + length);
            self.process_event(&events[begin..end], &mut passed);
            begin = end;
        }
        passed.freeze()
    }

    /// From now on, tokens are only counted and removed.
    pub(crate) fn give_up(&mut self) {
        self.forgotten_tokens = self.emitted_tokens();
        self.is_complete = false;
        self.ids = Vec::new();
        self.share.release();
    }

    /// The state that the stream can be continued from, if all of it is known: everything up to the
    /// last text that the client has seen.
    pub(crate) fn known(&self) -> Option<KnownTokens> {
        if !self.is_complete || self.prompt_bytes == 0 {
            return None;
        }
        let ids = if self.is_finished { &self.ids[..] } else { &self.ids[..self.shown_bytes] };
        if !ids.iter().all(|byte| byte.is_ascii_digit() || *byte == b',') {
            return None;
        }
        let (prompt, emitted) = ids.split_at(self.prompt_bytes);
        Some(KnownTokens {
            prompt_tokens: count_ids(prompt),
            emitted_tokens: answer_tokens(emitted),
            ids: String::from_utf8(ids.to_vec()).ok()?,
            form: self.form?,
            head: self.head.clone(),
            is_finished: self.is_finished,
        })
    }

    /// Tokens of the answer so far.
    pub(crate) fn emitted_tokens(&self) -> u64 {
        self.forgotten_tokens + self.ids.get(self.prompt_bytes..).map_or(0, answer_tokens)
    }

    /// Whether the stream's tokens will never all be known.
    pub(crate) fn has_given_up(&self) -> bool {
        !self.is_complete
    }

    /// The known state. Tokens that the client has not seen are forgotten: the continuation repeats
    /// them.
    pub(crate) fn rewind(&mut self) -> Option<KnownTokens> {
        let known = self.known()?;
        if !known.is_finished {
            self.ids.truncate(self.shown_bytes);
            self.repeated_events = self.textless_events;
        }
        Some(known)
    }

    fn process_event(&mut self, event: &[u8], passed: &mut BytesMut) {
        if let Some(form) = self.form.filter(|_| self.is_complete)
            && let Some(common) = CommonEvent::parse(form, &self.prefix, event)
        {
            let kept = common.kept;
            if !self.take_common(&common) {
                passed.extend_from_slice(&event[..kept]);
                passed.extend_from_slice(form.end);
            }
            return;
        }
        if !self.is_complete || self.read_event(event).is_none() {
            self.give_up();
            self.forgotten_tokens += count_answer_tokens(event);
        }
        remove_tokens(self.form.unwrap_or_else(|| EventForm::of(self.api, event)), event, passed);
    }

    /// Records the tokens of an event; `true` if the client already has the event.
    fn take_common(&mut self, common: &CommonEvent<'_>) -> bool {
        self.remember(common.ids, common.has_text);
        self.is_repeated(common.has_text)
    }

    /// Whether the client received the same event before the stream was resumed.
    fn is_repeated(&mut self, has_text: bool) -> bool {
        if has_text {
            (self.textless_events, self.repeated_events) = (0, 0);
        } else if self.repeated_events > 0 {
            self.repeated_events -= 1;
            return true;
        } else {
            self.textless_events += 1;
        }
        false
    }

    /// Reads an event of another form; `None` if it is not understood.
    fn read_event(&mut self, event: &[u8]) -> Option<()> {
        let Some(data) = event.strip_prefix(b"data: ").map(<[u8]>::trim_ascii_end) else {
            return event.starts_with(b":").then_some(());
        };
        if data == b"[DONE]" {
            return Some(());
        }
        let TokenEvent { choices, prompt_token_ids } = serde_json::from_slice(data).ok()?;
        self.check_head(event)?;
        prompt_token_ids.map_or(Some(()), |ids| self.remember_prompt(ids))?;
        let [choice] = &choices[..] else { return choices.is_empty().then_some(()) };
        if choice.index != 0 || self.is_finished {
            return None;
        }
        choice.prompt_token_ids.map_or(Some(()), |ids| self.remember_prompt(ids))?;
        let text = match (self.api, &choice.delta, choice.text) {
            (StreamApi::Chat, Some(TextDelta { content, .. }), None) => content.map_or("", RawValue::get),
            (StreamApi::Completions, None, Some(text)) => text.get(),
            _ => return None,
        };
        self.is_finished = choice.finish_reason.is_some();
        let has_text = text.len() > 2;
        match choice.token_ids.map(list) {
            Some(ids) if !ids?.is_empty() => self.remember(ids?, has_text),
            // The choice has text without tokens.
            _ if has_text => return None,
            _ => {}
        }
        Some(())
    }

    /// Checks the common beginning that all events of a stream have.
    fn check_head(&mut self, event: &[u8]) -> Option<()> {
        if self.form.is_none() {
            const CHOICES: &[u8] = b"\"choices\":[";
            let end = memchr::memmem::find(event, CHOICES)? + CHOICES.len();
            let form = EventForm::of(self.api, event);
            self.head = Bytes::copy_from_slice(&event[..end]);
            self.prefix = [&self.head, form.opening].concat().into();
            self.form = Some(form);
        }
        event.starts_with(&self.head).then_some(())
    }

    fn remember_prompt(&mut self, ids: &RawValue) -> Option<()> {
        if ids.get() == "null" {
            return Some(());
        }
        let ids = list(ids).filter(|ids| !ids.is_empty() && self.ids.is_empty())?;
        if !self.push(ids) {
            return None;
        }
        self.prompt_bytes = self.ids.len();
        self.shown_bytes = self.ids.len();
        Some(())
    }

    /// Records tokens of the answer, at least one.
    fn remember(&mut self, ids: &[u8], has_text: bool) {
        if !self.push(ids) {
            self.give_up();
            self.forgotten_tokens += count_ids(ids);
        } else if has_text {
            self.shown_bytes = self.ids.len();
        }
    }

    /// Appends tokens; `false` if there is no room.
    fn push(&mut self, ids: &[u8]) -> bool {
        if self.ids.capacity() - self.ids.len() <= ids.len() && !self.grow(ids.len() + 1) {
            return false;
        }
        if !self.ids.is_empty() {
            self.ids.push(b',');
        }
        self.ids.extend_from_slice(ids);
        true
    }

    /// Makes room for so many more bytes; `false` if there is none.
    fn grow(&mut self, more: usize) -> bool {
        let needed = self.ids.len() + more;
        let roomy = (2 * needed).min(MAX_STREAM_BYTES);
        let may_grow = roomy >= needed && self.share.grow_to(roomy);
        if may_grow {
            self.ids.reserve_exact(roomy - self.ids.len());
        }
        may_grow
    }
}

/// The inside of a list of tokens, without blanks as engines write it.
fn list(ids: &RawValue) -> Option<&[u8]> {
    Some(ids.get().strip_prefix('[')?.strip_suffix(']')?.as_bytes())
}

/// How many tokens follow those of the prompt, each behind a comma.
fn answer_tokens(ids: &[u8]) -> u64 {
    memchr::memchr_iter(b',', ids).count() as u64
}

#[cfg(test)]
mod tests;
