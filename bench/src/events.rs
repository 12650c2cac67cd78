//! Parser of a stream's events, just far enough to count those with text, to know how the stream
//! ended, and to keep its usage.
//!
//! Events may be split anywhere between reads. A load of tens of thousands of events a second
//! should measure its target and not itself. So vector instructions look at each byte of an event a
//! few times, and nothing is parsed or allocated. Only a conversation that continues parses its
//! text.

use std::sync::LazyLock;

use memchr::memchr;
use memchr::memmem::Finder;
use serde::Deserialize;

use crate::sample::Outcome;

/// Longest line that is kept until its end comes.
///
/// No event of a model is as long, and a target that never ends a line must not fill the memory.
const MAX_LINE_BYTES: usize = 8 << 20;

/// Finder of field names.
///
/// Quotes within a JSON text are escaped, so these matches can only be names of fields. Reasoning
/// comes in fields whose names end alike.
static CONTENT: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(br#"content":"#));
static TEXT: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(br#""text":"#));
static REASONING: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(br#""reasoning":"#));
static ARGUMENTS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(br#""arguments":"#));
static FINISH: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(br#""finish_reason":"#));
static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(br#""usage":"#));

/// Cost of an answer, as the target counts it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Usage {
    #[serde(default)]
    pub(crate) prompt_tokens: u64,
    /// Generated tokens; absent if nothing is generated.
    #[serde(default)]
    pub(crate) completion_tokens: u64,
    #[serde(default)]
    prompt_tokens_details: Option<Details>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
struct Details {
    #[serde(default)]
    cached_tokens: Option<u64>,
}

impl Usage {
    pub(crate) fn cached_tokens(&self) -> Option<u64> {
        self.prompt_tokens_details.and_then(|details| details.cached_tokens)
    }
}

/// Fields of interest of an event, or of a whole answer.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Reply {
    #[serde(default)]
    choices: Vec<Choice>,
    #[serde(default)]
    pub(crate) usage: Option<Usage>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    #[serde(default)]
    delta: Option<MessageContent>,
    #[serde(default)]
    message: Option<MessageContent>,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    finish_reason: Option<String>,
}

#[derive(Debug, Deserialize)]
struct MessageContent {
    #[serde(default)]
    content: Option<String>,
}

impl Reply {
    /// Appends the text to the earlier text.
    pub(crate) fn add_text(&self, text: &mut String) {
        let Some(choice) = self.choices.first() else { return };
        let words = choice.delta.as_ref().or(choice.message.as_ref()).and_then(|words| words.content.as_ref());
        text.push_str(words.or(choice.text.as_ref()).map_or("", String::as_str));
    }

    pub(crate) fn outcome(&self) -> Outcome {
        match self.choices.first().map(|choice| choice.finish_reason.as_deref()) {
            Some(Some("abort")) => Outcome::Aborted,
            Some(Some(_)) => Outcome::Complete,
            _ => Outcome::Truncated,
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct EventScanner {
    /// Beginning of a line whose end has not come.
    partial: Vec<u8>,
    /// Last event with a usage.
    ///
    /// It is parsed at the end, because some targets send one with every event.
    usage: Vec<u8>,
    /// Text of the answer, if it is kept.
    text: Option<String>,
    finished: bool,
    aborted: bool,
    failed: bool,
    done: bool,
}

impl EventScanner {
    /// Creates a scanner, which keeps the answer's text if the conversation continues.
    pub(crate) fn new(keep_text: bool) -> Self {
        Self { text: keep_text.then(String::new), ..Self::default() }
    }

    /// Scans the next bytes, and returns how many events with text ended in them.
    ///
    /// `Err` means that a line is too long.
    pub(crate) fn scan(&mut self, mut bytes: &[u8]) -> Result<u32, LineTooLong> {
        let mut events = 0;
        while let Some(end) = memchr(b'\n', bytes) {
            let (line, rest) = (&bytes[..end], &bytes[end + 1..]);
            if self.partial.is_empty() {
                events += u32::from(self.line(line));
            } else {
                let mut whole = std::mem::take(&mut self.partial);
                whole.extend_from_slice(line);
                events += u32::from(self.line(&whole));
                // Reuse the memory for the next line that is split.
                whole.clear();
                self.partial = whole;
            }
            bytes = rest;
        }
        if self.partial.len() + bytes.len() > MAX_LINE_BYTES {
            return Err(LineTooLong);
        }
        self.partial.extend_from_slice(bytes);
        Ok(events)
    }

    pub(crate) fn outcome(&self) -> Outcome {
        if self.failed {
            Outcome::ErrorEvent
        } else if !self.finished || !self.done {
            Outcome::Truncated
        } else if self.aborted {
            Outcome::Aborted
        } else {
            Outcome::Complete
        }
    }

    pub(crate) fn usage(&self) -> Option<Usage> {
        serde_json::from_slice::<Reply>(&self.usage).ok()?.usage
    }

    pub(crate) fn into_text(self) -> String {
        self.text.unwrap_or_default()
    }

    /// Handles one line; `true` for an event with text.
    fn line(&mut self, line: &[u8]) -> bool {
        let Some(data) = line.strip_prefix(b"data:") else { return false };
        let data = data.trim_ascii();
        if data == b"[DONE]" {
            self.done = true;
            return false;
        }
        if data.starts_with(br#"{"error""#) || data.starts_with(br#"{"object":"error""#) {
            self.failed = true;
            return false;
        }
        if let Some(reason) = string_after(&FINISH, data) {
            self.finished = true;
            self.aborted |= reason.starts_with(b"abort\"");
        }
        if USAGE.find(data).is_some_and(|at| data[at + USAGE.needle().len()..].trim_ascii_start().starts_with(b"{")) {
            self.usage.clear();
            self.usage.extend_from_slice(data);
        }
        let has_text = [&*CONTENT, &*TEXT, &*REASONING, &*ARGUMENTS].into_iter().any(|name| has_text(name, data));
        if has_text
            && let Some(text) = &mut self.text
            && let Ok(reply) = serde_json::from_slice::<Reply>(data)
        {
            reply.add_text(text);
        }
        has_text
    }
}

/// A line that does not end.
#[derive(Debug)]
pub(crate) struct LineTooLong;

/// Whether a field of this name anywhere in the event is a text that is not empty.
///
/// The first event of a chat has an empty one.
fn has_text(name: &Finder<'_>, data: &[u8]) -> bool {
    name.find_iter(data).any(|at| text_from(&data[at + name.needle().len()..]).is_some_and(|text| text.first() != Some(&b'"')))
}

fn string_after<'a>(name: &Finder<'_>, data: &'a [u8]) -> Option<&'a [u8]> {
    text_from(&data[name.find(data)? + name.needle().len()..])
}

/// Text after its opening quote, if one begins here. Some targets write a space before it.
fn text_from(value: &[u8]) -> Option<&[u8]> {
    value.trim_ascii_start().strip_prefix(b"\"")
}

#[cfg(test)]
mod tests;
