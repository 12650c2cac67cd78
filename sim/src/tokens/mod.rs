//! The engine's own tokenizer and its text: how a prompt becomes tokens, and which token follows.
//!
//! Tokens are reversible (the bytes of a prompt come back), and the text of an answer becomes the
//! same tokens again when a client sends it back, so a conversation finds its prefix in the cache.
//! Nothing here resembles a real vocabulary. But `files` describes it as a Hugging Face tokenizer,
//! which gives the same tokens for every text; `chat` does that for messages.

mod chat;
mod detokenizer;
mod files;
mod vocabulary;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::LazyLock;

pub(crate) use chat::{ChatText, ToolUse, spaced_json};
pub(crate) use detokenizer::{Detokenizer, push_escaped};
pub(crate) use files::{tokenizer_config_json, tokenizer_json};
use vocabulary::PIECES;

const MESSAGE_START: &str = "<|im_start|>";
const MESSAGE_END: &str = "<|im_end|>";
/// Id of the first special token; below it, a byte is its own id.
const FIRST_SPECIAL: u32 = 256;
/// Special tokens. They are tokens wherever their text stands, even inside a prompt.
const SPECIALS: [&str; 2] = [MESSAGE_START, MESSAGE_END];
/// First id of the vocabulary's pieces.
const FIRST_PIECE: u32 = 1000;

static PIECE_IDS: LazyLock<HashMap<&'static [u8], u32>> =
    LazyLock::new(|| (FIRST_PIECE..).zip(PIECES).map(|(id, piece)| (piece.as_bytes(), id)).collect());

/// Tokens of `text`: one for a special token and for a word that is a piece, one for each byte of
/// any other word.
pub(crate) fn encode(text: &str) -> Vec<u32> {
    let mut tokens = Vec::with_capacity(text.len() / 3 + 1);
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        if let Some((id, special)) = special_at(rest) {
            tokens.push(id);
            rest = &rest[special.len()..];
            continue;
        }
        rest = push_word(rest, &mut tokens);
    }
    tokens
}

/// Tokens of an answer's text: none of them is special, whatever the text says.
pub(crate) fn encode_ordinary(text: &str) -> Vec<u32> {
    let (mut tokens, mut rest) = (Vec::with_capacity(text.len() / 2 + 1), text.as_bytes());
    while !rest.is_empty() {
        rest = push_word(rest, &mut tokens);
    }
    tokens
}

/// Appends the tokens of the word at the beginning of `bytes`, and returns the bytes after it.
fn push_word<'a>(bytes: &'a [u8], tokens: &mut Vec<u32>) -> &'a [u8] {
    let (word, after) = bytes.split_at(word_length(bytes));
    match PIECE_IDS.get(word) {
        Some(&id) => tokens.push(id),
        None => tokens.extend(word.iter().map(|byte| u32::from(*byte))),
    }
    after
}

/// Token that ends an answer without text.
pub(crate) fn end_token() -> u32 {
    FIRST_SPECIAL + 1
}

/// Special token at the beginning of `bytes`.
fn special_at(bytes: &[u8]) -> Option<(u32, &'static str)> {
    (FIRST_SPECIAL..).zip(SPECIALS).find(|(_, special)| bytes.starts_with(special.as_bytes()))
}

/// Text of any tokens; a number that is no token of this engine becomes U+FFFD.
pub(crate) fn decode(tokens: &[u32]) -> String {
    let mut bytes = Vec::with_capacity(tokens.len() * 4);
    for &token in tokens {
        push_bytes(token, &mut bytes);
    }
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

fn piece_index(token: u32) -> Option<usize> {
    let index = usize::try_from(token.checked_sub(FIRST_PIECE)?).ok()?;
    (index < PIECES.len()).then_some(index)
}

/// Length of the next word in bytes: a run of letters, digits and non-ASCII bytes with one space
/// before it, or else a single byte.
fn word_length(bytes: &[u8]) -> usize {
    let in_word = |byte: &u8| byte.is_ascii_alphanumeric() || !byte.is_ascii();
    let space = usize::from(bytes[0] == b' ');
    let run = bytes[space..].iter().take_while(|byte| in_word(byte)).count();
    if run == 0 { 1 } else { space + run }
}

fn push_bytes(token: u32, bytes: &mut Vec<u8>) {
    if let Ok(byte) = u8::try_from(token) {
        bytes.push(byte);
        return;
    }
    let special = (FIRST_SPECIAL..).zip(SPECIALS).find(|(id, _)| *id == token);
    let text = special.map(|(_, text)| text).or_else(|| Some(PIECES[piece_index(token)?]));
    bytes.extend_from_slice(text.unwrap_or("\u{fffd}").as_bytes());
}

/// Mixes one number into a running hash (the finalizer of splitmix64).
pub(crate) fn mix(hash: u64, value: u64) -> u64 {
    let mut mixed = hash.rotate_left(23) ^ value.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Hashes a name, for seeds and fingerprints.
pub(crate) fn hash_text(text: &str) -> u64 {
    text.bytes().fold(text.len() as u64, |hash, byte| mix(hash, u64::from(byte)))
}

/// Generator of the next token.
///
/// Like a model at temperature 0 it depends only on the tokens. So a prompt extended by the first
/// half of an answer continues with the second half.
#[derive(Clone, Debug)]
pub(crate) struct Continuation(u64);

impl Continuation {
    /// State after `prompt`. `seed` combines everything that is not in the prompt.
    pub(crate) fn after(seed: u64, prompt: &[u32]) -> Self {
        Self(prompt.iter().fold(seed, |hash, &token| mix(hash, u64::from(token))))
    }

    /// Next token, which becomes part of the state.
    pub(crate) fn next_token(&mut self) -> u32 {
        let index = self.0 % PIECES.len() as u64;
        let token = FIRST_PIECE + u32::try_from(index).expect("the vocabulary is small");
        self.0 = mix(self.0, u64::from(token));
        token
    }

    /// Picks one of `count` choices, of which there is at least one.
    pub(crate) fn pick(&mut self, count: usize) -> usize {
        self.0 = mix(self.0, count as u64);
        usize::try_from(self.0 % count as u64).expect("it is below a usize")
    }

    /// Some words of the vocabulary, with spaces between them.
    pub(crate) fn words(&mut self, count: usize) -> String {
        let tokens = std::iter::repeat_with(|| self.next_token());
        let words = tokens.filter_map(|token| PIECES[piece_index(token)?].strip_prefix(' '));
        words.take(count).collect::<Vec<_>>().join(" ")
    }
}

/// A plausible log probability of `token` and of `alternatives` others, best first.
pub(crate) fn log_probabilities(token: u32, alternatives: usize) -> Vec<(u32, f64)> {
    let mut hash = mix(0, u64::from(token));
    let mut probability = 0.0;
    (0..=alternatives)
        .map(|rank| {
            hash = mix(hash, rank as u64);
            let [.., low, _] = hash.to_be_bytes();
            probability -= 0.05 + f64::from(low) / 128.0;
            let index = hash % PIECES.len() as u64;
            let other = FIRST_PIECE + u32::try_from(index).expect("the vocabulary is small");
            (if rank == 0 { token } else { other }, probability)
        })
        .collect()
}
