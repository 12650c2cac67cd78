//! Reads an event stream as it passes, without changing a byte: is it finished, has it failed, what did it use.
//!
//! It lets whole events through and holds back a last half one, so that an error event can always be appended. A success needs a
//! finish reason: engines send HTTP 200 and even `[DONE]` after they have died.

use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memmem::Finder;

/// An event longer than this is let through in parts. Log-probabilities of a long prompt make the largest.
const HELD_BYTES: usize = 256 * 1024;

/// What stays held of such an event, so that no field of interest is ever cut in two: a usage object has about 200 bytes.
const OVERLAP_BYTES: usize = 1024;

/// How a stream of this route ends and fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// `/v1/chat/completions` and `/v1/completions`: a finish reason, then `[DONE]`.
    OpenAi,
    /// `/v1/responses`: ends with a `response.completed`, `.incomplete` or `.failed` event.
    Responses,
    /// `/v1/messages`: ends with `message_stop`.
    Anthropic,
    /// Any other event stream: ends when it ends.
    Other,
}

impl Dialect {
    /// The dialect of a route.
    #[must_use]
    pub fn of(path: &str) -> Self {
        match path {
            "/v1/chat/completions" | "/v1/completions" => Self::OpenAi,
            "/v1/responses" => Self::Responses,
            "/v1/messages" => Self::Anthropic,
            _ => Self::Other,
        }
    }

    /// What each event has that tells of new tokens: front-ends send others before they have any.
    pub(super) fn token(self) -> &'static [u8] {
        match self {
            Self::OpenAi | Self::Other => b"\n\n",
            Self::Responses => b".delta\n",
            Self::Anthropic => b"event: content_block_delta",
        }
    }

    /// The event that tells a client of this dialect that its answer has failed.
    #[must_use]
    pub fn error_event(self, message: &str) -> Bytes {
        let (event, data) = match self {
            Self::OpenAi | Self::Other => {
                ("", serde_json::json!({"error": {"message": message, "type": "InternalServerError", "param": null, "code": 502}}))
            }
            Self::Responses => {
                ("event: error\n", serde_json::json!({"type": "error", "code": "server_error", "message": message, "param": null}))
            }
            Self::Anthropic => ("event: error\n", serde_json::json!({"type": "error", "error": {"type": "api_error", "message": message}})),
        };
        format!("{event}data: {data}\n\n").into()
    }
}

/// What the engine says it used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: u64,
    /// Tokens of the answer.
    pub completion: u64,
    /// Tokens of the prompt that were cached, where the engine says so.
    pub cached: Option<u64>,
}

impl Usage {
    /// Reads the usage that follows in `json`, a whole answer or event, if there is one.
    #[must_use]
    pub fn find(json: &[u8]) -> Option<Self> {
        static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"usage\":{"));
        static KEYS: LazyLock<[Finder<'static>; 5]> = LazyLock::new(|| {
            ["prompt_tokens", "input_tokens", "completion_tokens", "output_tokens", "cached_tokens"]
                .map(|key| Finder::new(&format!("\"{key}\":")).into_owned())
        });
        let usage = &json[USAGE.find(json)?..];
        let [prompt, input, completion, output, cached] = &*KEYS;
        let number = |key| number(usage, key);
        Some(Self {
            prompt: number(prompt).or_else(|| number(input)).unwrap_or(0),
            completion: number(completion).or_else(|| number(output)).unwrap_or(0),
            cached: number(cached),
        })
    }
}

/// Whether an error says that the engine's core is dead, as vLLM's Python front-end does until it exits 2 to 5 s later (the Rust one breaks off).
/// Any other internal error is the request's own. Quotes within JSON strings are escaped, so nobody can have it repeated in another error.
#[must_use]
pub(super) fn tells_of_death(error: &[u8]) -> bool {
    let is_told = |words: &[u8]| memchr::memmem::find(error, words).is_some();
    is_told(b"\"message\":\"EngineCore encountered an issue") || is_told(b"\"message\": \"EngineCore encountered an issue")
}

/// What to do with the bytes just read.
#[derive(Debug, PartialEq, Eq)]
pub enum Passed {
    /// Send these, which may be none.
    On(Bytes),
    /// Send these, then end the answer as broken: they end with the engine's own error event.
    Failed(Bytes),
    /// Send these, then our own error event: the engine gave up on the answer while pretending to finish it.
    Aborted(Bytes),
}

/// Follows one event stream.
#[derive(Debug)]
pub struct Scanner {
    dialect: Dialect,
    held: BytesMut,
    /// What is held belongs to an event whose beginning has been let through.
    within: bool,
    finished: bool,
    done: bool,
    usage: Option<Usage>,
    events: u64,
}

enum Verdict {
    Fine,
    Error,
    Abort,
}

impl Scanner {
    /// A scanner at the beginning of a stream.
    #[must_use]
    pub fn new(dialect: Dialect) -> Self {
        Self { dialect, held: BytesMut::new(), within: false, finished: false, done: false, usage: None, events: 0 }
    }

    /// Takes in what was read and says what may be sent.
    pub fn pass(&mut self, bytes: Bytes) -> Passed {
        let bytes = if self.held.is_empty() {
            bytes
        } else {
            self.held.extend_from_slice(&bytes);
            self.held.split().freeze()
        };
        let mut begin = 0;
        while let Some(end) = event_end(&bytes[begin..]) {
            match self.event(&bytes[begin..begin + end]) {
                Verdict::Fine => begin += end,
                Verdict::Error => return Passed::Failed(bytes.slice(..begin + end)),
                Verdict::Abort => return Passed::Aborted(bytes.slice(..begin)),
            }
            self.events += 1;
            self.within = false;
        }
        if bytes.len() - begin > HELD_BYTES {
            if matches!(self.event(&bytes[begin..]), Verdict::Abort) {
                return Passed::Aborted(bytes.slice(..begin));
            }
            self.within = true;
            begin = bytes.len() - OVERLAP_BYTES;
        }
        self.held.extend_from_slice(&bytes[begin..]);
        Passed::On(bytes.slice(..begin))
    }

    /// The event that tells the client that its answer has failed; it closes an event of which a part has been sent.
    #[must_use]
    pub fn error_event(&self, message: &str) -> Bytes {
        let event = self.dialect.error_event(message);
        if self.within { [b"\n\n", &event[..]].concat().into() } else { event }
    }

    /// What was held back; called when the stream has ended.
    pub fn rest(&mut self) -> Bytes {
        let rest = self.held.split().freeze();
        // An engine may leave out the last blank line.
        if !rest.is_empty() {
            self.event(&rest);
            self.events += 1;
        }
        rest
    }

    /// Whether the stream, now that it has ended, gave a whole answer.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        match self.dialect {
            Dialect::OpenAi => self.finished && self.done,
            Dialect::Responses | Dialect::Anthropic => self.finished,
            Dialect::Other => true,
        }
    }

    /// The last usage seen.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// Events seen.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events
    }

    fn event(&mut self, event: &[u8]) -> Verdict {
        static FINISH: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"finish_reason\":"));
        let Fields { name, data } = if self.within { Fields { name: b"", data: Some(event) } } else { Fields::of(event) };
        // Quotes within JSON strings are escaped, so what is looked for here is never a part of generated text.
        if name == b"error" || data.is_some_and(|data| data.starts_with(b"{\"error\":")) {
            return Verdict::Error;
        }
        match (self.dialect, name) {
            (Dialect::Anthropic, b"message_stop")
            | (Dialect::Responses, b"response.completed" | b"response.incomplete" | b"response.failed") => {
                self.finished = true;
            }
            _ => {}
        }
        if let (Some(data), b"message_start" | b"message_delta" | b"response.completed" | b"response.incomplete") = (data, name)
            && let Some(usage) = Usage::find(data)
        {
            // The last event of a message need not repeat how long the prompt was.
            let before = self.usage.unwrap_or_default();
            self.usage = Some(Usage { prompt: usage.prompt.max(before.prompt), cached: usage.cached.or(before.cached), ..usage });
        }
        let Some(data) = data.filter(|_| self.dialect == Dialect::OpenAi) else { return Verdict::Fine };
        if data.starts_with(b"[DONE]") {
            self.done = true;
            return Verdict::Fine;
        }
        for at in FINISH.find_iter(data) {
            let value = data[at + FINISH.needle().len()..].trim_ascii_start();
            if value.starts_with(b"\"abort\"") {
                return Verdict::Abort;
            }
            self.finished |= value.starts_with(b"\"");
        }
        self.usage = Usage::find(data).or(self.usage);
        Verdict::Fine
    }
}

/// What is read of an event: the first field of each name.
struct Fields<'a> {
    /// Empty when it has none.
    name: &'a [u8],
    data: Option<&'a [u8]>,
}

impl<'a> Fields<'a> {
    fn of(event: &'a [u8]) -> Self {
        let (mut name, mut data) = (None, None);
        let mut begin = 0;
        while begin < event.len() {
            let end = memchr::memchr(b'\n', &event[begin..]).map_or(event.len(), |at| begin + at);
            let line = &event[begin..end];
            if let Some(value) = line.strip_prefix(b"data:") {
                data = data.or(Some(value));
            } else if let Some(value) = line.strip_prefix(b"event:") {
                name = name.or(Some(value));
            }
            begin = end + 1;
        }
        let trimmed = |value: &'a [u8]| value.strip_prefix(b" ").unwrap_or(value).trim_ascii_end();
        Self { name: name.map_or(b"", trimmed), data: data.map(trimmed) }
    }
}

/// Length of the first event with its blank line, if it is whole.
fn event_end(bytes: &[u8]) -> Option<usize> {
    let newlines = memchr::memchr_iter(b'\n', bytes);
    for at in newlines {
        match &bytes[at + 1..] {
            [b'\n', ..] => return Some(at + 2),
            [b'\r', b'\n', ..] => return Some(at + 3),
            _ => {}
        }
    }
    None
}

/// The whole number that a key has, if it has one.
fn number(json: &[u8], key: &Finder<'_>) -> Option<u64> {
    let at = key.find(json)? + key.needle().len();
    let digits = json[at..].trim_ascii_start().iter().take_while(|byte| byte.is_ascii_digit());
    digits.map(|digit| u64::from(digit - b'0')).reduce(|number, digit| number.wrapping_mul(10).wrapping_add(digit))
}

#[cfg(test)]
mod tests;
