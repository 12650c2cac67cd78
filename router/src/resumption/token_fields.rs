//! Finds the tokens in an event, and writes the event without them.

use std::sync::LazyLock;

use bytes::{BufMut, BytesMut};
use memchr::memmem::{self, Finder};

use super::event_form::EventForm;

/// An event with a text and its tokens, and nothing else of interest.
pub(super) struct CommonEvent<'a> {
    /// The inside of the event's list of tokens.
    pub(super) ids: &'a [u8],
    pub(super) has_text: bool,
    /// How many bytes of the event stay; the end of the form follows them.
    pub(super) kept: usize,
}

impl<'a> CommonEvent<'a> {
    /// Parses an event of the common form. `prefix` is the part before the text.
    ///
    /// Each part is known to the byte, which costs less than searching the event for anything else.
    pub(super) fn parse(form: &EventForm, prefix: &[u8], event: &'a [u8]) -> Option<Self> {
        let inner = event.strip_prefix(prefix)?.strip_suffix(b"]}]}\n\n")?;
        let (before, ids) = inner.split_at(memchr::memrchr(b'[', inner)?);
        // A text has no bare quotes, so it ends where `closing` begins. A line end would mean two
        // events.
        let text = before.strip_suffix(form.field)?.strip_suffix(form.closing)?;
        let ids = ids.get(1..).filter(|ids| !ids.is_empty() && !text.contains(&b'\n'))?;
        Some(Self { ids, has_text: !text.is_empty(), kept: prefix.len() + text.len() + form.closing.len() })
    }
}

/// Whether these events contain a list of tokens.
#[must_use]
pub(super) fn has_tokens(events: &[u8]) -> bool {
    static FINDER: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(TOKENS));
    FINDER.find(events).is_some()
}

/// How many tokens of the answer these events contain.
#[must_use]
pub(super) fn count_answer_tokens(events: &[u8]) -> u64 {
    let lists = memmem::find_iter(events, TOKENS).filter(|found| events[..*found].ends_with(ANSWER));
    lists.map(|found| count_ids(inside_of_list(&events[found + TOKENS.len()..]))).sum()
}

/// How many tokens the inside of a list has.
#[must_use]
pub(super) fn count_ids(ids: &[u8]) -> u64 {
    if ids.is_empty() { 0 } else { memchr::memchr_iter(b',', ids).count() as u64 + 1 }
}

/// The part of `rest` before the end of a list.
fn inside_of_list(rest: &[u8]) -> &[u8] {
    let length = rest.iter().take_while(|byte| byte.is_ascii_digit() || **byte == b',').count();
    &rest[..length]
}

/// Appends an event without its lists of tokens. An event that an engine sends only for its tokens
/// is dropped.
pub(super) fn remove_tokens(form: &EventForm, event: &[u8], out: &mut BytesMut) {
    if form.only_tokens.iter().any(|marker| memmem::find(event, marker).is_some()) {
        return;
    }
    let mut copied = 0;
    // Quotes within strings are escaped, so each find is the end of a name.
    for found in memmem::find_iter(event, TOKENS) {
        let begin = found + TOKENS.len() - 1;
        let end = begin + inside_of_list(&event[begin + 1..]).len() + 2;
        let name = NAMES.iter().find(|name| event[..found].ends_with(name));
        if let Some(name) = name
            && event.get(end - 1) == Some(&b']')
        {
            // Remove the name too if nothing replaces the tokens.
            let kept = if form.absent.is_empty() { found - name.len() } else { begin };
            out.put_slice(&event[copied..kept]);
            out.put_slice(form.absent);
            copied = end;
        }
    }
    out.put_slice(&event[copied..]);
}

/// The end of any name of tokens, up to their list.
const TOKENS: &[u8] = b"token_ids\":[";

/// The beginnings of such names. No front-end has them first in an object.
const NAMES: [&[u8]; 2] = [ANSWER, b",\"prompt_"];

/// The beginning of the name of an answer's tokens.
const ANSWER: &[u8] = b",\"";
