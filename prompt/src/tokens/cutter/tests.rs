//! Tests of where segments are cut.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::fixture;

fn cutter() -> Cutter {
    Cutter { first: 8, longest: 16 }
}

fn pieces(text: &str) -> Vec<&str> {
    cutter().pieces(text).collect()
}

#[test]
fn a_segment_is_cut_before_the_space_between_two_words() {
    assert_eq!(pieces("one two three four five six seven"), ["one two three", " four five six seven"]);
    assert_eq!(pieces("one two, 3 four!  five"), ["one two, 3 four!  five"], "nothing else is a gap");
    assert_eq!(pieces("eight en"), ["eight en"], "a cut has 8 bytes before it");
    assert_eq!(pieces("eighteen e"), ["eighteen", " e"]);
    assert!(pieces("").is_empty());
}

#[test]
fn equal_prefixes_are_cut_alike() {
    let shared = "the quick brown fox jumps over the lazy dog and runs away ".repeat(4);
    let (one, other) = (format!("{shared}home at last"), format!("{shared}into the forest"));
    let (one, other) = (pieces(&one), pieces(&other));
    assert!(one.len() > 10);
    assert_eq!(one[..one.len() - 2], other[..one.len() - 2]);
}

#[test]
fn a_vocabulary_with_two_word_tokens_is_not_cut() {
    let mut tokenizer = fixture::byte_level();
    let cutter = |tokenizer: &serde_json::Value| Cutter::new(&Tokenizer::from_bytes(tokenizer.to_string()).unwrap());
    assert!(cutter(&tokenizer).is_some());
    let mut marked = tokenizer.clone();
    marked["model"]["vocab"]["<begin▁of▁text>"] = json!(999);
    marked["added_tokens"][0] = fixture::added_token(999, "<begin▁of▁text>");
    assert!(cutter(&marked).is_some(), "segments end at added tokens");
    marked["added_tokens"][1]["content"] = json!("New York");
    marked["added_tokens"][1]["normalized"] = json!(true);
    assert!(cutter(&marked).is_none(), "but not at those that are found within them");
    let id = tokenizer["model"]["vocab"].as_object().unwrap().len();
    tokenizer["model"]["vocab"]["ofĠthe"] = json!(1000 + id);
    assert!(cutter(&tokenizer).is_none());
}

proptest! {
    #[test]
    fn cut_pieces_add_up_to_their_segment(text in "([a-c ]{0,40}|é| ü |\\n){0,12}") {
        let pieces = pieces(&text);
        prop_assert_eq!(pieces.concat(), text.as_str());
        prop_assert!(pieces.iter().all(|piece| !piece.is_empty()));
    }
}
