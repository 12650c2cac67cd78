//! Search for the added tokens of a tokenizer in a text.
//!
//! It is the search that the tokenizer does first, leftmost and then longest, without the
//! bookkeeping of offsets that makes it slow.

use aho_corasick::{AhoCorasick, FindIter, MatchKind};
use tokenizers::Tokenizer;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece<'t> {
    /// Text without added tokens; never empty.
    Text(&'t str),
    Added(u32),
}

/// Finder of added tokens.
#[derive(Debug)]
pub(super) struct Splitter {
    search: AhoCorasick,
    /// Ids and texts, in the order of the search patterns.
    tokens: Vec<(u32, String)>,
}

pub(super) struct Pieces<'s, 't> {
    tokens: &'s [(u32, String)],
    found: FindIter<'s, 't>,
    text: &'t str,
    /// Offset of the text that was not yielded yet.
    from: usize,
    /// Added token after the text that was yielded.
    next: Option<u32>,
}

impl Splitter {
    /// Creates a splitter.
    ///
    /// `None` if an added token takes white space beside it or stands for whole words only: then a
    /// segment's end depends on more.
    pub(super) fn new(tokenizer: &Tokenizer) -> Option<Self> {
        let mut tokens: Vec<(u32, String)> = Vec::new();
        for (id, token) in tokenizer.get_added_vocabulary().get_added_tokens_decoder() {
            if token.lstrip || token.rstrip || token.single_word {
                return None;
            }
            // The tokenizer itself finds tokens that are matched after normalization, within a
            // segment.
            if !token.normalized && !token.content.is_empty() {
                tokens.push((*id, token.content.clone()));
            }
        }
        tokens.sort_unstable();
        let search = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(tokens.iter().map(|(_, text)| text)).ok()?;
        Some(Self { search, tokens })
    }

    pub(super) fn text_of(&self, id: u32) -> Option<&str> {
        let place = self.tokens.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        Some(&self.tokens[place].1)
    }

    /// Pieces of a text, in order, found lazily.
    pub(super) fn pieces<'s, 't>(&'s self, text: &'t str) -> Pieces<'s, 't> {
        Pieces { tokens: &self.tokens, found: self.search.find_iter(text), text, from: 0, next: None }
    }

    /// Texts in which added tokens have neighbours of every kind.
    pub(super) fn examples(&self) -> Vec<String> {
        let some = self.tokens.iter().take(12).chain(self.tokens.iter().rev().take(12));
        let mut examples: Vec<String> = some
            .map(|(_, token)| format!("Hello {token} world{token}\n\nand  {token}{token}é 12{token}'s\n{token}\tcode()\n {token} "))
            .collect();
        examples.push("No added token,\n only  text. ".to_owned());
        examples
    }
}

impl<'t> Iterator for Pieces<'_, 't> {
    type Item = Piece<'t>;

    fn next(&mut self) -> Option<Piece<'t>> {
        if let Some(id) = self.next.take() {
            return Some(Piece::Added(id));
        }
        let (text, after, id) = match self.found.next() {
            Some(found) => (&self.text[self.from..found.start()], found.end(), Some(self.tokens[found.pattern().as_usize()].0)),
            None => (&self.text[self.from..], self.text.len(), None),
        };
        self.from = after;
        if text.is_empty() {
            return id.map(Piece::Added);
        }
        self.next = id;
        Some(Piece::Text(text))
    }
}

#[cfg(test)]
mod tests;
