//! Tests of the tokenizer and of the text of answers.

use proptest::prelude::*;

use super::*;

fn tokens_of(text: &str) -> Vec<u32> {
    let mut tokens = Vec::new();
    encode(text, &mut tokens);
    tokens
}

fn answer(seed: u64, prompt: &[u32], length: usize) -> Vec<u32> {
    let mut continuation = Continuation::after(seed, prompt);
    std::iter::repeat_with(|| continuation.next_token()).take(length).collect()
}

proptest! {
    #[test]
    fn any_text_comes_back_from_its_tokens(text in ".{0,200}") {
        prop_assert_eq!(decode(&tokens_of(&text)), text);
    }

    #[test]
    fn an_answer_sent_back_has_the_tokens_it_was_generated_as(seed: u64) {
        let generated = answer(seed, &[1, 2, 3], 50);
        prop_assert_eq!(tokens_of(&decode(&generated)), generated);
    }

    #[test]
    fn unknown_tokens_do_not_break_decoding(tokens in prop::collection::vec(any::<u32>(), 0..50)) {
        decode(&tokens);
    }
}

#[test]
fn a_common_word_is_one_token() {
    assert_eq!(tokens_of(" water").len(), 1);
    assert_eq!(tokens_of("Grüße, Jürgen").len(), 3 + 1 + 3);
}

#[test]
fn half_an_answer_continues_with_its_other_half() {
    let prompt = tokens_of("Tell me a story");
    let whole = answer(7, &prompt, 40);
    let extended = [&prompt[..], &whole[..20]].concat();
    assert_eq!(answer(7, &extended, 20), whole[20..]);
}

#[test]
fn seeds_and_prompts_change_the_answer() {
    let prompt = tokens_of("Tell me a story");
    assert_ne!(answer(7, &prompt, 20), answer(8, &prompt, 20));
    assert_ne!(answer(7, &prompt, 20), answer(7, &tokens_of("Tell me two"), 20));
}

#[test]
fn escaped_pieces_are_the_pieces_inside_a_json_string() {
    let tokens: Vec<u32> = (FIRST_PIECE..).take(PIECES.len()).collect();
    let mut json = vec![b'"'];
    push_escaped(&tokens, &mut json);
    json.push(b'"');
    let text: String = serde_json::from_slice(&json).expect("valid JSON");
    assert_eq!(text, PIECES.concat());
}
