use super::*;

#[test]
fn a_word_is_quoted_only_where_the_shell_needs_it() {
    let words = ["agent", "--model", "Qwen/Qwen3-8B", "", "a b", "$HOME", "it's"].map(str::to_owned);
    assert_eq!(quote(&words), r#"agent --model Qwen/Qwen3-8B '' 'a b' '$HOME' "it's""#);
}

#[test]
fn a_here_document_ends_with_an_unused_line() {
    assert_eq!(here_document("a\n"), " <<'END_OF_JOB'\na\nEND_OF_JOB");
    assert_eq!(here_document("END_OF_JOB\nb"), " <<'END_OF_JOB_'\nEND_OF_JOB\nb\nEND_OF_JOB_");
}
