//! Tests of the values read from the files besides the tokenizer.

use serde_json::json;

use super::*;

fn config(config: &Value, special_tokens: Option<&Value>) -> TokenizerConfig {
    let files = ModelFiles {
        config: Some(config.to_string().into_bytes()),
        special_tokens: special_tokens.map(|map| map.to_string().into_bytes()),
        ..ModelFiles::default()
    };
    TokenizerConfig::read(&files).unwrap()
}

#[test]
fn special_tokens_are_strings_or_objects_and_the_config_wins() {
    let read = config(
        &json!({ "bos_token": { "content": "<s>", "lstrip": false }, "eos_token": null, "add_bos_token": true, "extra_special_tokens": { "image_token": "<img>" } }),
        Some(&json!({ "bos_token": "<other>", "eos_token": "</s>", "additional_special_tokens": ["<a>"] })),
    );
    assert_eq!(Value::Object(read.special_tokens.clone()), json!({ "bos_token": "<s>", "image_token": "<img>", "eos_token": "</s>" }));
    assert_eq!((read.flag("add_bos_token"), read.flag("add_eos_token")), (Some(true), None));
}

#[test]
fn a_config_has_one_template_or_named_ones() {
    assert_eq!(
        config(&json!({ "chat_template": "t" }), None).templates(),
        TemplateSources { default: Some("t".to_owned()), tool_use: None }
    );
    let named = json!({ "chat_template": [{ "name": "default", "template": "d" }, { "name": "tool_use", "template": "u" }, { "name": "rag", "template": "r" }] });
    assert_eq!(config(&named, None).templates(), TemplateSources { default: Some("d".to_owned()), tool_use: Some("u".to_owned()) });
    assert_eq!(config(&json!({}), None).templates(), TemplateSources::default());
}

#[test]
fn declared_tokens_are_ordered_by_id() {
    let declared = json!({ "added_tokens_decoder": { "10": { "content": "b" }, "9": { "content": "a", "special": true }, "x": { "content": "c" }, "11": 5 } });
    let names: Vec<String> = config(&declared, None).declared_tokens().into_iter().map(|token| token.content).collect();
    assert_eq!(names, ["a", "b"]);
}

#[test]
fn a_file_that_is_not_an_object_is_named() {
    let files = ModelFiles { config: Some(b"[]".to_vec()), ..ModelFiles::default() };
    assert!(TokenizerConfig::read(&files).unwrap_err().to_string().starts_with("cannot read tokenizer_config.json: "));
}
