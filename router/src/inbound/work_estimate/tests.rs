use super::super::peek::peek;
use super::*;

#[test]
fn a_route_decides_what_work_is_estimated() {
    let of = |path, prompt: &str| {
        let body = format!("{prompt:100}");
        estimate_work(
            Route::of(path),
            body.as_bytes(),
            &Peek { prompt_parts: std::iter::once(0..prompt.len()).collect(), ..Peek::default() },
        )
    };
    let once = |path| of(path, "\"x\"");
    let one = Work { prompts: 1, answers: 1, turns: 1 };
    assert_eq!(once("/v1/chat/completions"), one);
    assert_eq!([once("/v1/completions"), of("/v1/completions", "[ 1,2]")], [one; 2]);
    for (list, prompts) in [("[]", 1), ("[[1, 2],[2]]", 2), (r#"["x,y","y", "z"]"#, 3), (r#"[ "x" ]"#, 1), ("[[],[]]", 2), ("7", 1)] {
        let listed = Work { prompts, answers: prompts, turns: 1 };
        assert_eq!(of("/v1/completions", list), listed, "{list}");
    }
    assert_eq!(of("/v1/chat/completions/batch", r#"[[{"role":"user"}],[{"role":"user"}]]"#), Work { prompts: 2, answers: 2, turns: 1 });
    assert_eq!(once("/v1/responses"), Work { turns: MAX_TURNS, ..one });
    assert_eq!(once("/v1/embeddings"), Work { prompts: 51, answers: 0, turns: 1 });
    for nothing in ["/tokenize", "/v1/chat/completions/derender", "/v1/responses/resp_1", "/v1/messages/count_tokens"] {
        assert_eq!(once(nothing), Work::default(), "{nothing}");
    }
    let audio = ["/v1/audio/transcriptions", "/v1/audio/translations"].map(once);
    assert!(audio.iter().all(|work| work.generates()), "a transcript is generated");
}

#[test]
fn each_answer_that_a_body_asks_for_is_charged() {
    let charged = |path, body: &str| {
        let peeked = peek(body.as_bytes()).unwrap();
        charged_answers(estimate_work(Route::of(path), body.as_bytes(), &peeked), &peeked)
    };
    assert_eq!(charged("/v1/chat/completions", r#"{"messages":[],"n":"3"}"#), 3);
    assert_eq!(charged("/v1/completions", r#"{"prompt":["a","b"],"n":3.0}"#), 6);
    let list = format!(r#"{{"prompt":[{}"x"]}}"#, r#""x","#.repeat(1023));
    assert_eq!(charged("/v1/completions", &list), 1024);
    assert_eq!(charged("/v1/completions", r#"{"prompt":["a"],"prompt_embeds":["e","f"],"prompt":[1,2]}"#), 4, "all that may be meant");
    assert_eq!(charged("/v1/completions", r#"{"prompt_embeds":"e"}"#), 1);
    assert_eq!(charged("/v1/embeddings", r#"{"input":["a","b"]}"#), 0);
    assert_eq!(charged("/v1/audio/transcriptions", r#"{"file":"a long sound"}"#), 1, "its pieces are one answer");
}

#[test]
fn an_unclear_number_of_choices_counts_as_the_maximum() {
    let answers = |choices| estimate_work(Route::ChatCompletions, &[b' '; 100], &Peek { choices, ..Peek::default() }).answers;
    assert_eq!(
        [
            RequestedCount::Unset,
            RequestedCount::Count(0),
            RequestedCount::Count(8),
            RequestedCount::Count(u64::MAX),
            RequestedCount::Unreadable
        ]
        .map(answers),
        [1, 1, 8, 16_384, 16_384]
    );
}

#[test]
fn token_ids_are_counted_exactly() {
    assert_eq!(estimate_tokens("[1, 22, 333]"), 3);
    assert_eq!(estimate_tokens("[ 128000]"), 1);
    assert_eq!(estimate_tokens(&format!("[{}7]", "100000,".repeat(999))), 1000);
    assert_eq!(estimate_tokens("\"sixteen bytes ..\""), 4);
    assert_eq!((estimate_tokens("[]"), estimate_tokens(r#"["text, text"]"#)), (0, 3));
}
