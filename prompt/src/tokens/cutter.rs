//! Cuts in a long segment, so that its beginning can be read without the rest, and texts with the
//! same beginning share its pieces.
//!
//! A cut is made between two words, where a letter, a space and a letter follow each other.
//! Tokenizers either split texts there before they look for tokens, or have no token that spans the
//! cut. Then no merge spans it, and the pieces have the tokens of the whole. Whether a tokenizer
//! satisfies this is checked in its vocabulary, and tried with a few texts.

use memchr::memchr_iter;
use rustc_hash::FxHashSet;
use tokenizers::Tokenizer;

/// Least bytes of the first piece: about 64 tokens, which is four blocks of most engines.
pub(super) const FIRST_PIECE_BYTES: usize = 256;

/// Bytes of the longest pieces, apart from the rest up to the next gap between words.
///
/// An uncached piece costs 0.2 ms to read.
const MAX_PIECE_BYTES: usize = 1024;

/// Cutter of segments at places that depend only on the segment before them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cutter {
    first: usize,
    longest: usize,
}

impl Cutter {
    /// Creates a cutter; `None` if a token that occurs within segments spans a gap between words.
    pub(super) fn new(tokenizer: &Tokenizer) -> Option<Self> {
        let vocabulary = tokenizer.get_vocab(false);
        // Segments end at added tokens, whatever these contain, except those that are matched after
        // normalization.
        let added = tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        let ends: FxHashSet<&str> = added.values().filter(|token| !token.normalized).map(|token| token.content.as_str()).collect();
        let within = added.values().filter(|token| token.normalized).map(|token| token.content.as_str());
        let mut within = within.chain(vocabulary.keys().map(String::as_str).filter(|token| !ends.contains(token)));
        (!within.any(spans_word_gap)).then_some(Self { first: FIRST_PIECE_BYTES, longest: MAX_PIECE_BYTES })
    }

    /// Creates a cutter that never cuts.
    pub(super) fn whole() -> Self {
        Self { first: usize::MAX, longest: usize::MAX }
    }

    /// Creates a cutter that cuts at every possible place, for tests of the tokenizer.
    pub(super) fn finest() -> Self {
        Self { first: 1, longest: 1 }
    }

    /// Pieces of a segment, in order: of at least 256 bytes, then 512, then always 1,024.
    ///
    /// Together they are the segment; an empty segment has none.
    pub(super) fn pieces(self, segment: &str) -> impl Iterator<Item = &str> {
        let (mut rest, mut least) = (segment, self.first);
        std::iter::from_fn(move || {
            let (piece, after) = rest.split_at(find_cut(rest, least).unwrap_or(rest.len()));
            rest = after;
            least = least.saturating_mul(2).min(self.longest);
            (!piece.is_empty()).then_some(piece)
        })
    }
}

/// First place to cut with at least this many bytes before it.
fn find_cut(text: &str, least: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    let is_letter = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_alphabetic);
    let from = least.max(1);
    memchr_iter(b' ', bytes.get(from..)?).map(|at| from + at).find(|at| is_letter(at - 1) && is_letter(at + 1))
}

/// Whether a token of the vocabulary has a space after a letter.
///
/// Byte-level vocabularies write it as `Ġ`, those of `SentencePiece` as `▁`.
fn spans_word_gap(token: &str) -> bool {
    let mut chars = token.chars().peekable();
    while let Some(char) = chars.next() {
        if char.is_ascii_alphabetic() && matches!(chars.peek(), Some(' ' | 'Ġ' | '▁')) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests;
