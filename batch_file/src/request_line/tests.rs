//! Lines that are requests, and lines that are not.

use proptest::prelude::*;

use super::*;

fn line(field: &str, value: &str) -> String {
    let parts = [("custom_id", r#""a""#), ("method", r#""POST""#), ("url", r#""/v1/chat/completions""#), ("body", r#"{"model":"m"}"#)];
    let parts: Vec<String> =
        parts.iter().map(|(name, usual)| format!("\"{name}\":{}", if *name == field { value } else { usual })).collect();
    format!("{{{}}}", parts.join(","))
}

fn refused(text: &str) -> LineError {
    parse(text.as_bytes()).unwrap_err()
}

#[test]
fn a_body_is_taken_as_it_was_written() {
    let body = r#"{ "model" : "m", "unknown": 1.000, "big": 123456789012345678901234567890, "text":"\u00e9" }"#;
    let text = line("body", body);
    let request = parse(text.as_bytes()).unwrap();
    assert_eq!((request.body, &*request.custom_id, &*request.route), (body, "a", "/chat/completions"));
}

#[test]
fn only_a_top_level_priority_of_a_body_counts() {
    for (body, expected) in [(r#"{"priority":3}"#, true), (r#"{"priority":null}"#, false), (r#"{"messages":[{"priority":3}]}"#, false)] {
        assert_eq!(parse(line("body", body).as_bytes()).unwrap().has_priority, expected, "{body}");
    }
}

#[test]
fn a_batch_may_use_every_v1_api_and_nothing_else() {
    for url in ["/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/audio/transcriptions", "/v1/score"] {
        assert!(parse(line("url", &format!("\"{url}\"")).as_bytes()).is_ok(), "{url}");
    }
    for url in ["/v1", "/v1/", "/v2/x", "/health", "http://host/v1/x", "/v1/../admin", "/v1/a//b", "/v1/a?b", "/v1/a b", "/v10/x", "/v1/é"]
    {
        assert_eq!(refused(&line("url", &format!("\"{url}\""))), LineError::Url(url.to_owned()));
    }
}

#[test]
fn a_wrong_request_line_is_refused_with_the_reason() {
    for (text, expected) in [
        (line("body", r#"{"stream":true}"#), LineError::Stream),
        (line("method", r#""GET""#), LineError::Method("GET".to_owned())),
        (line("custom_id", r#""""#), LineError::EmptyId),
        (line("custom_id", "null"), LineError::Missing("custom_id")),
        (r#"{"custom_id":"a","method":"POST","url":"/v1/x"}"#.to_owned(), LineError::Missing("body")),
        (line("body", "[true]"), LineError::Body("it is no object".to_owned())),
        ("[\"a\",\"POST\",\"/v1/x\",{}]".to_owned(), LineError::NotJson("it does not begin with {".to_owned())),
    ] {
        assert_eq!(refused(&text), expected, "{text}");
    }
    let LineError::NotJson(why) = refused(r#"{"custom_id":"a","#) else { panic!("it is not JSON") };
    assert!(why.ends_with("at column 17"), "{why}");
    let LineError::NotJson(why) = refused(&line("custom_id", "7")) else { panic!("an id is text") };
    assert!(why.contains("expected a string"), "{why}");
    let LineError::Body(why) = refused(&line("body", r#"{"stream":"true"}"#)) else { panic!("engines take it for true") };
    assert!(why.contains("expected a boolean"), "{why}");
}

#[test]
fn a_body_is_limited_to_what_the_router_accepts() {
    let body = |bytes: usize| format!("{{\"a\":\"{}\"}}", "x".repeat(bytes - 8));
    assert!(parse(line("body", &body(MAX_BODY_BYTES)).as_bytes()).is_ok());
    assert_eq!(refused(&line("body", &body(MAX_BODY_BYTES + 1))), LineError::BodyTooLong(MAX_BODY_BYTES));
}

proptest! {
    #[test]
    fn no_bytes_make_the_request_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(&bytes);
    }
}
