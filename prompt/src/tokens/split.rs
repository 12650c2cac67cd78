//! Where the added tokens of a tokenizer are in a text: the same search that the tokenizer does first, leftmost and then longest, without
//! the bookkeeping of offsets that makes it slow.

use rustc_hash::FxHashMap;
use tokenizers::Tokenizer;

/// A piece of a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece<'t> {
    /// Text without added tokens; never empty.
    Text(&'t str),
    /// An added token.
    Added(u32),
}

/// Finds added tokens.
#[derive(Debug)]
pub(super) struct Splitter {
    /// A tree of bytes: the node that a byte leads to from a node. The root is 0.
    steps: FxHashMap<(u32, u8), u32>,
    /// The token that ends at a node.
    ends: FxHashMap<u32, u32>,
    /// The bytes that a token can begin with; almost no byte of a text is one.
    begins: [bool; 256],
    texts: FxHashMap<u32, String>,
}

impl Splitter {
    /// `None` when an added token takes white space beside it or stands for whole words only: then where a segment ends depends on more.
    pub(super) fn new(tokenizer: &Tokenizer) -> Option<Self> {
        let mut splitter =
            Self { steps: FxHashMap::default(), ends: FxHashMap::default(), begins: [false; 256], texts: FxHashMap::default() };
        let mut nodes = 0;
        for (id, token) in tokenizer.get_added_vocabulary().get_added_tokens_decoder() {
            if token.lstrip || token.rstrip || token.single_word {
                return None;
            }
            // Tokens that are matched after normalization are found by the tokenizer, within a segment.
            if token.normalized || token.content.is_empty() {
                continue;
            }
            let mut node = 0;
            for byte in token.content.bytes() {
                node = *splitter.steps.entry((node, byte)).or_insert_with(|| {
                    nodes += 1;
                    nodes
                });
            }
            splitter.ends.insert(node, *id);
            splitter.begins[usize::from(token.content.as_bytes()[0])] = true;
            splitter.texts.insert(*id, token.content.clone());
        }
        Some(splitter)
    }

    /// The text of an added token.
    pub(super) fn text_of(&self, id: u32) -> Option<&str> {
        self.texts.get(&id).map(String::as_str)
    }

    /// The pieces of a text, in order.
    pub(super) fn pieces<'t>(&self, text: &'t str) -> Vec<Piece<'t>> {
        let bytes = text.as_bytes();
        let mut pieces = Vec::new();
        let (mut segment, mut position) = (0, 0);
        while position < bytes.len() {
            let found = if self.begins[usize::from(bytes[position])] { self.longest(&bytes[position..]) } else { None };
            let Some((id, length)) = found else {
                position += 1;
                continue;
            };
            if segment < position {
                pieces.push(Piece::Text(&text[segment..position]));
            }
            pieces.push(Piece::Added(id));
            position += length;
            segment = position;
        }
        if segment < bytes.len() {
            pieces.push(Piece::Text(&text[segment..]));
        }
        pieces
    }

    /// The longest token that these bytes begin with, and its length.
    fn longest(&self, bytes: &[u8]) -> Option<(u32, usize)> {
        let mut node = 0;
        let mut longest = None;
        for (position, byte) in bytes.iter().enumerate() {
            let Some(next) = self.steps.get(&(node, *byte)) else { break };
            node = *next;
            if let Some(id) = self.ends.get(&node) {
                longest = Some((*id, position + 1));
            }
        }
        longest
    }

    /// Texts in which added tokens have neighbours of every kind.
    pub(super) fn examples(&self) -> Vec<String> {
        let mut ids: Vec<u32> = self.texts.keys().copied().collect();
        ids.sort_unstable();
        let some = ids.iter().take(12).chain(ids.iter().rev().take(12)).filter_map(|id| self.text_of(*id));
        let mut examples: Vec<String> = some
            .map(|token| format!("Hello {token} world{token}\n\nand  {token}{token}é 12{token}'s\n{token}\tcode()\n {token} "))
            .collect();
        examples.push("No added token,\n only  text. ".to_owned());
        examples
    }
}

#[cfg(test)]
mod tests;
