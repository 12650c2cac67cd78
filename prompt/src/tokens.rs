//! Tokens of a text.
//!
//! Text between the added tokens of a tokenizer (such as `<|im_start|>`) tokenizes independently of
//! its surroundings, so the tokens of such segments are kept: a growing chat needs only its new
//! messages encoded. Long segments are cut between words, and their pieces are kept, too. So a text
//! can be read from its beginning on, as far as anybody wants to know it.
//!
//! Whether segments and pieces are independent for this tokenizer is checked when it is read. If
//! they are not, texts are encoded whole.

mod cache;
mod cutter;
mod splitter;

use std::hash::{BuildHasher, RandomState};
use std::mem::discriminant;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokenizers::{AddedToken, Tokenizer};
use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::files::TokenizerConfig;
use crate::{EncodeError, FilesError};
use cache::{SegmentCache, SegmentKey};
use cutter::Cutter;
use splitter::{Piece, Splitter};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EncoderStats {
    pub hits: u64,
    /// Segments that had to be encoded.
    pub misses: u64,
    pub encoded_bytes: u64,
    pub cache_bytes: usize,
}

pub(crate) struct SegmentTokenizer {
    tokenizer: Tokenizer,
    /// Splitter; `None` if segments of this tokenizer are not independent.
    splitter: Option<Splitter>,
    /// Cutter; `None` if pieces of its segments are not independent.
    cutter: Option<Cutter>,
    /// Special tokens around a text; `None` if they vary.
    surrounding: Option<SurroundingTokens>,
    cache: Mutex<SegmentCache>,
    /// Random seed, so that nobody outside can construct two texts with the same key.
    seed: u64,
    hits: AtomicU64,
    misses: AtomicU64,
    encoded_bytes: AtomicU64,
}

/// How far a text has been read.
#[derive(Debug, Clone, Copy)]
pub struct Progress<'a> {
    /// Tokens so far; the following text does not change them.
    pub tokens: &'a [u32],
    /// Bytes of the text that these tokens stand for.
    pub bytes: usize,
    /// Bytes of the whole text.
    pub total_bytes: usize,
}

/// Callback that decides whether to read on, called at each place where reading can stop.
pub type ContinueReading<'a> = dyn FnMut(Progress<'_>) -> bool + 'a;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PiecePosition {
    /// At the beginning of the text.
    First,
    /// After this added token.
    After(u32),
    /// After another piece of the same segment.
    Within,
}

/// Texts with many kinds of gaps between words, to test whether cuts change their tokens.
const SAMPLE_TEXTS: [&str; 3] = [
    "The quick brown fox, it's said, can't jump over  13 lazy dogs in 2024; will you (or they) have seen a U R L like a.b c\n\nand so on",
    "a b c d E F G hello world The THE the I'll we're do n't x y\tz w  q r \n s t u  v",
    "if value is None or other in self then return not found else raise Error from cause\n    pass def name of class",
];

/// A text, as far as it was read.
#[derive(Debug)]
pub(crate) struct ReadText {
    pub(crate) tokens: Vec<u32>,
    /// Bytes of the text that were read.
    pub(crate) bytes: usize,
}

/// Special tokens that a tokenizer puts around every text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct SurroundingTokens {
    before: Vec<u32>,
    after: Vec<u32>,
}

impl SegmentTokenizer {
    pub(crate) fn new(json: &[u8], config: &TokenizerConfig, cache_bytes: usize) -> Result<Self, FilesError> {
        let unreadable = |error: tokenizers::Error| FilesError::Tokenizer(error.to_string());
        let mut tokenizer = Tokenizer::from_bytes(json).map_err(unreadable)?;
        // Engines set both with every call, whatever the file says.
        tokenizer.with_truncation(None).map_err(unreadable)?;
        tokenizer.with_padding(None);
        add_declared_tokens(&mut tokenizer, config).map_err(unreadable)?;
        let around = SurroundingTokens::detect(&tokenizer, config);
        let splitter = Splitter::new(&tokenizer);
        let mut tokens = Self {
            tokenizer,
            splitter,
            cutter: None,
            surrounding: around,
            cache: Mutex::new(SegmentCache::new(0)),
            seed: RandomState::new().hash_one("segments"),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            encoded_bytes: AtomicU64::new(0),
        };
        if !tokens.matches_whole_text(|splitter| splitter.examples()) {
            tokens.splitter = None;
        }
        if let Some(cutter) = Cutter::new(&tokens.tokenizer) {
            tokens.cutter = Some(Cutter::finest());
            let agrees = tokens.matches_whole_text(|_| SAMPLE_TEXTS.map(str::to_owned).into());
            tokens.cutter = agrees.then_some(cutter);
        }
        tokens.cache = Mutex::new(SegmentCache::new(cache_bytes));
        tokens.misses = AtomicU64::new(0);
        tokens.encoded_bytes = AtomicU64::new(0);
        Ok(tokens)
    }

    /// Tokens of a text, or of the needed part of its beginning.
    ///
    /// With `special_tokens`, the tokenizer's surrounding tokens are included.
    pub(crate) fn read_text(&self, text: &str, special_tokens: bool, goes_on: &mut ContinueReading<'_>) -> Result<ReadText, EncodeError> {
        let around = match (&self.surrounding, special_tokens) {
            (_, false) => &SurroundingTokens::default(),
            (Some(around), true) => around,
            (None, true) => return Ok(ReadText { tokens: self.encode_whole(text, true)?, bytes: text.len() }),
        };
        let mut read = ReadText { tokens: around.before.clone(), bytes: 0 };
        self.append_text(text, &mut read, goes_on)?;
        if read.bytes == text.len() {
            read.tokens.extend(&around.after);
        }
        Ok(read)
    }

    /// Numbers of tokens that the tokenizer puts before and after a text.
    pub(crate) fn surrounding_counts(&self) -> Option<(usize, usize)> {
        self.surrounding.as_ref().map(|around| (around.before.len(), around.after.len()))
    }

    pub(crate) fn has_added_token(&self, text: &str) -> bool {
        self.tokenizer.get_added_vocabulary().get_vocab().contains_key(text)
    }

    pub(crate) fn stats(&self) -> EncoderStats {
        EncoderStats {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            encoded_bytes: self.encoded_bytes.load(Ordering::Relaxed),
            cache_bytes: self.cache.lock().bytes(),
        }
    }

    fn append_text(&self, text: &str, read: &mut ReadText, goes_on: &mut ContinueReading<'_>) -> Result<(), EncodeError> {
        let Some(splitter) = &self.splitter else {
            self.append_piece(text, PiecePosition::First, &mut read.tokens)?;
            read.bytes = text.len();
            return Ok(());
        };
        let cutter = self.cutter.unwrap_or_else(Cutter::whole);
        let mut place = PiecePosition::First;
        for piece in splitter.pieces(text) {
            match piece {
                Piece::Text(segment) => {
                    for piece in cutter.pieces(segment) {
                        // Stopping so close to the end would save nothing, and the rest would not
                        // be counted.
                        let can_stop = read.bytes > 0 && text.len() - read.bytes > cutter::FIRST_PIECE_BYTES;
                        if can_stop && !goes_on(Progress { tokens: &read.tokens, bytes: read.bytes, total_bytes: text.len() }) {
                            return Ok(());
                        }
                        self.append_piece(piece, place, &mut read.tokens)?;
                        place = PiecePosition::Within;
                        read.bytes += piece.len();
                    }
                }
                Piece::Added(id) => {
                    read.tokens.push(id);
                    read.bytes += splitter.text_of(id).map_or(0, str::len);
                    place = PiecePosition::After(id);
                }
            }
        }
        Ok(())
    }

    /// Appends the tokens of a piece of text between added tokens.
    fn append_piece(&self, text: &str, place: PiecePosition, tokens: &mut Vec<u32>) -> Result<(), EncodeError> {
        let key = SegmentKey { hash: xxh3_128_with_seed(text.as_bytes(), self.seed), bytes: text.len(), position: discriminant(&place) };
        if let Some(known) = self.cache.lock().get(key) {
            self.hits.fetch_add(1, Ordering::Relaxed);
            tokens.extend_from_slice(&known);
            return Ok(());
        }
        let encoded = match self.added_token_before(place) {
            None => self.encode_whole(text, false)?,
            // Some tokenizers treat the beginning of a text specially.
            Some((id, added)) => {
                let mut encoded = self.encode_whole(&format!("{added}{text}"), false)?;
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

    fn added_token_before(&self, place: PiecePosition) -> Option<(u32, &str)> {
        let PiecePosition::After(id) = place else { return None };
        Some((id, self.splitter.as_ref()?.text_of(id)?))
    }

    fn encode_whole(&self, text: &str, special_tokens: bool) -> Result<Vec<u32>, EncodeError> {
        let encoding = self.tokenizer.encode_fast(text, special_tokens).map_err(|error| EncodeError::Tokenizer(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Whether a few texts have the same tokens in segments and pieces as whole.
    fn matches_whole_text(&self, texts: impl FnOnce(&Splitter) -> Vec<String>) -> bool {
        let Some(splitter) = &self.splitter else { return false };
        texts(splitter).iter().all(|text| {
            let mut read = ReadText { tokens: Vec::new(), bytes: 0 };
            self.append_text(text, &mut read, &mut |_| true).is_ok()
                && self.encode_whole(text, false).is_ok_and(|whole| whole == read.tokens)
        })
    }
}

impl SurroundingTokens {
    /// Detects the special tokens around a text.
    ///
    /// The config decides, which engines prefer to the file, if it mentions them. Otherwise two
    /// texts with and without special tokens are compared.
    fn detect(tokenizer: &Tokenizer, config: &TokenizerConfig) -> Option<Self> {
        let switches = ["bos_token", "eos_token"].map(|name| (name, config.flag(&format!("add_{name}"))));
        if switches.iter().any(|(_, switch)| switch.is_some()) {
            let [before, after] = switches.map(|(name, switch)| {
                let token = config.special_token(name).filter(|_| switch == Some(true));
                token.and_then(|token| tokenizer.token_to_id(token)).into_iter().collect()
            });
            return Some(Self { before, after });
        }
        let found = Self::detect_from_text(tokenizer, "a b")?;
        (Self::detect_from_text(tokenizer, "Two words\n") == Some(found.clone())).then_some(found)
    }

    fn detect_from_text(tokenizer: &Tokenizer, text: &str) -> Option<Self> {
        let [bare, whole] = [false, true].map(|special| tokenizer.encode_fast(text, special).ok());
        let (bare, whole) = (bare?, whole?);
        let (bare, whole) = (bare.get_ids(), whole.get_ids());
        let start = (0..=whole.len().checked_sub(bare.len())?).find(|start| whole[*start..].starts_with(bare))?;
        Some(Self { before: whole[..start].to_vec(), after: whole[start + bare.len()..].to_vec() })
    }
}

/// Adds the tokens that only the config declares, like the library that engines use.
fn add_declared_tokens(tokenizer: &mut Tokenizer, config: &TokenizerConfig) -> tokenizers::Result<()> {
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
