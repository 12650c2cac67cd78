//! Finds any of some words in one pass over bytes.

use aho_corasick::{AhoCorasick, MatchKind};

/// Words to be found.
#[derive(Debug)]
pub(crate) struct Words(AhoCorasick);

impl Words {
    /// These, of which none is empty.
    pub(crate) fn new(words: &[&str]) -> Self {
        let automaton = AhoCorasick::builder().match_kind(MatchKind::LeftmostFirst).build(words);
        Self(automaton.expect("a few words are not too large"))
    }

    /// Where they stand, from the first on, without those that overlap one before: the index of the word, and of its first byte.
    pub(crate) fn find<'a>(&'a self, bytes: &'a [u8]) -> impl Iterator<Item = (usize, usize)> + 'a {
        self.0.find_iter(bytes).map(|found| (found.pattern().as_usize(), found.start()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_from_the_first_on() {
        let words = Words::new(&["b", "acd"]);
        assert_eq!(words.find(b"xacdbx").collect::<Vec<_>>(), [(1, 1), (0, 4)]);
        assert_eq!(words.find(b"ac").next(), None);
    }
}
