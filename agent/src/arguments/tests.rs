//! Tables of what may stand on a command line.

use super::*;

fn arguments(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

#[test]
fn a_value_is_found_in_every_form_and_the_last_one_counts() {
    let table = [
        ("--max-model-len 5", Some("5")),
        ("--max-model-len=5", Some("5")),
        ("--max_model_len 5", Some("5")),
        ("--max_model_len=a=b", Some("a=b")),
        ("--max-model-len 5 --seed 1 --max_model_len=6", Some("6")),
        ("--max-model-len", None),
        ("--max-model-lens 5", None),
        ("max-model-len 5", None),
        ("", None),
    ];
    for (line, expected) in table {
        assert_eq!(value_of(&arguments(line), "--max-model-len"), expected, "{line}");
    }
}

#[test]
fn a_switch_is_given_with_dashes_or_underscores() {
    assert!(is_given(&arguments("--seed 1 --skip_tokenizer_init"), "--skip-tokenizer-init"));
    assert!(!is_given(&arguments("--no-skip-tokenizer-init"), "--skip-tokenizer-init"));
}
