//! Converts generated tokens to text, escaped for a JSON string, as they arrive.
//!
//! The writers of all answers call it. Most generated tokens are pieces, so each piece has its
//! escaped text ready.

use std::sync::LazyLock;

use super::piece_index;
use super::vocabulary::PIECES;

/// Pieces in the form that they have inside a JSON string.
static ESCAPED: LazyLock<Vec<String>> = LazyLock::new(|| PIECES.iter().map(|piece| escaped(piece)).collect());

/// Converter for the text of one answer. Special tokens have no text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Detokenizer {
    /// Bytes of an incomplete character.
    held: Vec<u8>,
}

impl Detokenizer {
    /// Appends the text that the next tokens add to the answer.
    pub(crate) fn push_escaped(&mut self, tokens: &[u32], json: &mut Vec<u8>) {
        for &token in tokens {
            if let Some(index) = piece_index(token) {
                json.extend_from_slice(ESCAPED[index].as_bytes());
            } else if let Ok(byte) = u8::try_from(token) {
                self.push_byte(byte, json);
            }
        }
    }

    /// Adds a byte.
    ///
    /// Only answers made of whole texts have bytes, so the following bytes complete each character.
    fn push_byte(&mut self, byte: u8, json: &mut Vec<u8>) {
        self.held.push(byte);
        if let Ok(text) = std::str::from_utf8(&self.held) {
            json.extend_from_slice(escaped(text).as_bytes());
            self.held.clear();
        }
    }
}

/// Appends the text of a whole answer.
pub(crate) fn push_escaped(tokens: &[u32], json: &mut Vec<u8>) {
    Detokenizer::default().push_escaped(tokens, json);
}

fn escaped(text: &str) -> String {
    let quoted = serde_json::to_string(text).expect("a string is always valid JSON");
    quoted[1..quoted.len() - 1].to_owned()
}
