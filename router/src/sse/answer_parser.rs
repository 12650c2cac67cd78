//! Reads usage and finish state from an answer's own JSON, by structure, while the pieces pass.
//! This takes a few bytes of memory however long the answer is.
//!
//! Structure matters because engines repeat parts of the request in an answer: schemas of tools and
//! of the text, arguments of calls. Such parts are the client's word, whatever they look like.

use std::sync::LazyLock;

use memchr::memchr2;
use memchr::memmem::Finder;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokenUsage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    /// Prompt tokens that were cached, if the engine reports them.
    pub cached_tokens: Option<u64>,
}

/// How far an answer's choices have come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum FinishState {
    #[default]
    None,
    Finished,
    /// A choice was aborted because its engine was stopped.
    Abort,
}

/// Most nested containers that can hold a field of interest. No engine nests deeper than
/// `response.usage.input_tokens_details`.
const DEPTH: usize = 4;

/// Length of the longest name or word of interest, plus one.
const WORD_BYTES: usize = 28;

/// A container that may hold a field of interest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum JsonContainer {
    /// The answer or event itself.
    Root,
    /// The object that an event is about.
    Inner,
    Choices,
    Choice,
    Usage,
    Details,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum JsonField {
    Other,
    Inner,
    Choices,
    FinishReason,
    Usage,
    /// The Cohere API has its numbers in here.
    Tokens,
    Details,
    /// An index into `numbers`.
    Number(usize),
}

const PROMPT: usize = 0;
const COMPLETION: usize = 1;
const CACHED: usize = 2;
/// The Messages API counts prompt tokens read from the cache, and those written to it, apart from
/// the others.
const CACHE_READ: usize = 3;
const CACHE_WRITTEN: usize = 4;

/// Parses one answer or event. Anything but JSON yields nothing.
#[derive(Debug)]
pub(crate) struct AnswerParser {
    /// The field of an event that may hold the usage, besides the event itself; empty for none.
    nested_field: &'static [u8],
    containers: [JsonContainer; DEPTH],
    depth: usize,
    /// Open containers below `containers`, which are skipped.
    skipped_depth: usize,
    is_root_closed: bool,
    has_trailing_data: bool,
    /// The next string is a name.
    is_name_expected: bool,
    field: JsonField,
    in_string: bool,
    /// The next byte of the string follows a backslash.
    escaped: bool,
    /// Whether the string is of interest.
    is_captured: bool,
    captured: [u8; WORD_BYTES],
    /// Bytes of the string so far; 0 if it is too long for the buffer.
    captured_bytes: usize,
    numbers: [Option<u64>; 5],
    finish_state: FinishState,
}

impl AnswerParser {
    /// Parses an answer, or an event whose usage may also stand in its field `inner`.
    #[must_use]
    pub(crate) fn new(inner: &'static str) -> Self {
        Self {
            nested_field: inner.as_bytes(),
            containers: [JsonContainer::Root; DEPTH],
            depth: 0,
            skipped_depth: 0,
            is_root_closed: false,
            has_trailing_data: false,
            is_name_expected: false,
            field: JsonField::Other,
            in_string: false,
            escaped: false,
            is_captured: false,
            captured: [0; WORD_BYTES],
            captured_bytes: 0,
            numbers: [None; 5],
            finish_state: FinishState::None,
        }
    }

    /// A parser that ignores every answer.
    #[must_use]
    pub(crate) fn inert() -> Self {
        Self { is_root_closed: true, ..Self::new("") }
    }

    #[must_use]
    pub(crate) fn parse(json: &[u8], inner: &'static str) -> Self {
        let mut parser = Self::new(inner);
        parser.feed(json);
        parser
    }

    /// The usage in the root of a whole answer or event.
    ///
    /// Usually there is only one usage, near the end. The bytes behind it then show that it is in
    /// the root, and nothing before it needs to be read.
    #[must_use]
    pub(crate) fn parse_usage(json: &[u8]) -> Option<TokenUsage> {
        static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"usage\":"));
        // Quotes within JSON strings are escaped, so this is the name of a field at some level.
        let at = USAGE.find(json)?;
        let mut parser = Self { depth: 1, field: JsonField::Usage, ..Self::new("") };
        parser.feed(&json[at + USAGE.needle().len()..]);
        // After a field of a deeper object, the end of that object would come first, then the end
        // of the root.
        let is_in_root = parser.is_root_closed && !parser.has_trailing_data;
        if is_in_root { parser.usage() } else { Self::parse(json, "").usage() }
    }

    pub(crate) fn feed(&mut self, mut piece: &[u8]) {
        loop {
            if self.in_string {
                piece = self.read_string(piece);
            }
            if self.skipped_depth > 0 {
                let Some(at) = piece.iter().position(|byte| matches!(byte, b'"' | b'{' | b'}' | b'[' | b']')) else { return };
                piece = &piece[at..];
            }
            let Some((byte, rest)) = piece.split_first() else { return };
            self.read_byte(*byte);
            piece = rest;
        }
    }

    /// The usage, if the engine has reported any of it.
    #[must_use]
    pub(crate) fn usage(&self) -> Option<TokenUsage> {
        let [prompt, completion, cached, read, written] = self.numbers;
        prompt.or(completion)?;
        let apart = read.unwrap_or(0).saturating_add(written.unwrap_or(0));
        Some(TokenUsage {
            prompt_tokens: prompt.unwrap_or(0).saturating_add(apart),
            completion_tokens: completion.unwrap_or(0),
            cached_tokens: cached.or(read),
        })
    }

    #[must_use]
    pub(crate) fn is_complete(&self) -> bool {
        self.is_root_closed
    }

    #[must_use]
    pub(crate) fn finish_state(&self) -> FinishState {
        self.finish_state
    }

    /// Reads the available rest of a string, and returns the bytes behind the string.
    fn read_string<'a>(&mut self, piece: &'a [u8]) -> &'a [u8] {
        let mut from = usize::from(std::mem::take(&mut self.escaped)).min(piece.len());
        loop {
            match memchr2(b'"', b'\\', &piece[from..]).map(|at| from + at) {
                Some(at) if piece[at] == b'"' => {
                    self.capture(&piece[..at]);
                    self.in_string = false;
                    self.end_string();
                    return &piece[at + 1..];
                }
                Some(at) if at + 1 < piece.len() => from = at + 2,
                escape => {
                    self.escaped = escape.is_some();
                    self.capture(piece);
                    return &[];
                }
            }
        }
    }

    /// Keeps a part of a string of interest. No word of interest has escapes.
    fn capture(&mut self, part: &[u8]) {
        if !self.is_captured {
            return;
        }
        match self.captured.get_mut(self.captured_bytes..self.captured_bytes + part.len()) {
            Some(word) => {
                word.copy_from_slice(part);
                self.captured_bytes += part.len();
            }
            None => {
                self.is_captured = false;
                self.captured_bytes = 0;
            }
        }
    }

    fn end_string(&mut self) {
        if self.skipped_depth > 0 {
            return;
        }
        if self.is_name_expected {
            self.field = self.match_field();
            if let JsonField::Number(number) = self.field {
                self.numbers[number] = None;
            }
        } else if self.field == JsonField::FinishReason && self.finish_state != FinishState::Abort {
            self.finish_state = if &self.captured[..self.captured_bytes] == b"abort" { FinishState::Abort } else { FinishState::Finished };
        }
    }

    fn match_field(&self) -> JsonField {
        let word = &self.captured[..self.captured_bytes];
        match (self.innermost(), word) {
            (Some(JsonContainer::Root), word) if !self.nested_field.is_empty() && word == self.nested_field => JsonField::Inner,
            (Some(JsonContainer::Root | JsonContainer::Inner), b"usage") => JsonField::Usage,
            (Some(JsonContainer::Root), b"choices") => JsonField::Choices,
            (Some(JsonContainer::Choice), b"finish_reason") => JsonField::FinishReason,
            (Some(JsonContainer::Usage), b"prompt_tokens" | b"input_tokens") => JsonField::Number(PROMPT),
            (Some(JsonContainer::Usage), b"completion_tokens" | b"output_tokens") => JsonField::Number(COMPLETION),
            (Some(JsonContainer::Usage | JsonContainer::Details), b"cached_tokens") => JsonField::Number(CACHED),
            (Some(JsonContainer::Usage), b"cache_read_input_tokens") => JsonField::Number(CACHE_READ),
            (Some(JsonContainer::Usage), b"cache_creation_input_tokens") => JsonField::Number(CACHE_WRITTEN),
            (Some(JsonContainer::Usage), b"prompt_tokens_details" | b"input_tokens_details") => JsonField::Details,
            (Some(JsonContainer::Usage), b"tokens") => JsonField::Tokens,
            _ => JsonField::Other,
        }
    }

    /// Reads a byte outside of strings.
    fn read_byte(&mut self, byte: u8) {
        match byte {
            b'"' => {
                self.in_string = true;
                self.is_captured = self.skipped_depth == 0 && (self.is_name_expected || self.field == JsonField::FinishReason);
                self.captured_bytes = 0;
            }
            b'{' | b'[' => self.open_container(byte == b'{'),
            b'}' | b']' => self.close_container(),
            _ if self.skipped_depth > 0 => {}
            b':' => self.is_name_expected = false,
            b',' => {
                self.has_trailing_data |= self.is_root_closed;
                self.field = JsonField::Other;
                self.is_name_expected = self.innermost().is_some_and(|place| place != JsonContainer::Choices);
            }
            b'0'..=b'9' => {
                if let JsonField::Number(number) = self.field {
                    let digits = self.numbers[number].unwrap_or(0);
                    self.numbers[number] = Some(digits.saturating_mul(10).saturating_add(u64::from(byte - b'0')));
                }
            }
            // Only the integer part of a fraction counts. A negative number counts as 0.
            b'.' | b'e' | b'E' | b'-' => self.field = JsonField::Other,
            _ => {}
        }
    }

    fn open_container(&mut self, is_object: bool) {
        let container = match (self.innermost(), self.field, is_object) {
            _ if self.skipped_depth > 0 || self.is_root_closed || self.depth == DEPTH => None,
            (None, _, true) => Some(JsonContainer::Root),
            (_, JsonField::Inner, true) => Some(JsonContainer::Inner),
            (_, JsonField::Choices, false) => Some(JsonContainer::Choices),
            (Some(JsonContainer::Choices), _, true) => Some(JsonContainer::Choice),
            (_, JsonField::Usage | JsonField::Tokens, true) => Some(JsonContainer::Usage),
            (_, JsonField::Details, true) => Some(JsonContainer::Details),
            _ => None,
        };
        self.field = JsonField::Other;
        match container {
            Some(place) => {
                self.containers[self.depth] = place;
                self.depth += 1;
                self.is_name_expected = place != JsonContainer::Choices;
            }
            None => self.skipped_depth += 1,
        }
    }

    fn close_container(&mut self) {
        if self.skipped_depth > 0 {
            self.skipped_depth -= 1;
        } else {
            self.has_trailing_data |= self.is_root_closed;
            self.depth = self.depth.saturating_sub(1);
            self.is_root_closed |= self.depth == 0;
            self.field = JsonField::Other;
        }
    }

    fn innermost(&self) -> Option<JsonContainer> {
        self.containers[..self.depth].last().copied()
    }
}

#[cfg(test)]
mod tests;
