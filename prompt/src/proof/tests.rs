//! Tests of the comparison with an engine.

use super::*;
use crate::fixture::{self, CHATML};

fn tokens(encoder: &Encoder, body: &Value) -> Vec<u32> {
    encoder.encode(&PromptRequest::parse("/tokenize", body.to_string().as_bytes()).unwrap()).unwrap().tokens
}

fn compared(encoder: &Encoder, body: &Value, status: u16, answer: &Value) -> Result<Agreement, String> {
    let (body, answer) = (body.to_string(), answer.to_string());
    compare(encoder, Dialect::Python, body.as_bytes(), (status, answer.as_bytes())).map_err(|difference| difference.to_string())
}

#[test]
fn every_sample_encodes_and_equal_tokens_agree() {
    let encoder = fixture::encoder(CHATML);
    let mut coverage = Coverage::default();
    for sample in samples() {
        let tokens = tokens(&encoder, &sample);
        assert!(!tokens.is_empty());
        let agreement = compared(&encoder, &sample, 200, &json!({ "count": tokens.len(), "tokens": tokens }));
        assert_eq!(agreement, Ok(Agreement::Tokens));
        coverage.record(&sample, Ok(Agreement::Tokens));
    }
    assert_eq!(coverage.into_result(), Ok(ProofResult { forms: PromptForms::ALL, samples: samples().len(), doubt: None }));
}

#[test]
fn samples_refused_by_the_engine_neither_prove_nor_disprove() {
    let empty = json!({ "messages": [{ "role": "user", "content": "" }] });
    assert_eq!(compared(&fixture::encoder(CHATML), &empty, 400, &json!({})), Ok(Agreement::Nothing));
    let refusing =
        |refused: fn(&Value) -> bool| proof(|sample| if refused(sample) { Ok(Agreement::Nothing) } else { Ok(Agreement::Tokens) });
    let all_but_one = ProofResult { forms: PromptForms::ALL, samples: samples().len() - 1, doubt: None };
    assert_eq!(refusing(|sample| *sample == json!({ "messages": [{ "role": "user", "content": "" }] })), Ok(all_but_one));
    let without_tools = refusing(|sample| sample.get("tools").is_some()).unwrap();
    assert_eq!(PromptForms::ALL.without(without_tools.forms), PromptForms::default().with(PromptForm::Tools));
    assert!(without_tools.doubt.unwrap().contains("refuses all samples of tools"));
    let without_texts = refusing(|sample| sample.get("prompt").is_some()).unwrap();
    assert_eq!(PromptForms::ALL.without(without_texts.forms), PromptForms::default().with(PromptForm::Texts));
    assert!(refusing(|_| true).unwrap_err().contains("all samples of texts"));
    assert!(proof(|_| Ok(Agreement::Refusal)).unwrap_err().contains("neither"));
}

/// Result if each sample is compared in this way.
fn proof(compared: impl Fn(&Value) -> Result<Agreement, Difference>) -> Result<ProofResult, String> {
    let mut coverage = Coverage::default();
    samples().iter().for_each(|sample| coverage.record(sample, compared(sample)));
    coverage.into_result()
}

fn forms(sample: &Value) -> PromptForms {
    PromptRequest::parse("/tokenize", sample.to_string().as_bytes()).unwrap().forms()
}

fn different(sample: &Value) -> Result<Agreement, Difference> {
    let what = DifferenceKind::Token { position: 0, encoder: Some(1), engine: None };
    Err(Difference { sample: shortened(sample.to_string().as_bytes()), what })
}

#[test]
fn every_form_has_its_own_sample() {
    let own: PromptForms = samples().iter().filter_map(|sample| forms(sample).iter().next_back()).collect();
    assert_eq!(own, PromptForms::ALL);
}

#[test]
fn only_the_form_that_differs_stays_unproved() {
    for form in PromptForm::ALL {
        let is_own = |sample: &Value| forms(sample).iter().next_back() == Some(form);
        let proved = proof(|sample| if is_own(sample) { different(sample) } else { Ok(Agreement::Tokens) }).unwrap();
        assert_eq!(PromptForms::ALL.without(proved.forms), PromptForms::default().with(form));
        assert_eq!(proved.samples, samples().iter().filter(|sample| !is_own(sample)).count());
        assert!(proved.doubt.unwrap().starts_with("token 0 is 1 for the router, the end for the engine"));
    }
}

#[test]
fn one_difference_outweighs_all_agreements_of_its_form() {
    let parts = |sample: &Value| forms(sample).has(PromptForm::Parts);
    let (first, last) = (samples().into_iter().find(parts).unwrap(), samples().into_iter().rfind(parts).unwrap());
    assert_ne!(first, last);
    for one in [first, last] {
        let proved = proof(|sample| if *sample == one { different(sample) } else { Ok(Agreement::Tokens) }).unwrap();
        assert_eq!(PromptForms::ALL.without(proved.forms), PromptForms::default().with(PromptForm::Parts));
    }
}

#[test]
fn an_engine_differs_when_both_texts_and_chats_differ() {
    let differing = |of: &'static [PromptForm]| {
        let is_one = move |sample: &Value| forms(sample).iter().next_back().is_some_and(|own| of.contains(&own));
        proof(|sample| if is_one(sample) { different(sample) } else { Ok(Agreement::Tokens) })
    };
    assert!(differing(&[PromptForm::Texts, PromptForm::Chats]).unwrap_err().contains("quick brown fox"));
    assert_eq!(differing(&[PromptForm::Chats]).unwrap().forms.unproved_remark(), "chats are placed by text");
    assert!(
        differing(&[PromptForm::Chats, PromptForm::Closed, PromptForm::Continued, PromptForm::Parts, PromptForm::Tools])
            .unwrap()
            .forms
            .has(PromptForm::Texts)
    );
}

#[test]
fn engine_failures_agree_only_where_the_template_refuses() {
    let body = json!({ "messages": [{ "role": "user", "content": "a" }] });
    assert_eq!(compared(&fixture::encoder("{{ raise_exception('no') }}"), &body, 500, &json!({})), Ok(Agreement::Refusal));
    let text = body.to_string();
    assert!(compare(&fixture::encoder(CHATML), Dialect::Rust, text.as_bytes(), (500, b"{}")).unwrap_err().is_no_answer());
    assert!(!compare(&fixture::encoder(CHATML), Dialect::Rust, text.as_bytes(), (200, b"{\"tokens\":[1]}")).unwrap_err().is_no_answer());
}

#[test]
fn the_first_differing_token_is_named() {
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
fn only_a_refusal_by_both_sides_agrees() {
    let refusing = fixture::encoder("{{ raise_exception('no') }}");
    let body = json!({ "messages": [{ "role": "user", "content": "a" }] });
    assert_eq!(compared(&refusing, &body, 400, &json!({ "error": {} })), Ok(Agreement::Refusal));
    assert!(compared(&refusing, &body, 200, &json!({ "tokens": [1] })).unwrap_err().contains("the chat template refused: no"));
}

#[test]
fn an_answer_without_tokens_is_no_proof() {
    let encoder = fixture::encoder(CHATML);
    for (status, answer) in [(200, json!({})), (404, json!({ "detail": "Not Found" })), (503, json!({}))] {
        assert!(compared(&encoder, &json!({ "prompt": "a" }), status, &answer).unwrap_err().contains("has no tokens"));
    }
    assert!(compared(&encoder, &json!({}), 200, &json!({ "tokens": [] })).is_err());
}
