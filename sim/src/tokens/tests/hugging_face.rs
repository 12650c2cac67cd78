//! Check that the tokenizer's files give Hugging Face's library the engine's own tokens.

use std::str::FromStr;
use std::sync::LazyLock;

use proptest::prelude::*;
use tokenizers::Tokenizer;

use super::super::*;
use super::text;

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let json = String::from_utf8(tokenizer_json().to_vec()).unwrap();
    Tokenizer::from_str(&json).expect("it is a tokenizer")
});

fn tokens_of(text: &str) -> Vec<u32> {
    TOKENIZER.encode(text, false).unwrap().get_ids().to_vec()
}

proptest! {
    #[test]
    fn any_text_has_the_engines_tokens(text in text()) {
        prop_assert_eq!(tokens_of(&text), encode(&text));
    }
}

#[test]
fn every_piece_and_ascii_character_has_the_engines_token() {
    for piece in PIECES {
        assert_eq!(tokens_of(piece), encode(piece), "{piece:?}");
        assert_eq!(tokens_of(piece).len(), 1, "{piece:?}");
    }
    for byte in 0..128_u8 {
        let text = char::from(byte).to_string();
        assert_eq!(tokens_of(&text), encode(&text), "{text:?}");
    }
}

#[test]
fn the_library_decodes_an_answer_as_the_engine_does() {
    let mut continuation = Continuation::after(3, &[]);
    let answer: Vec<u32> = std::iter::repeat_with(|| continuation.next_token()).take(100).collect();
    assert_eq!(TOKENIZER.decode(&answer, false).unwrap(), decode(&answer));
}
