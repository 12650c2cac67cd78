//! Tests of the search for added tokens.

use proptest::prelude::*;

use super::*;
use crate::fixture;

fn splitter(tokens: &[&str]) -> Splitter {
    let mut tokenizer = fixture::byte_level();
    tokenizer["added_tokens"] = tokens.iter().enumerate().map(|(number, text)| fixture::added_token(1000 + number, text)).collect();
    Splitter::new(&Tokenizer::from_bytes(tokenizer.to_string()).unwrap()).unwrap()
}

fn id(splitter: &Splitter, text: &str) -> u32 {
    *splitter.texts.iter().find(|(_, known)| *known == text).unwrap().0
}

#[test]
fn the_leftmost_and_then_the_longest_token_is_found() {
    let splitter = splitter(&["<a>", "<a><b>", "b>c"]);
    let [short, long, other] = ["<a>", "<a><b>", "b>c"].map(|text| id(&splitter, text));
    assert_eq!(splitter.pieces("<a><b>c"), [Piece::Added(long), Piece::Text("c")]);
    assert_eq!(splitter.pieces("x<a><c"), [Piece::Text("x"), Piece::Added(short), Piece::Text("<c")]);
    assert_eq!(splitter.pieces("<b>c<a>"), [Piece::Text("<"), Piece::Added(other), Piece::Added(short)]);
    assert_eq!(splitter.pieces(""), []);
}

#[test]
fn a_token_that_takes_white_space_makes_segments_dependent() {
    for flag in ["lstrip", "rstrip", "single_word"] {
        let mut tokenizer = fixture::byte_level();
        tokenizer["added_tokens"][1][flag] = true.into();
        assert!(Splitter::new(&Tokenizer::from_bytes(tokenizer.to_string()).unwrap()).is_none(), "{flag}");
    }
}

proptest! {
    #[test]
    fn pieces_are_the_text(text in "([ab<>é]|<a>|<a><b>){0,30}") {
        let splitter = splitter(&["<a>", "<a><b>", "é<"]);
        let joined: String = splitter.pieces(&text).iter().map(|piece| match piece {
            Piece::Text(segment) => segment,
            Piece::Added(id) => splitter.text_of(*id).unwrap(),
        }).collect();
        prop_assert_eq!(joined, text);
    }
}
