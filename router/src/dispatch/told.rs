//! What an engine says of an answer in the answer's own JSON: what it used, and whether it finished. Read by structure while the pieces pass,
//! in a few bytes of memory however long the answer is.
//!
//! By structure, because engines repeat in an answer what the request had: the schemas of tools and of the text, the arguments of calls. What
//! stands in there is the client's word, whatever it looks like.

use std::sync::LazyLock;

use memchr::memchr2;
use memchr::memmem::Finder;

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

/// How far the choices of an answer are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Finish {
    /// None has a finish reason.
    #[default]
    None,
    /// One has.
    Some,
    /// One was given up by its engine, which was stopped.
    Abort,
}

/// Containers that lead to what is looked for. No engine nests them deeper than `response.usage.input_tokens_details`.
const DEPTH: usize = 4;

/// The longest name or word that is looked for has 27 bytes.
const WORD_BYTES: usize = 28;

/// A container that is looked into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// The answer or event itself.
    Root,
    /// What an event is about.
    Inner,
    Choices,
    Choice,
    Usage,
    Details,
}

/// What the next value is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    Other,
    Inner,
    Choices,
    FinishReason,
    Usage,
    /// The Cohere API has its numbers below this.
    Tokens,
    Details,
    /// One of the `numbers`.
    Number(usize),
}

const PROMPT: usize = 0;
const COMPLETION: usize = 1;
const CACHED: usize = 2;
/// The Messages API counts those of the prompt that were cached, and those that are cached now, apart from the others.
const CACHE_READ: usize = 3;
const CACHE_WRITTEN: usize = 4;

/// A reader of one answer or event. What is not JSON tells nothing.
#[derive(Debug)]
pub(super) struct Told {
    /// The field of an event that may have the usage, besides the event itself; empty for none.
    inner: &'static [u8],
    open: [Place; DEPTH],
    depth: usize,
    /// Containers open below them that are passed over.
    passed_over: usize,
    /// The root has been closed.
    ended: bool,
    /// More came after that, so it was none.
    beyond: bool,
    /// The next string is a name.
    names: bool,
    field: Field,
    in_string: bool,
    /// The next byte of the string stands behind a backslash.
    escaped: bool,
    /// Whether the string is one that matters.
    kept: bool,
    word: [u8; WORD_BYTES],
    /// More than the word can have where the string is too long for it.
    length: usize,
    numbers: [Option<u64>; 5],
    finish: Finish,
}

impl Told {
    /// A reader of an answer, or of an event whose usage may also stand in its field `inner`.
    #[must_use]
    pub(super) fn new(inner: &'static str) -> Self {
        Self {
            inner: inner.as_bytes(),
            open: [Place::Root; DEPTH],
            depth: 0,
            passed_over: 0,
            ended: false,
            beyond: false,
            names: false,
            field: Field::Other,
            in_string: false,
            escaped: false,
            kept: false,
            word: [0; WORD_BYTES],
            length: 0,
            numbers: [None; 5],
            finish: Finish::None,
        }
    }

    /// A reader that no answer tells anything.
    #[must_use]
    pub(super) fn unheard() -> Self {
        Self { ended: true, ..Self::new("") }
    }

    /// What a whole answer or event says.
    #[must_use]
    pub(super) fn of(json: &[u8], inner: &'static str) -> Self {
        let mut told = Self::new(inner);
        told.read(json);
        told
    }

    /// The usage in the root of a whole answer or event. Mostly it is the only one in there and stands near the end: then what follows it
    /// shows where it stands, and nothing before it needs to be read.
    #[must_use]
    pub(super) fn usage_of(json: &[u8]) -> Option<Usage> {
        static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"usage\":"));
        // Quotes within JSON strings are escaped, so this is the name of a field, whosever.
        let at = USAGE.find(json)?;
        let mut told = Self { depth: 1, field: Field::Usage, ..Self::new("") };
        told.read(&json[at + USAGE.needle().len()..]);
        // A field of anything deeper would be followed by the end of that, and then by the end of the root.
        let is_in_root = told.ended && !told.beyond;
        if is_in_root { told.usage() } else { Self::of(json, "").usage() }
    }

    /// Takes in what comes next.
    pub(super) fn read(&mut self, mut piece: &[u8]) {
        loop {
            if self.in_string {
                piece = self.string(piece);
            }
            if self.passed_over > 0 {
                let Some(at) = piece.iter().position(|byte| matches!(byte, b'"' | b'{' | b'}' | b'[' | b']')) else { return };
                piece = &piece[at..];
            }
            let Some((byte, rest)) = piece.split_first() else { return };
            self.mark(*byte);
            piece = rest;
        }
    }

    /// What was used, where the engine has said any of it.
    #[must_use]
    pub(super) fn usage(&self) -> Option<Usage> {
        let [prompt, completion, cached, read, written] = self.numbers;
        prompt.or(completion)?;
        let apart = read.unwrap_or(0).saturating_add(written.unwrap_or(0));
        Some(Usage { prompt: prompt.unwrap_or(0).saturating_add(apart), completion: completion.unwrap_or(0), cached: cached.or(read) })
    }

    /// Whether the end of it has been read.
    #[must_use]
    pub(super) fn is_whole(&self) -> bool {
        self.ended
    }

    /// How far the choices are.
    #[must_use]
    pub(super) fn finish(&self) -> Finish {
        self.finish
    }

    /// The rest of a string, as far as it is here; what follows it.
    fn string<'a>(&mut self, piece: &'a [u8]) -> &'a [u8] {
        let mut from = usize::from(std::mem::take(&mut self.escaped)).min(piece.len());
        loop {
            match memchr2(b'"', b'\\', &piece[from..]).map(|at| from + at) {
                Some(at) if piece[at] == b'"' => {
                    self.keep(&piece[..at]);
                    self.in_string = false;
                    self.said();
                    return &piece[at + 1..];
                }
                Some(at) if at + 1 < piece.len() => from = at + 2,
                escape => {
                    self.escaped = escape.is_some();
                    self.keep(piece);
                    return &[];
                }
            }
        }
    }

    /// Remembers a part of a string that matters. No word that is looked for has escapes.
    fn keep(&mut self, part: &[u8]) {
        if !self.kept {
            return;
        }
        match self.word.get_mut(self.length..self.length + part.len()) {
            Some(word) => {
                word.copy_from_slice(part);
                self.length += part.len();
            }
            None => {
                self.kept = false;
                self.length = 0;
            }
        }
    }

    /// A string is whole.
    fn said(&mut self) {
        if self.passed_over > 0 {
            return;
        }
        if self.names {
            self.field = self.named();
            if let Field::Number(number) = self.field {
                self.numbers[number] = None;
            }
        } else if self.field == Field::FinishReason && self.finish != Finish::Abort {
            self.finish = if &self.word[..self.length] == b"abort" { Finish::Abort } else { Finish::Some };
        }
    }

    /// The field of the name that was just read.
    fn named(&self) -> Field {
        let word = &self.word[..self.length];
        match (self.innermost(), word) {
            (Some(Place::Root), word) if !self.inner.is_empty() && word == self.inner => Field::Inner,
            (Some(Place::Root | Place::Inner), b"usage") => Field::Usage,
            (Some(Place::Root), b"choices") => Field::Choices,
            (Some(Place::Choice), b"finish_reason") => Field::FinishReason,
            (Some(Place::Usage), b"prompt_tokens" | b"input_tokens") => Field::Number(PROMPT),
            (Some(Place::Usage), b"completion_tokens" | b"output_tokens") => Field::Number(COMPLETION),
            (Some(Place::Usage | Place::Details), b"cached_tokens") => Field::Number(CACHED),
            (Some(Place::Usage), b"cache_read_input_tokens") => Field::Number(CACHE_READ),
            (Some(Place::Usage), b"cache_creation_input_tokens") => Field::Number(CACHE_WRITTEN),
            (Some(Place::Usage), b"prompt_tokens_details" | b"input_tokens_details") => Field::Details,
            (Some(Place::Usage), b"tokens") => Field::Tokens,
            _ => Field::Other,
        }
    }

    /// A byte outside of strings.
    fn mark(&mut self, byte: u8) {
        match byte {
            b'"' => {
                self.in_string = true;
                self.kept = self.passed_over == 0 && (self.names || self.field == Field::FinishReason);
                self.length = 0;
            }
            b'{' | b'[' => self.enter(byte == b'{'),
            b'}' | b']' => self.leave(),
            _ if self.passed_over > 0 => {}
            b':' => self.names = false,
            b',' => {
                self.beyond |= self.ended;
                self.field = Field::Other;
                self.names = self.innermost().is_some_and(|place| place != Place::Choices);
            }
            b'0'..=b'9' => {
                if let Field::Number(number) = self.field {
                    let digits = self.numbers[number].unwrap_or(0);
                    self.numbers[number] = Some(digits.saturating_mul(10).saturating_add(u64::from(byte - b'0')));
                }
            }
            // Of a fraction the whole part counts; less than nothing is nothing.
            b'.' | b'e' | b'E' | b'-' => self.field = Field::Other,
            _ => {}
        }
    }

    fn enter(&mut self, is_object: bool) {
        let wanted = match (self.innermost(), self.field, is_object) {
            _ if self.passed_over > 0 || self.ended || self.depth == DEPTH => None,
            (None, _, true) => Some(Place::Root),
            (_, Field::Inner, true) => Some(Place::Inner),
            (_, Field::Choices, false) => Some(Place::Choices),
            (Some(Place::Choices), _, true) => Some(Place::Choice),
            (_, Field::Usage | Field::Tokens, true) => Some(Place::Usage),
            (_, Field::Details, true) => Some(Place::Details),
            _ => None,
        };
        self.field = Field::Other;
        match wanted {
            Some(place) => {
                self.open[self.depth] = place;
                self.depth += 1;
                self.names = place != Place::Choices;
            }
            None => self.passed_over += 1,
        }
    }

    fn leave(&mut self) {
        if self.passed_over > 0 {
            self.passed_over -= 1;
        } else {
            self.beyond |= self.ended;
            self.depth = self.depth.saturating_sub(1);
            self.ended |= self.depth == 0;
            self.field = Field::Other;
        }
    }

    fn innermost(&self) -> Option<Place> {
        self.open[..self.depth].last().copied()
    }
}

#[cfg(test)]
mod tests;
