//! Tests of encoding by segments: the result always equals the tokenizer's for the whole text.

use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::fixture;

fn tokens(tokenizer: &Value, config: &Value) -> SegmentTokenizer {
    let files = crate::ModelFiles { config: Some(config.to_string().into_bytes()), ..crate::ModelFiles::default() };
    SegmentTokenizer::new(tokenizer.to_string().as_bytes(), &TokenizerConfig::read(&files).unwrap(), 1 << 20).unwrap()
}

fn plain(tokenizer: &Value) -> SegmentTokenizer {
    tokens(tokenizer, &json!({}))
}

fn read(tokens: &SegmentTokenizer, text: &str, special: bool) -> Vec<u32> {
    tokens.read_text(text, special, &mut |_| true).unwrap().tokens
}

fn whole(tokenizer: &Value, text: &str, special: bool) -> Vec<u32> {
    Tokenizer::from_bytes(tokenizer.to_string()).unwrap().encode(text, special).unwrap().get_ids().to_vec()
}

fn with_flag(flag: &str) -> Value {
    let mut tokenizer = fixture::byte_level();
    tokenizer["added_tokens"][1][flag] = json!(true);
    tokenizer
}

#[test]
fn segments_are_used_where_they_are_independent() {
    for tokenizer in [fixture::byte_level(), fixture::with_first_token(), fixture::metaspace("first"), fixture::metaspace("always")] {
        assert!(plain(&tokenizer).splitter.is_some());
    }
    for flag in ["lstrip", "rstrip", "single_word"] {
        assert!(plain(&with_flag(flag)).splitter.is_none(), "{flag}");
    }
}

#[test]
fn a_tokenizer_with_dependent_segments_is_used_whole() {
    // A pre-tokenizer is tested with every segment, but a normalizer that strips treats the segment
    // as its whole text.
    let mut tokenizer = fixture::byte_level();
    tokenizer["normalizer"] = json!({ "type": "Strip", "strip_left": true, "strip_right": true });
    let encoder = plain(&tokenizer);
    for text in ["a <|im_start|> b ", " <|im_end|> "] {
        assert_eq!(read(&encoder, text, false), whole(&tokenizer, text, false), "{text:?}");
    }
}

#[test]
fn truncation_and_padding_of_the_file_are_ignored() {
    let mut tokenizer = fixture::byte_level();
    tokenizer["truncation"] = json!({ "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0 });
    tokenizer["padding"] = json!({ "strategy": { "Fixed": 8 }, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "a" });
    assert_eq!(read(&plain(&tokenizer), "abcd", false), whole(&fixture::byte_level(), "abcd", false));
}

#[test]
fn special_tokens_follow_the_file_unless_the_config_decides() {
    let tokenizer = fixture::with_first_token();
    let encoder = plain(&tokenizer);
    for text in ["hello world", "", "a<|im_end|>b"] {
        assert_eq!(read(&encoder, text, true), whole(&tokenizer, text, true), "{text:?}");
    }
    let switched = |bos: bool, eos: bool| {
        let config = json!({ "add_bos_token": bos, "add_eos_token": eos, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>" });
        read(&tokens(&tokenizer, &config), "a", true)
    };
    let of = |text: &str| whole(&tokenizer, text, false);
    assert_eq!(switched(false, false), of("a"));
    assert_eq!(switched(true, false), of("<|im_start|>a"));
    assert_eq!(switched(true, true), of("<|im_start|>a<|im_end|>"));
}

#[test]
fn tokens_declared_only_by_the_config_count() {
    let config = json!({ "added_tokens_decoder": { "9": { "content": "<tool>", "normalized": false, "special": false } } });
    let encoder = tokens(&fixture::byte_level(), &config);
    assert_eq!(read(&encoder, "a<tool>b", false).len(), 3);
    assert!(encoder.has_added_token("<tool>"));
}

#[test]
fn a_segment_is_encoded_once() {
    let encoder = plain(&fixture::byte_level());
    read(&encoder, "<|im_start|>hello<|im_end|>\n<|im_start|>hello<|im_end|>\n", false);
    assert_eq!((encoder.stats().hits, encoder.stats().misses, encoder.stats().encoded_bytes), (2, 2, 6));
    assert!(encoder.stats().cache_bytes > 0);
}

#[test]
fn long_segments_are_cut_only_where_no_token_changes() {
    for tokenizer in [fixture::byte_level(), fixture::with_first_token(), fixture::metaspace("first"), fixture::metaspace("always")] {
        assert!(plain(&tokenizer).cutter.is_some());
    }
    let mut strips = fixture::byte_level();
    strips["normalizer"] = json!({ "type": "Strip", "strip_left": true, "strip_right": true });
    assert!(plain(&strips).cutter.is_none(), "a space at the beginning of a piece would be lost");
    let mut prepends = fixture::metaspace("never");
    prepends["normalizer"] = json!({ "type": "Prepend", "prepend": "▁" });
    assert!(plain(&prepends).cutter.is_none());
}

#[test]
fn a_text_is_tokenized_only_as_far_as_needed() {
    let text = format!("<|im_start|>{}<|im_end|>", "hello world and the others ".repeat(400));
    let encoder = plain(&fixture::byte_level());
    let all = read(&encoder, &text, false);
    let mut calls = Vec::new();
    let some = encoder
        .read_text(&text, false, &mut |progress| {
            assert_eq!(progress.total_bytes, text.len());
            calls.push(progress.bytes);
            progress.tokens.len() < 500
        })
        .unwrap();
    assert_eq!(some.tokens, all[..some.tokens.len()], "what is read is as it is in the whole");
    assert!(some.tokens.len() >= 500 && some.bytes < text.len() / 2);
    assert_eq!(calls.last(), Some(&some.bytes));
    assert!(calls.windows(2).all(|pair| pair[1] - pair[0] < 1100), "{calls:?}");
    let none = encoder.read_text(&text, false, &mut |_| false).unwrap();
    assert_eq!((none.tokens.len(), none.bytes), (1, "<|im_start|>".len()), "nobody wanted more than the added token");
    assert_eq!(
        plain(&with_flag("rstrip")).read_text(&text, false, &mut |_| false).unwrap().bytes,
        text.len(),
        "or all, where nothing can be cut"
    );
}

#[test]
fn pieces_of_a_repeated_long_text_are_cached() {
    let document = "hello world and the others ".repeat(400);
    let encoder = plain(&fixture::byte_level());
    read(&encoder, &format!("{document} what is it about"), false);
    let before = encoder.stats().encoded_bytes;
    read(&encoder, &format!("{document} who wrote it"), false);
    assert!(encoder.stats().encoded_bytes - before < 1100);
}

#[test]
fn a_file_that_is_no_tokenizer_is_named() {
    let error = SegmentTokenizer::new(b"{}", &TokenizerConfig::default(), 0).err().unwrap();
    assert!(error.to_string().starts_with("cannot read tokenizer.json: "), "{error}");
}

fn texts() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("<|im_start|>".to_owned()),
        Just("<|im_end|>".to_owned()),
        Just("<|endoftext|>".to_owned()),
        Just("<|im_".to_owned()),
        Just("hello world".to_owned()),
        "[a-dhelorw]{1,5} [a-dhelorw]{1,5} ",
        Just("  the\n\n".to_owned()),
        "[ a-z\n'0-9]{0,8}",
        "\\PC{0,4}",
    ];
    prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

/// Each kind of tokenizer, alone and by segments.
static KINDS: LazyLock<Vec<(Tokenizer, SegmentTokenizer)>> = LazyLock::new(|| {
    let kinds = [
        fixture::byte_level(),
        fixture::with_first_token(),
        fixture::metaspace("first"),
        fixture::metaspace("always"),
        fixture::metaspace("never"),
        with_flag("rstrip"),
    ];
    let finest = |tokens: SegmentTokenizer| SegmentTokenizer { cutter: tokens.cutter.map(|_| Cutter::finest()), ..tokens };
    kinds.iter().map(|json| (Tokenizer::from_bytes(json.to_string()).unwrap(), finest(plain(json)))).collect()
});

proptest! {
    #[test]
    fn segments_give_the_tokens_of_the_whole(text in texts(), special: bool) {
        for (tokenizer, tokens) in KINDS.iter() {
            let whole = tokenizer.encode(text.as_str(), special).unwrap();
            for _ in 0..2 {
                prop_assert_eq!(read(tokens, &text, special), whole.get_ids(), "{:?}", text);
            }
        }
    }
}
