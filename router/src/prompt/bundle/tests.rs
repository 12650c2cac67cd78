use super::*;
use crate::prompt::tests::{bundle, file};
use proptest::prelude::*;

#[test]
fn an_unknown_file_of_a_bundle_is_skipped() {
    let mut bundle = PromptBundle::decode(&bundle(0)[..]).unwrap();
    bundle.files.push(file("vocabulary_of_the_future.bin", "?"));
    assert!(build_encoder(&bundle.encode_to_vec(), 1024).is_ok());
}

#[test]
fn a_bundle_without_a_tokenizer_has_no_encoder() {
    let bundle = PromptBundle { files: vec![file("tokenizer_config.json", "{}")] };
    let error = build_encoder(&bundle.encode_to_vec(), 1024).err().unwrap();
    assert_eq!(error.to_string(), "there is no tokenizer.json among the files");
}

#[test]
fn an_unreadable_tokenizer_is_an_error() {
    for content in ["", "{", "{}", r#"{"model":{"type":"BPE"}}"#, "[]"] {
        let bundle = PromptBundle { files: vec![file("tokenizer.json", content)] };
        assert!(build_encoder(&bundle.encode_to_vec(), 1024).is_err(), "{content}");
    }
}

#[test]
fn a_hash_is_sha_256_and_its_beginning_is_logged() {
    let hash = bundle_hash(b"abc");
    assert_eq!(ShortHash(&hash).to_string(), "ba7816bf8f01");
}

proptest! {
    #[test]
    fn any_bytes_are_an_encoder_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = build_encoder(&bytes, 1024);
    }
}
