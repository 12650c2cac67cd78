//! Tables of possible command lines.

use super::*;

fn arguments(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

#[test]
fn the_last_value_of_a_flag_counts_in_every_form() {
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

#[test]
fn an_engines_arguments_say_the_names_of_its_model() {
    let table: [(&str, &[&str]); 6] = [
        ("serve org/m --seed 1", &["org/m"]),
        ("--served-model-name org/m m --seed 1 --served_model_name a b --seed 2", &["a", "b"]),
        ("--served-model-name=a", &["a"]),
        // Only the engine knows them.
        ("--served-model-name", &[]),
        ("--served-model-name=[a,b]", &[]),
        ("--lora-modules x=/x", &[]),
    ];
    for (line, expected) in table {
        assert_eq!(model_names("org/m", &arguments(line)), expected, "{line}");
    }
}

#[test]
fn a_short_flag_has_a_value_too() {
    assert_eq!(value_of(&arguments("-q fp8"), "-q"), Some("fp8"));
    assert_eq!(value_of(&arguments("--q fp8"), "-q"), None);
}

#[test]
fn flags_override_the_engines_config_file() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("engine.yaml");
    let text = "# ours\nmax-model-len: 16384  # tokens\nmax_num_seqs: \"64\"\nenforce-eager: true\nenable-prefix-caching: false\ncompilation-config:\n  level: 3\n";
    std::fs::write(&file, text).unwrap();
    let given = arguments(&format!("--config {} --max-num-seqs 32", file.display()));
    let all = expand_config_file(&given);
    assert_eq!(
        all[..5],
        ["--max-model-len=16384", "--max_num_seqs=64", "--enforce-eager", "--no-enable-prefix-caching", "--compilation-config="]
    );
    assert_eq!(all[5..], given);
    assert_eq!(value_of(&all, "--max-num-seqs"), Some("32"));
    assert_eq!(expand_config_file(&arguments("--config missing.yaml")), arguments("--config missing.yaml"));
}

#[test]
fn a_part_without_a_server_has_no_flags_of_one() {
    let given = ["--api-server-count", "2", "--max-model-len", "8192", "--api_server_count=4"].map(str::to_owned);
    assert_eq!(without_server_flags(&given), ["--max-model-len", "8192"]);
}
