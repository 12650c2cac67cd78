//! Generated tokens as text, escaped for a JSON string, as they come: the writers of all answers call it. Pieces are most of what
//! is generated, so each has its escaped text ready.

use std::sync::LazyLock;

use super::piece_index;
use super::vocabulary::PIECES;

/// The pieces as they stand inside a JSON string.
static ESCAPED: LazyLock<Vec<String>> = LazyLock::new(|| PIECES.iter().map(|piece| escaped(piece)).collect());

/// The text of one answer. Special tokens have none.
#[derive(Clone, Debug, Default)]
pub(crate) struct Detokenizer {
    /// Bytes of a character of which more is to come.
    held: Vec<u8>,
}

impl Detokenizer {
    /// Appends what the next tokens of the answer add to its text.
    pub(crate) fn push_escaped(&mut self, tokens: &[u32], json: &mut Vec<u8>) {
        for &token in tokens {
            if let Some(index) = piece_index(token) {
                json.extend_from_slice(ESCAPED[index].as_bytes());
            } else if let Ok(byte) = u8::try_from(token) {
                self.push_byte(byte, json);
            }
        }
    }

    /// Only an answer that is made of whole texts has bytes, so each character is completed by those that follow.
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
