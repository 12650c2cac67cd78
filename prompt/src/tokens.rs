//! A text's tokens. Text between the added tokens of a tokenizer (`<|im_start|>` and its like) tokenizes independently of what is around it,
//! so the tokens of such segments are kept: of a growing chat only the new messages are encoded. Long segments are cut between words, and
//! their pieces kept likewise: so a text can be read from its beginning on, as far as anybody wants to know it.
//!
//! Whether segments and pieces are independent for this tokenizer is checked when it is read; where they are not, texts are encoded whole.

mod cache;
mod cut;
mod split;

use std::hash::{BuildHasher, RandomState};
use std::mem::discriminant;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokenizers::{AddedToken, Tokenizer};
use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::files::Config;
use crate::{EncodeError, FilesError};
use cache::{Cache, Key};
use cut::Cutter;
use split::{Piece, Splitter};

/// What an encoder did so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Segments whose tokens were in the cache.
    pub hits: u64,
    /// Segments that were encoded.
    pub misses: u64,
    /// Bytes of text that were encoded.
    pub encoded_bytes: u64,
    /// Bytes that the cache holds now.
    pub cache_bytes: usize,
}

/// A tokenizer and the cache of segments.
pub(crate) struct Tokens {
    tokenizer: Tokenizer,
    /// `None` when segments of this tokenizer are not independent.
    splitter: Option<Splitter>,
    /// `None` when pieces of its segments are not.
    cutter: Option<Cutter>,
    /// `None` when the special tokens around a text are not always the same.
    around: Option<Around>,
    cache: Mutex<Cache>,
    /// Nobody outside may find two texts with the same key.
    seed: u64,
    hits: AtomicU64,
    misses: AtomicU64,
    encoded_bytes: AtomicU64,
}

/// How far a text has been read.
#[derive(Debug, Clone, Copy)]
pub struct Progress<'a> {
    /// The tokens so far. They will not change, whatever follows.
    pub tokens: &'a [u32],
    /// The bytes of the text that they stand for.
    pub bytes: usize,
    /// Bytes of the whole text.
    pub of: usize,
}

/// Whether a text is to be read on. Asked at each place where that is possible.
pub type GoesOn<'a> = dyn FnMut(Progress<'_>) -> bool + 'a;

/// Where a piece of text stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// At the beginning.
    First,
    /// After this added token.
    After(u32),
    /// After another piece.
    Within,
}

/// Texts with gaps between words of many kinds, to see whether cuts change their tokens.
const WORDS: [&str; 3] = [
    "The quick brown fox, it's said, can't jump over  13 lazy dogs in 2024; will you (or they) have seen a U R L like a.b c\n\nand so on",
    "a b c d E F G hello world The THE the I'll we're do n't x y\tz w  q r \n s t u  v",
    "if value is None or other in self then return not found else raise Error from cause\n    pass def name of class",
];

/// A text as far as it was read.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) tokens: Vec<u32>,
    /// Bytes of the text that were read.
    pub(crate) bytes: usize,
}

/// The special tokens that a tokenizer puts around every text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Around {
    before: Vec<u32>,
    after: Vec<u32>,
}

impl Tokens {
    pub(crate) fn new(json: &[u8], config: &Config, cache_bytes: usize) -> Result<Self, FilesError> {
        let unreadable = |error: tokenizers::Error| FilesError::Tokenizer(error.to_string());
        let mut tokenizer = Tokenizer::from_bytes(json).map_err(unreadable)?;
        // Engines set both with every call, whatever the file says.
        tokenizer.with_truncation(None).map_err(unreadable)?;
        tokenizer.with_padding(None);
        declare(&mut tokenizer, config).map_err(unreadable)?;
        let around = Around::of(&tokenizer, config);
        let splitter = Splitter::new(&tokenizer);
        let mut tokens = Self {
            tokenizer,
            splitter,
            cutter: None,
            around,
            cache: Mutex::new(Cache::new(0)),
            seed: RandomState::new().hash_one("segments"),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            encoded_bytes: AtomicU64::new(0),
        };
        if !tokens.has_the_whole_s(|splitter| splitter.examples()) {
            tokens.splitter = None;
        }
        if let Some(cutter) = Cutter::new(&tokens.tokenizer) {
            tokens.cutter = Some(Cutter::finest());
            let agrees = tokens.has_the_whole_s(|_| WORDS.map(str::to_owned).into());
            tokens.cutter = agrees.then_some(cutter);
        }
        tokens.cache = Mutex::new(Cache::new(cache_bytes));
        tokens.misses = AtomicU64::new(0);
        tokens.encoded_bytes = AtomicU64::new(0);
        Ok(tokens)
    }

    /// The tokens of a text, with those that the tokenizer puts around every text if asked, or of as much of its beginning as is wanted.
    pub(crate) fn read(&self, text: &str, special_tokens: bool, goes_on: &mut GoesOn<'_>) -> Result<Read, EncodeError> {
        let around = match (&self.around, special_tokens) {
            (_, false) => &Around::default(),
            (Some(around), true) => around,
            (None, true) => return Ok(Read { tokens: self.directly(text, true)?, bytes: text.len() }),
        };
        let mut read = Read { tokens: around.before.clone(), bytes: 0 };
        self.text(text, &mut read, goes_on)?;
        if read.bytes == text.len() {
            read.tokens.extend(&around.after);
        }
        Ok(read)
    }

    /// How many of a text's tokens are put before and after it.
    pub(crate) fn around(&self) -> Option<(usize, usize)> {
        self.around.as_ref().map(|around| (around.before.len(), around.after.len()))
    }

    /// Whether this text is an added token.
    pub(crate) fn has_added(&self, text: &str) -> bool {
        self.tokenizer.get_added_vocabulary().get_vocab().contains_key(text)
    }

    pub(crate) fn stats(&self) -> Stats {
        Stats {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            encoded_bytes: self.encoded_bytes.load(Ordering::Relaxed),
            cache_bytes: self.cache.lock().bytes(),
        }
    }

    fn text(&self, text: &str, read: &mut Read, goes_on: &mut GoesOn<'_>) -> Result<(), EncodeError> {
        let Some(splitter) = &self.splitter else {
            self.piece(text, Place::First, &mut read.tokens)?;
            read.bytes = text.len();
            return Ok(());
        };
        let cutter = self.cutter.unwrap_or_else(Cutter::whole);
        let mut place = Place::First;
        for piece in splitter.pieces(text) {
            match piece {
                Piece::Text(segment) => {
                    for piece in cutter.pieces(segment) {
                        // Not to read so little would save nothing, and the tokens would not be counted.
                        let can_stop = read.bytes > 0 && text.len() - read.bytes > cut::FIRST;
                        if can_stop && !goes_on(Progress { tokens: &read.tokens, bytes: read.bytes, of: text.len() }) {
                            return Ok(());
                        }
                        self.piece(piece, place, &mut read.tokens)?;
                        place = Place::Within;
                        read.bytes += piece.len();
                    }
                }
                Piece::Added(id) => {
                    read.tokens.push(id);
                    read.bytes += splitter.text_of(id).map_or(0, str::len);
                    place = Place::After(id);
                }
            }
        }
        Ok(())
    }

    /// Appends the tokens of text between added tokens, or of a piece of it.
    fn piece(&self, text: &str, place: Place, tokens: &mut Vec<u32>) -> Result<(), EncodeError> {
        let key = Key { hash: xxh3_128_with_seed(text.as_bytes(), self.seed), bytes: text.len(), place: discriminant(&place) };
        if let Some(known) = self.cache.lock().get(key) {
            self.hits.fetch_add(1, Ordering::Relaxed);
            tokens.extend_from_slice(&known);
            return Ok(());
        }
        let encoded = match self.before(place) {
            None => self.directly(text, false)?,
            // Some tokenizers treat the beginning of a text in a special way.
            Some((id, added)) => {
                let mut encoded = self.directly(&format!("{added}{text}"), false)?;
                if encoded.first() != Some(&id) {
                    return Err(EncodeError::Tokenizer(format!("{added:?} is not a token of its own before some text")));
                }
                encoded.remove(0);
                encoded
            }
        };
        self.misses.fetch_add(1, Ordering::Relaxed);
        self.encoded_bytes.fetch_add(text.len() as u64, Ordering::Relaxed);
        tokens.extend_from_slice(&encoded);
        self.cache.lock().put(key, encoded.into());
        Ok(())
    }

    /// The added token in front of a piece.
    fn before(&self, place: Place) -> Option<(u32, &str)> {
        let Place::After(id) = place else { return None };
        Some((id, self.splitter.as_ref()?.text_of(id)?))
    }

    fn directly(&self, text: &str, special_tokens: bool) -> Result<Vec<u32>, EncodeError> {
        let encoding = self.tokenizer.encode_fast(text, special_tokens).map_err(|error| EncodeError::Tokenizer(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Whether a few texts have the same tokens by segments and pieces as they have whole.
    fn has_the_whole_s(&self, texts: impl FnOnce(&Splitter) -> Vec<String>) -> bool {
        let Some(splitter) = &self.splitter else { return false };
        texts(splitter).iter().all(|text| {
            let mut read = Read { tokens: Vec::new(), bytes: 0 };
            self.text(text, &mut read, &mut |_| true).is_ok() && self.directly(text, false).is_ok_and(|whole| whole == read.tokens)
        })
    }
}

impl Around {
    /// From the config's words if it has any, which engines let win over the file; from two texts with and without special tokens otherwise.
    fn of(tokenizer: &Tokenizer, config: &Config) -> Option<Self> {
        let switches = ["bos_token", "eos_token"].map(|name| (name, config.switch(&format!("add_{name}"))));
        if switches.iter().any(|(_, switch)| switch.is_some()) {
            let [before, after] = switches.map(|(name, switch)| {
                let token = config.special_token(name).filter(|_| switch == Some(true));
                token.and_then(|token| tokenizer.token_to_id(token)).into_iter().collect()
            });
            return Some(Self { before, after });
        }
        let found = Self::seen(tokenizer, "a b")?;
        (Self::seen(tokenizer, "Two words\n") == Some(found.clone())).then_some(found)
    }

    fn seen(tokenizer: &Tokenizer, text: &str) -> Option<Self> {
        let [bare, whole] = [false, true].map(|special| tokenizer.encode_fast(text, special).ok());
        let (bare, whole) = (bare?, whole?);
        let (bare, whole) = (bare.get_ids(), whole.get_ids());
        let start = (0..=whole.len().checked_sub(bare.len())?).find(|start| whole[*start..].starts_with(bare))?;
        Some(Self { before: whole[..start].to_vec(), after: whole[start + bare.len()..].to_vec() })
    }
}

/// Adds the tokens that only the config knows, as the library does that engines load tokenizers with.
fn declare(tokenizer: &mut Tokenizer, config: &Config) -> tokenizers::Result<()> {
    let mut missing = Vec::new();
    for declared in config.declared_tokens() {
        let token = AddedToken {
            content: declared.content,
            single_word: declared.single_word,
            lstrip: declared.lstrip,
            rstrip: declared.rstrip,
            normalized: declared.normalized,
            special: declared.special,
        };
        let known = tokenizer.get_added_vocabulary().get_added_tokens_decoder().values().any(|known| {
            (&known.content, known.lstrip, known.rstrip, known.single_word, known.normalized)
                == (&token.content, token.lstrip, token.rstrip, token.single_word, token.normalized)
        });
        if !known {
            missing.push(token);
        }
    }
    for text in config.special_tokens.values().filter_map(serde_json::Value::as_str) {
        let known = tokenizer.get_added_vocabulary().get_vocab().contains_key(text) || missing.iter().any(|token| token.content == text);
        if !known && tokenizer.token_to_id(text).is_some() {
            missing.push(AddedToken::from(text, true));
        }
    }
    tokenizer.add_tokens(missing)?;
    Ok(())
}

#[cfg(test)]
mod tests;
