//! Words of prompts: short English ones, each a single token in the vocabularies of today's large
//! models, so the number of words is about the number of tokens.
//!
//! With its space a word has about four bytes, like tokens of real text.

use std::sync::Arc;

use super::draw::{Draw, mix};

/// Mean bytes of a word in [`WORDS`] with its space.
pub(super) const BYTES_PER_TOKEN: usize = 4;

/// Words at the beginning of a unique prompt that encode its number, so that no two prompts begin
/// alike.
///
/// Four words distinguish 2^32 prompts, and are fewer than the 16 tokens of the smallest block that
/// engines cache.
const NUMBER_WORDS: u32 = 4;

/// Appends this many words, each followed by a space.
pub(super) fn write(text: &mut String, draw: &mut Draw, tokens: u32) {
    let mut left = tokens as usize;
    while left > 0 {
        for byte in draw.bytes().into_iter().take(left) {
            push(text, byte);
        }
        left = left.saturating_sub(8);
    }
}

/// A unique prompt, at least [`NUMBER_WORDS`] long.
pub(super) fn own(seed: u64, number: u64, draw: &mut Draw, tokens: u32) -> Arc<str> {
    let mut text = String::with_capacity(tokens.max(NUMBER_WORDS) as usize * (BYTES_PER_TOKEN + 1));
    // Each seed has another order, so loads with different words do not share even these.
    let number = number ^ mix(seed);
    for byte in number.to_le_bytes().into_iter().take(NUMBER_WORDS as usize) {
        push(&mut text, byte);
    }
    write(&mut text, draw, tokens.saturating_sub(NUMBER_WORDS));
    text.pop();
    text.into()
}

fn push(text: &mut String, word: u8) {
    text.push_str(WORDS[usize::from(word)]);
    text.push(' ');
}

/// Words, one for each value of a byte.
#[rustfmt::skip]
pub(super) const WORDS: [&str; 256] = [
    "act", "add", "age", "ago", "aid", "aim", "air", "all", "also", "am", "an", "and", "any", "are", "area", "army", "art", "as", "ask",
    "at", "away", "baby", "back", "bad", "bag", "ball", "band", "bank", "bar", "base", "be", "bear", "beat", "bed", "big", "bill", "bird",
    "bit", "blue", "boat", "body", "book", "born", "both", "box", "bus", "but", "buy", "by", "call", "calm", "came", "can", "car", "card",
    "care", "case", "cash", "cast", "cat", "cell", "chat", "chip", "city", "club", "coal", "coat", "code", "cold", "come", "cook", "cool",
    "copy", "cost", "crew", "crop", "cup", "cut", "dark", "data", "date", "day", "deal", "dean", "deep", "deny", "desk", "did", "diet",
    "disk", "do", "dog", "door", "down", "draw", "drop", "dry", "dual", "due", "duty", "each", "ear", "earn", "east", "easy", "eat",
    "edge", "egg", "else", "end", "even", "ever", "eye", "face", "fact", "fair", "fall", "far", "farm", "fast", "fate", "fear", "feed",
    "feel", "few", "file", "fill", "film", "find", "fine", "fire", "firm", "fish", "fit", "five", "flat", "flow", "fly", "food", "foot",
    "for", "form", "four", "free", "from", "fuel", "fun", "gap", "get", "go", "guy", "had", "has", "he", "her", "him", "his", "hit",
    "hot", "how", "ice", "if", "in", "is", "it", "its", "job", "key", "kid", "law", "lay", "led", "leg", "let", "lie", "lot", "low",
    "man", "map", "may", "me", "men", "met", "mix", "my", "net", "new", "no", "nor", "not", "now", "odd", "of", "off", "oil", "old", "on",
    "one", "or", "our", "out", "own", "pay", "per", "pin", "pop", "pot", "put", "raw", "red", "rid", "row", "run", "sat", "saw", "say",
    "sea", "see", "set", "she", "sir", "sit", "six", "sky", "so", "son", "sun", "tax", "tea", "ten", "the", "tie", "tip", "to", "too",
    "top", "toy", "try", "two", "up", "us", "use", "van", "via", "was", "way", "we", "web", "wet", "who", "why", "win", "won", "yes",
    "yet", "you",
];
