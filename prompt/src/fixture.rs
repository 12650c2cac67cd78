//! Small tokenizers of the kinds that models have, for tests.

use serde_json::{Value, json};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use crate::{Encoder, ModelFiles};

/// Merges, each of earlier pieces of the vocabulary.
const MERGES: [&str; 24] = [
    "h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "i n", "e r", "Ġ t", "Ġt he", "Ġ Ġ", "Ċ Ċ", "a n", "d e",
    "u s", "us er", "s t", "1 2", "r e", "Ġ a", "' s",
];

pub(crate) const CHATML: &str = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// A byte-level BPE tokenizer with three special tokens, like those of Qwen and Llama 3.
pub(crate) fn byte_level() -> Value {
    let mut pieces: Vec<String> = ByteLevel::alphabet().into_iter().map(String::from).collect();
    pieces.sort();
    pieces.extend(MERGES.iter().map(|merge| merge.replace(' ', "")));
    let vocabulary: serde_json::Map<_, _> = pieces.iter().enumerate().map(|(id, piece)| (piece.clone(), json!(id))).collect();
    let specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
    let added: Vec<Value> = specials.iter().enumerate().map(|(number, text)| added_token(pieces.len() + number, text)).collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocabulary, "merges": MERGES,
        },
    })
}

/// A byte-level tokenizer that puts a token before every text, like that of Llama 3.
pub(crate) fn with_first_token() -> Value {
    let mut tokenizer = byte_level();
    let id = tokenizer["added_tokens"][0]["id"].clone();
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{ "SpecialToken": { "id": "<|endoftext|>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
        "special_tokens": { "<|endoftext|>": { "id": "<|endoftext|>", "ids": [id], "tokens": ["<|endoftext|>"] } },
    });
    tokenizer
}

/// A tokenizer whose words begin with a mark, also at the beginning of a text, like those made by
/// SentencePiece.
pub(crate) fn metaspace(prepend: &str) -> Value {
    let mut tokenizer = byte_level();
    let mut vocabulary: serde_json::Map<String, Value> = (0..=255_u8).map(|byte| (format!("<0x{byte:02X}>"), json!(byte))).collect();
    for (number, piece) in ["▁", "h", "e", "l", "o", "w", "r", "d", "▁h", "▁he", "▁w", "ll"].into_iter().enumerate() {
        vocabulary.insert(piece.to_owned(), json!(256 + number));
    }
    let first = 256 + 12;
    for (number, token) in tokenizer["added_tokens"].as_array_mut().unwrap().iter_mut().enumerate() {
        token["id"] = json!(first + number);
    }
    tokenizer["pre_tokenizer"] = json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend, "split": true });
    tokenizer["decoder"] = Value::Null;
    tokenizer["model"]["vocab"] = Value::Object(vocabulary);
    tokenizer["model"]["merges"] = json!(["▁ h", "▁h e", "▁ w", "l l"]);
    tokenizer["model"]["byte_fallback"] = json!(true);
    tokenizer
}

pub(crate) fn added_token(id: usize, text: &str) -> Value {
    json!({ "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true })
}

pub(crate) fn files(tokenizer: &Value, template: &str) -> ModelFiles {
    ModelFiles { tokenizer: tokenizer.to_string().into_bytes(), template: Some(template.to_owned()), ..ModelFiles::default() }
}

/// An encoder with the byte-level tokenizer.
pub(crate) fn encoder(template: &str) -> Encoder {
    Encoder::new(&files(&byte_level(), template), 1 << 20).unwrap()
}
