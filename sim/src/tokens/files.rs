//! Files of the tokenizer in the form of a Hugging Face model, made from the same tables that
//! `encode` uses.
//!
//! A router reads them through `GET /sim/model/…`, as it reads those of a real model from its
//! folder, and then computes the engine's tokens for every prompt.

use std::sync::LazyLock;

use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::chat::TEMPLATE;
use super::{FIRST_PIECE, FIRST_SPECIAL, MESSAGE_END, PIECES, SPECIALS};

/// Words of `word_length` as a regular expression.
///
/// In ASCII, the first class contains only letters and digits.
const WORDS: &str = r" ?[^\x00-/:-@\[-`{-\x7f]+|[\x00-\x7f]";

static TOKENIZER: LazyLock<Bytes> = LazyLock::new(|| tokenizer().to_string().into());
static CONFIG: LazyLock<Bytes> = LazyLock::new(|| config().to_string().into());

/// Content of `tokenizer.json`.
pub(crate) fn tokenizer_json() -> Bytes {
    TOKENIZER.clone()
}

/// Content of `tokenizer_config.json`, with the chat template.
pub(crate) fn tokenizer_config_json() -> Bytes {
    CONFIG.clone()
}

/// Byte-level BPE without merges, which keeps words of the vocabulary whole (`ignore_merges`) and
/// splits all others into bytes.
fn tokenizer() -> Value {
    let added = (FIRST_SPECIAL..).zip(SPECIALS).map(|(id, content)| {
        json!({
            "id": id, "content": content, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false, "special": true,
        })
    });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": WORDS }, "behavior": "Isolated", "invert": false },
            { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
        ] },
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": true,
            "vocab": vocabulary(), "merges": [],
        },
    })
}

/// Vocabulary. Later entries win: a byte that is a piece has the piece's id.
fn vocabulary() -> Map<String, Value> {
    let bytes = (0..=u8::MAX).map(|byte| (visible([byte]), u32::from(byte)));
    // Added tokens get their ids from here; otherwise they would follow the vocabulary.
    let specials = SPECIALS.map(str::to_owned).into_iter().zip(FIRST_SPECIAL..);
    let pieces = PIECES.iter().map(|piece| visible(piece.bytes())).zip(FIRST_PIECE..);
    bytes.chain(specials).chain(pieces).map(|(text, id)| (text, id.into())).collect()
}

/// Bytes in the form of byte-level tokenizers: one visible character each.
///
/// Bytes that are not visible characters of Latin-1 get the numbers after it.
fn visible(bytes: impl IntoIterator<Item = u8>) -> String {
    let shown = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let visible = |byte: u8| match shown(&byte) {
        true => char::from(byte),
        false => {
            let before = (0..byte).filter(|other| !shown(other)).count();
            u32::try_from(256 + before).ok().and_then(char::from_u32).expect("there are fewer than 256 of them")
        }
    };
    bytes.into_iter().map(visible).collect()
}

fn config() -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": false,
        "clean_up_tokenization_spaces": false,
        "eos_token": MESSAGE_END,
        "additional_special_tokens": SPECIALS,
        "chat_template": TEMPLATE,
    })
}
