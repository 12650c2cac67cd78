use super::*;

const CHAT: StreamApi = StreamApi::Chat;
const COMPLETIONS: StreamApi = StreamApi::Completions;

fn parse(api: StreamApi, body: &[u8]) -> Result<Sampling, NotResumed> {
    Sampling::parse(api, body).map_err(|unfit| unfit.reason)
}

fn chat_body(fields: &str) -> Vec<u8> {
    format!(r#"{{"model":"m","messages":[{{"role":"user","content":"Hi"}}],"stream":true{fields}}}"#).into_bytes()
}

fn chat(fields: &str) -> Result<Sampling, NotResumed> {
    parse(CHAT, &chat_body(fields))
}

fn tier(fields: &str) -> ResumeTier {
    chat(fields).map_or_else(ResumeTier::None, |sampling| sampling.tier)
}

#[test]
fn the_resume_tier_follows_from_a_requests_parameters() {
    use ResumeTier::{None, TokenExact, ValidContinuation};
    for (fields, expected) in [
        ("", ValidContinuation),
        (r#","temperature":0"#, TokenExact),
        (r#","temperature":0.0,"seed":7"#, TokenExact),
        (r#","temperature":null"#, ValidContinuation),
        (r#","temperature":0.7,"top_p":0.9,"top_k":50,"repetition_penalty":1.1"#, ValidContinuation),
        (r#","temperature":"0""#, ValidContinuation),
        (r#","temperature":0.7,"seed":7"#, None(NotResumed::Seed)),
        (r#","seed":null"#, ValidContinuation),
        (r#","n":1,"logprobs":false,"top_logprobs":0,"tools":[],"tool_choice":"none","stop":[],"presence_penalty":0.0"#, ValidContinuation),
        (r#","n":2"#, None(NotResumed::Choices)),
        (r#","presence_penalty":0.5"#, None(NotResumed::Penalty)),
        (r#","frequency_penalty":-1"#, None(NotResumed::Penalty)),
        (r#","logprobs":true"#, None(NotResumed::Logprobs)),
        (r#","top_logprobs":3"#, None(NotResumed::Logprobs)),
        (r#","tools":[{"type":"function"}]"#, None(NotResumed::Tools)),
        (r#","tool_choice":"required""#, None(NotResumed::Tools)),
        (r#","response_format":{"type":"text"}"#, ValidContinuation),
        (r#","response_format":{"type":"json_object"}"#, None(NotResumed::Grammar)),
        (r#","structured_outputs":{"choice":["a"]}"#, None(NotResumed::Grammar)),
        (r#","stop":"x""#, None(NotResumed::Stop)),
        (r#","stop":["x","y"]"#, None(NotResumed::Stop)),
        (r#","bad_words":["x"]"#, None(NotResumed::Stop)),
        (r#","return_token_ids":true"#, None(NotResumed::TokenIds)),
        (r#","return_token_ids":false"#, None(NotResumed::TokenIds)),
        (r#","return_token_ids":null"#, None(NotResumed::TokenIds)),
        (r#","stream_options":{"include_usage":true}"#, ValidContinuation),
        (r#","stream_options":{"include_usage":true,"continuous_usage_stats":true}"#, None(NotResumed::ContinuousUsage)),
        (r#","stream_options":{"something":true}"#, None(NotResumed::StreamOptions)),
        (r#","max_tokens":"9""#, None(NotResumed::MaxTokens)),
        (r#","max_tokens":-1"#, None(NotResumed::MaxTokens)),
        (r#","echo":true"#, None(NotResumed::Echo)),
        (r#","include_reasoning":true"#, ValidContinuation),
        (r#","include_reasoning":false"#, None(NotResumed::Parser)),
        (r#","vllm_xargs":{"a":1}"#, None(NotResumed::Field)),
        (r#","invented":true"#, None(NotResumed::Field)),
        (r#","invented":null"#, ValidContinuation),
        (r#","seed":-1"#, ValidContinuation),
        (r#","temperature":0,"temperature":1"#, None(NotResumed::RepeatedField)),
        (r#","temper\u0061ture":0,"temperature":1"#, None(NotResumed::RepeatedField)),
    ] {
        assert_eq!(tier(fields), expected, "{fields}");
    }
}

#[test]
fn a_deterministic_request_may_be_replayed() {
    let may_be_replayed = |fields: &str| Sampling::parse(CHAT, &chat_body(fields)).unwrap_err().may_be_replayed;
    for fields in [
        r#","tools":[{"type":"function"}],"tool_choice":"required""#,
        r#","response_format":{"type":"json_object"}"#,
        r#","structured_outputs":{"choice":["a"]}"#,
        r#","stop":"x""#,
        r#","logprobs":true,"top_logprobs":3"#,
        r#","presence_penalty":0.5"#,
        r#","stream_options":{"include_usage":true,"continuous_usage_stats":true}"#,
        r#","include_reasoning":false"#,
    ] {
        assert!(may_be_replayed(&format!(r#","temperature":0{fields}"#)), "{fields}");
        assert!(may_be_replayed(&format!(r#","temperature":0.7,"seed":7{fields}"#)), "{fields}");
        assert!(!may_be_replayed(&format!(r#","temperature":0.7{fields}"#)), "{fields}");
        assert!(!may_be_replayed(&format!(r#","temperature":0.7,"seed":-1{fields}"#)), "{fields}");
        assert!(!may_be_replayed(&format!(r#","temperature":0{fields},"invented":1"#)), "{fields}");
    }
    assert!(may_be_replayed(r#","seed":7"#) && may_be_replayed(r#","seed":7,"n":2"#));
    assert!(!may_be_replayed(r#","temperature":0,"return_token_ids":true"#));
}

#[test]
fn a_request_field_without_a_rule_prevents_resumption() {
    let with_prompt = |prompt: &str| parse(COMPLETIONS, format!(r#"{{"prompt":{prompt},"stream":true}}"#).as_bytes());
    for prompt in [r#"["a","b"]"#, "[[1,2],[3]]", "[]", "{}"] {
        assert_eq!(with_prompt(prompt), Err(NotResumed::Choices), "{prompt}");
    }
    assert!(with_prompt(r#""a""#).is_ok() && with_prompt("[1,2]").is_ok());
    let picture = r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:"}}]}],"stream":true}"#;
    assert_eq!(parse(CHAT, picture.as_bytes()), Err(NotResumed::Media));
    assert_eq!(StreamApi::for_route(Route::Messages), None);
    assert_eq!(parse(CHAT, b"[]"), Err(NotResumed::Body));
    assert_eq!(parse(CHAT, &vec![b' '; MAX_BODY_BYTES + 1]), Err(NotResumed::Size));
    assert_eq!(chat(&format!(r#","stop_token_ids":[{}1]"#, "1,".repeat(3000))), Err(NotResumed::Size));
}

#[test]
fn an_answers_length_is_read_as_engines_read_it() {
    let most = |api, fields: &str| {
        let body = format!(r#"{{"messages":[],"prompt":"x"{fields}}}"#);
        parse(api, body.as_bytes()).map(|sampling| sampling.max_tokens)
    };
    for (api, fields, expected) in [
        (CHAT, "", Ok(None)),
        (CHAT, r#","max_tokens":5"#, Ok(Some(5))),
        (CHAT, r#","max_tokens":5,"max_completion_tokens":7"#, Ok(Some(7))),
        (CHAT, r#","max_tokens":null"#, Ok(None)),
        (COMPLETIONS, "", Ok(Some(16))),
        (COMPLETIONS, r#","max_tokens":null"#, Err(NotResumed::MaxTokens)),
        (COMPLETIONS, r#","max_tokens":5"#, Ok(Some(5))),
        (COMPLETIONS, r#","max_completion_tokens":7"#, Err(NotResumed::MaxCompletionTokens)),
    ] {
        assert_eq!(most(api, fields), expected, "{api:?} {fields}");
    }
}

#[test]
fn a_continuation_carries_sampling_but_no_prompt_settings() {
    let sampling =
        chat(r#","temperature":0.5,"logit_bias":{"7": -1},"min_tokens":3,"chat_template_kwargs":{"a":1},"metadata":{}"#).unwrap();
    assert_eq!(&*sampling.carried, r#""model":"m","temperature":0.5,"logit_bias":{"7": -1},"#);
    assert_eq!(sampling.min_tokens, 3);
}

#[test]
fn a_request_for_tokens_changes_only_its_end() {
    for (body, asking) in
        [(r#"{"stream":true}"#, r#"{"stream":true,"return_token_ids":true}"#), ("{\"a\": 1 \n} \n", r#"{"a": 1,"return_token_ids":true}"#)]
    {
        assert_eq!(ask_for_tokens(body.as_bytes()), asking);
        let plain: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&without_asking(&asking.into())).unwrap(), plain);
        assert_eq!(unasked_part(asking.as_bytes()), unasked_part(body.as_bytes()));
    }
}
