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
    splitter.tokens.iter().find(|(_, known)| *known == text).unwrap().0
}

fn pieces<'t>(splitter: &Splitter, text: &'t str) -> Vec<Piece<'t>> {
    splitter.pieces(text).collect()
}

#[test]
fn the_leftmost_longest_added_token_is_found() {
    let splitter = splitter(&["<a>", "<a><b>", "b>c"]);
    let [short, long, other] = ["<a>", "<a><b>", "b>c"].map(|text| id(&splitter, text));
    assert_eq!(pieces(&splitter, "<a><b>c"), [Piece::Added(long), Piece::Text("c")]);
    assert_eq!(pieces(&splitter, "x<a><c"), [Piece::Text("x"), Piece::Added(short), Piece::Text("<c")]);
    assert_eq!(pieces(&splitter, "<b>c<a>"), [Piece::Text("<"), Piece::Added(other), Piece::Added(short)]);
    assert_eq!(pieces(&splitter, ""), []);
}

#[test]
fn a_token_that_strips_white_space_disables_splitting() {
    for flag in ["lstrip", "rstrip", "single_word"] {
        let mut tokenizer = fixture::byte_level();
        tokenizer["added_tokens"][1][flag] = true.into();
        assert!(Splitter::new(&Tokenizer::from_bytes(tokenizer.to_string()).unwrap()).is_none(), "{flag}");
    }
}

proptest! {
    #[test]
    fn split_pieces_add_up_to_the_text(text in "([ab<>é]|<a>|<a><b>){0,30}") {
        let splitter = splitter(&["<a>", "<a><b>", "é<"]);
        let joined: String = splitter.pieces(&text).map(|piece| match piece {
            Piece::Text(segment) => segment,
            Piece::Added(id) => splitter.text_of(id).unwrap(),
        }).collect();
        prop_assert_eq!(joined, text);
    }
}
