//! A text's tokens. Text between the added tokens of a tokenizer (`<|im_start|>` and its like) tokenizes independently of what is around it,
//! so the tokens of such segments are kept: of a growing chat only the new messages are encoded.
//!
//! Whether segments are independent for this tokenizer is checked when it is read; where they are not, texts are encoded whole.

mod cache;
mod split;

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokenizers::{AddedToken, Tokenizer};
use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::files::Config;
use crate::{EncodeError, FilesError};
use cache::{Cache, Key};
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
    /// `None` when the special tokens around a text are not always the same.
    around: Option<Around>,
    cache: Mutex<Cache>,
    /// Nobody outside may find two texts with the same key.
    seed: u64,
    hits: AtomicU64,
    misses: AtomicU64,
    encoded_bytes: AtomicU64,
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
            around,
            cache: Mutex::new(Cache::new(0)),
            seed: RandomState::new().hash_one("segments"),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            encoded_bytes: AtomicU64::new(0),
        };
        if !tokens.segments_are_independent() {
            tokens.splitter = None;
        }
        tokens.cache = Mutex::new(Cache::new(cache_bytes));
        tokens.misses = AtomicU64::new(0);
        tokens.encoded_bytes = AtomicU64::new(0);
        Ok(tokens)
    }

    /// The tokens of a text, with those that the tokenizer puts around every text if asked.
    pub(crate) fn encode(&self, text: &str, special_tokens: bool) -> Result<Vec<u32>, EncodeError> {
        let around = match (&self.around, special_tokens) {
            (_, false) => &Around::default(),
            (Some(around), true) => around,
            (None, true) => return self.directly(text, true),
        };
        let mut tokens = around.before.clone();
        self.text(text, &mut tokens)?;
        tokens.extend(&around.after);
        Ok(tokens)
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

    fn text(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), EncodeError> {
        let Some(splitter) = &self.splitter else {
            return self.segment(text, None, tokens);
        };
        let mut before = None;
        for piece in splitter.pieces(text) {
            match piece {
                Piece::Text(segment) => self.segment(segment, before, tokens)?,
                Piece::Added(id) => {
                    tokens.push(id);
                    before = Some(id);
                }
            }
        }
        Ok(())
    }

    /// Appends the tokens of text between added tokens. `before` is the added token in front of it, if there is one: some tokenizers treat
    /// the beginning of a text in a special way.
    fn segment(&self, segment: &str, before: Option<u32>, tokens: &mut Vec<u32>) -> Result<(), EncodeError> {
        let key = Key { hash: xxh3_128_with_seed(segment.as_bytes(), self.seed), bytes: segment.len(), first: before.is_none() };
        if let Some(known) = self.cache.lock().get(key) {
            self.hits.fetch_add(1, Ordering::Relaxed);
            tokens.extend_from_slice(&known);
            return Ok(());
        }
        let encoded = match before.zip(self.splitter.as_ref()).and_then(|(id, splitter)| Some((id, splitter.text_of(id)?))) {
            None => self.directly(segment, false)?,
            Some((id, added)) => {
                let mut encoded = self.directly(&format!("{added}{segment}"), false)?;
                if encoded.first() != Some(&id) {
                    return Err(EncodeError::Tokenizer(format!("{added:?} is not a token of its own before some text")));
                }
                encoded.remove(0);
                encoded
            }
        };
        self.misses.fetch_add(1, Ordering::Relaxed);
        self.encoded_bytes.fetch_add(segment.len() as u64, Ordering::Relaxed);
        tokens.extend_from_slice(&encoded);
        self.cache.lock().put(key, encoded.into());
        Ok(())
    }

    fn directly(&self, text: &str, special_tokens: bool) -> Result<Vec<u32>, EncodeError> {
        let encoding = self.tokenizer.encode_fast(text, special_tokens).map_err(|error| EncodeError::Tokenizer(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Encodes a few texts with many neighbours of added tokens in both ways.
    fn segments_are_independent(&self) -> bool {
        let Some(splitter) = &self.splitter else { return false };
        splitter.examples().iter().all(|text| {
            let mut segments = Vec::new();
            self.text(text, &mut segments).is_ok() && self.directly(text, false).is_ok_and(|whole| whole == segments)
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
