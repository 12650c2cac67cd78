//! Reads server-sent events just far enough to count them and to know how a stream
//! ended. Events may be split anywhere between reads.

use std::sync::LazyLock;

use memchr::memchr;
use memchr::memmem::Finder;

use super::report::Outcome;

/// Only a choice that ended has text here, whatever the reason.
static FINISHED: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(br#""finish_reason":""#));
static ABORTED: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(br#""finish_reason":"abort""#));
/// How an event of the Responses API says the same.
static COMPLETED: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(br#""type":"response.completed""#));

/// The state of one stream.
#[derive(Debug, Default)]
pub(super) struct EventScanner {
    /// The beginning of a line whose end has not come.
    partial: Vec<u8>,
    finished: bool,
    aborted: bool,
    failed: bool,
    done: bool,
}

impl EventScanner {
    /// Takes the next bytes; returns how many events ended in them.
    pub(super) fn scan(&mut self, mut bytes: &[u8]) -> u64 {
        let mut events = 0;
        while let Some(end) = memchr(b'\n', bytes) {
            let (line, rest) = bytes.split_at(end);
            bytes = &rest[1..];
            if self.partial.is_empty() {
                events += self.line(line);
            } else {
                let mut whole = std::mem::take(&mut self.partial);
                whole.extend_from_slice(line);
                events += self.line(&whole);
            }
        }
        self.partial.extend_from_slice(bytes);
        events
    }

    /// How the stream ended, when there is no more of it.
    pub(super) fn outcome(&self) -> Outcome {
        if self.failed {
            Outcome::ErrorEvent
        } else if !self.finished || !self.done {
            Outcome::Truncated
        } else if self.aborted {
            Outcome::Aborted
        } else {
            Outcome::Success
        }
    }

    fn line(&mut self, line: &[u8]) -> u64 {
        let Some(data) = line.strip_prefix(b"data: ") else { return 0 };
        if data.starts_with(b"[DONE]") {
            self.done = true;
        } else if data.starts_with(br#"{"error""#) {
            self.failed = true;
        } else if FINISHED.find(data).is_some() {
            self.finished = true;
            self.aborted |= ABORTED.find(data).is_some();
        } else if COMPLETED.find(data).is_some() {
            self.finished = true;
            self.done = true;
        }
        1
    }
}
