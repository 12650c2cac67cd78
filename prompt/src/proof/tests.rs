//! Tests of the comparison with an engine.

use super::*;
use crate::fixture::{self, CHATML};

fn tokens(encoder: &Encoder, body: &Value) -> Vec<u32> {
    encoder.encode(&Request::parse("/tokenize", body.to_string().as_bytes()).unwrap()).unwrap().tokens
}

fn compared(encoder: &Encoder, body: &Value, status: u16, answer: &Value) -> Result<(), String> {
    compare(encoder, body.to_string().as_bytes(), status, answer.to_string().as_bytes()).map_err(|difference| difference.to_string())
}

#[test]
fn every_sample_is_a_request_and_equal_tokens_agree() {
    let encoder = fixture::encoder(CHATML);
    for sample in samples() {
        let tokens = tokens(&encoder, &sample);
        assert!(!tokens.is_empty());
        assert_eq!(compared(&encoder, &sample, 200, &json!({ "count": tokens.len(), "tokens": tokens })), Ok(()));
    }
}

#[test]
fn the_first_token_that_differs_is_named() {
    let encoder = fixture::encoder(CHATML);
    let body = json!({ "prompt": "abc" });
    let mut tokens = tokens(&encoder, &body);
    let last = tokens.pop().unwrap();
    assert_eq!(
        compared(&encoder, &body, 200, &json!({ "tokens": tokens })).unwrap_err(),
        format!("token 2 is {last} for the router, the end for the engine, for {{\"prompt\":\"abc\"}}")
    );
    tokens.extend([last, 7]);
    assert!(compared(&encoder, &body, 200, &json!({ "tokens": tokens })).unwrap_err().starts_with("token 3 is the end for the router, 7"));
}

#[test]
fn a_refusal_of_both_agrees_and_of_one_does_not() {
    let refusing = fixture::encoder("{{ raise_exception('no') }}");
    let body = json!({ "messages": [{ "role": "user", "content": "a" }] });
    assert_eq!(compared(&refusing, &body, 400, &json!({ "error": {} })), Ok(()));
    assert!(compared(&refusing, &body, 200, &json!({ "tokens": [1] })).unwrap_err().contains("the chat template refused: no"));
    assert!(compared(&fixture::encoder(CHATML), &body, 400, &json!({})).unwrap_err().contains("refuses (400)"));
}

#[test]
fn an_answer_without_tokens_is_no_proof() {
    let encoder = fixture::encoder(CHATML);
    for (status, answer) in [(200, json!({})), (404, json!({ "detail": "Not Found" })), (503, json!({}))] {
        assert!(compared(&encoder, &json!({ "prompt": "a" }), status, &answer).unwrap_err().contains("has no tokens"));
    }
    assert!(compared(&encoder, &json!({}), 200, &json!({ "tokens": [] })).is_err());
}
