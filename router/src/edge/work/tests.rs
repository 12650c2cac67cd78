use super::*;

#[test]
fn a_route_says_what_is_computed() {
    let once = |route| work(route, 100, Most::Unsaid);
    assert_eq!(once("/v1/chat/completions"), Work { prompts: 1, answers: 1 });
    assert_eq!(once("/v1/completions"), Work { prompts: 51, answers: 51 }, "a list of prompts has a comma for each");
    assert_eq!(once("/v1/responses"), Work { prompts: MOST_TURNS, answers: MOST_TURNS });
    assert_eq!(once("/v1/embeddings"), Work { prompts: 51, answers: 0 });
    for nothing in ["/tokenize", "/v1/chat/completions/derender", "/v1/responses/resp_1", "/v1/messages/count_tokens"] {
        assert_eq!(once(nothing), Work::default(), "{nothing}");
    }
    let audio = ["/v1/audio/transcriptions", "/v1/audio/translations"].map(once);
    assert!(audio.iter().all(|work| work.generates()), "a transcript is generated");
}

#[test]
fn answers_that_a_request_counts_in_no_clear_way_are_as_many_as_there_can_be() {
    let answers = |choices| work("/v1/chat/completions", 100, choices).answers;
    assert_eq!([Most::Unsaid, Most::Of(0), Most::Of(8), Most::Of(u64::MAX), Most::Unclear].map(answers), [1, 1, 8, 16_384, 16_384]);
}

#[test]
fn tokens_that_are_given_as_such_are_counted() {
    assert_eq!(tokens("[1, 22, 333]"), 3);
    assert_eq!(tokens("[ 128000]"), 1);
    assert_eq!(tokens(&format!("[{}7]", "100000,".repeat(999))), 1000);
    assert_eq!(tokens("\"sixteen bytes ..\""), 4);
    assert_eq!((tokens("[]"), tokens(r#"["text, text"]"#)), (0, 3));
}
