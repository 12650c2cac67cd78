//! Tests of the tokenizer and of the text of answers.

mod hugging_face;

use proptest::prelude::*;

use super::*;

fn answer(seed: u64, prompt: &[u32], length: usize) -> Vec<u32> {
    let mut continuation = Continuation::after(seed, prompt);
    std::iter::repeat_with(|| continuation.next_token()).take(length).collect()
}

/// Text of pieces, specials and parts of them, and anything else.
fn text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        4 => prop::sample::select(PIECES).prop_map(str::to_owned),
        1 => prop::sample::select(&SPECIALS[..]).prop_map(str::to_owned),
        1 => prop::sample::select(&["<|im_", "|>", " ", "  ", "\r\n", "a", "\u{a0}", "\u{ad}", "\0"][..]).prop_map(str::to_owned),
        2 => "\\PC{0,12}",
        1 => any::<String>(),
    ];
    prop::collection::vec(part, 0..30).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn any_text_survives_encoding_and_decoding(text in text()) {
        prop_assert_eq!(decode(&encode(&text)), text);
    }

    #[test]
    fn an_answer_is_encoded_as_it_was_generated(seed: u64) {
        let generated = answer(seed, &[1, 2, 3], 50);
        prop_assert_eq!(encode(&decode(&generated)), generated);
    }

    #[test]
    fn unknown_tokens_do_not_break_decoding(tokens in prop::collection::vec(any::<u32>(), 0..50)) {
        decode(&tokens);
    }
}

#[test]
fn common_words_are_one_token_and_others_their_bytes() {
    assert_eq!(encode(" water").len(), 1);
    assert_eq!(encode("Grüße, Jürgen").len(), 7 + 1 + 8);
}

#[test]
fn a_special_token_is_recognized_wherever_it_stands() {
    assert_eq!(encode("<|im_start|>a<|im_end|><|im_end"), [&[256, 97, 257][..], &encode("<|im_end")].concat());
    assert_eq!(encode("<|im_end").len(), 8);
}

#[test]
fn half_an_answer_continues_with_its_other_half() {
    let prompt = encode("Tell me a story");
    let whole = answer(7, &prompt, 40);
    let extended = [&prompt[..], &whole[..20]].concat();
    assert_eq!(answer(7, &extended, 20), whole[20..]);
}

#[test]
fn seeds_and_prompts_change_the_answer() {
    let prompt = encode("Tell me a story");
    assert_ne!(answer(7, &prompt, 20), answer(8, &prompt, 20));
    assert_ne!(answer(7, &prompt, 20), answer(7, &encode("Tell me two"), 20));
}

#[test]
fn escaped_pieces_equal_the_pieces_inside_a_json_string() {
    let tokens: Vec<u32> = (FIRST_PIECE..).take(PIECES.len()).collect();
    let mut json = vec![b'"'];
    push_escaped(&tokens, &mut json);
    json.push(b'"');
    let text: String = serde_json::from_slice(&json).expect("valid JSON");
    assert_eq!(text, PIECES.concat());
}
