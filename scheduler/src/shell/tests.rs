use super::*;

#[test]
fn a_word_is_quoted_only_where_a_shell_would_change_it() {
    let words = ["agent", "--model", "Qwen/Qwen3-8B", "", "a b", "$HOME", "it's"].map(str::to_owned);
    assert_eq!(quote(&words), r#"agent --model Qwen/Qwen3-8B '' 'a b' '$HOME' "it's""#);
}

#[test]
fn the_end_of_a_text_is_a_line_that_it_does_not_have() {
    assert_eq!(here_document("a\n"), " <<'END_OF_JOB'\na\nEND_OF_JOB");
    assert_eq!(here_document("END_OF_JOB\nb"), " <<'END_OF_JOB_'\nEND_OF_JOB\nb\nEND_OF_JOB_");
}
