use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use hostler_prompt::{Dialect, Encoder, PromptForm, PromptForms, PromptRequest};
use hostler_proto::agent::v1::frame::Kind;
use hostler_proto::agent::v1::{Frame, FrameBatch, ResponseHead};
use hostler_proto::lane::{StreamFault, WINDOW_BYTES};
use prometheus_client::metrics::counter::Counter;
use rustc_hash::FxHashMap;

use crate::lanes::{Lane, Lanes};
use crate::prompt::bundle::build_encoder;
use crate::prompt::tests::{TENANT, body, bundle, nothing_kept, reader, unproved};
use crate::prompt::{EncoderKey, EncoderStatus, NotEncoded};

/// An engine's answer to a request behind a lane: status and body.
pub(crate) type Answers = Box<dyn Fn(&str, &[u8]) -> (u32, Vec<u8>) + Send>;

/// An engine at the other end of a lane, until the lane is lost.
pub(in crate::prompt) fn engine(answers: Answers) -> (Arc<Lanes>, Arc<Lane>) {
    let (lanes, lane) = (Arc::new(Lanes::default()), Lane::new(Counter::default()));
    lanes.add(&lane);
    serve(&lane, answers);
    (lanes, lane)
}

/// Has an engine answer the requests of a lane, until the lane is lost.
pub(crate) fn serve(lane: &Arc<Lane>, answers: Answers) {
    let (mut batches, served) = (lane.outbox().batches(), lane.clone());
    tokio::spawn(async move {
        let mut open: FxHashMap<u64, (String, Vec<u8>)> = FxHashMap::default();
        // What the router has not asked for yet of long answers.
        let mut unsent: FxHashMap<u64, Bytes> = FxHashMap::default();
        while let Some(batch) = batches.next().await {
            for Frame { id, kind } in batch.frames {
                match kind {
                    Some(Kind::Request(head)) => {
                        assert!(head.method == "POST" && head.aside);
                        open.insert(id, (head.path, Vec::new()));
                    }
                    Some(Kind::Body(bytes)) => open.get_mut(&id).unwrap().1.extend_from_slice(&bytes),
                    Some(Kind::End(_)) => {
                        let (path, body) = open.remove(&id).unwrap();
                        let (status, answer) = answers(&path, &body);
                        let head = Kind::Response(ResponseHead { status, headers: Vec::new() });
                        served.receive(FrameBatch { frames: vec![Frame::new(id, head)] });
                        unsent.insert(id, answer.into());
                        send_rest(&served, &mut unsent, id, WINDOW_BYTES);
                    }
                    Some(Kind::Credit(bytes)) => send_rest(&served, &mut unsent, id, bytes as usize),
                    _ => {}
                }
            }
        }
    });
}

/// Sends so many bytes of what is left of an answer, and its end behind the last.
fn send_rest(lane: &Lane, unsent: &mut FxHashMap<u64, Bytes>, id: u64, credit: usize) {
    let Some(rest) = unsent.get_mut(&id) else { return };
    let mut frames = vec![Frame::new(id, Kind::Body(rest.split_to(credit.min(rest.len()))))];
    if rest.is_empty() {
        unsent.remove(&id);
        frames.push(Frame::end(id, None));
    }
    lane.receive(FrameBatch { frames });
}

/// Tokenizes as vLLM does with its Python front-end.
fn tokenizes(encoder: &Encoder, path: &str, body: &[u8]) -> (u32, Vec<u8>) {
    tokenizes_in(Dialect::Python, encoder, path, body)
}

fn tokenizes_in(dialect: Dialect, encoder: &Encoder, path: &str, body: &[u8]) -> (u32, Vec<u8>) {
    let named: serde_json::Value = serde_json::from_slice(body).unwrap();
    assert_eq!((path, named["model"].as_str()), ("/tokenize", Some("small")));
    match PromptRequest::parse(path, body).map(|request| encoder.encode_in(dialect, &request)) {
        Some(Ok(encoded)) => {
            let answer = serde_json::json!({ "count": encoded.tokens.len(), "max_model_len": 4096, "tokens": encoded.tokens });
            (200, answer.to_string().into_bytes())
        }
        _ => (400, br#"{"error":{"message":"refused"}}"#.to_vec()),
    }
}

fn with_words_from(first: u32) -> Answers {
    let encoder = build_encoder(&bundle(first), 1024).unwrap();
    Box::new(move |path, body| tokenizes(&encoder, path, body))
}

#[tokio::test]
async fn an_encoder_that_agrees_with_the_engine_is_proved() {
    let prompts = nothing_kept();
    let hash = unproved(&prompts, &bundle(0)).await;
    let (lanes, _lane) = engine(with_words_from(0));
    prompts.prove(reader(hash), &lanes, 3, "small").await;
    assert_eq!(prompts.status(&reader(hash)), EncoderStatus::Proved);
    assert_eq!(prompts.encode((TENANT, &reader(hash)), "/v1/completions", body("hello world"), |_| true).await.unwrap().tokens, [1, 2]);
}

/// An engine with the Rust front-end, which refuses messages without text.
fn rust_with_words_from(first: u32) -> Answers {
    let encoder = build_encoder(&bundle(first), 1024).unwrap();
    Box::new(move |path, body| {
        let named: serde_json::Value = serde_json::from_slice(body).unwrap();
        if named["messages"][0]["content"] == "" {
            return (400, br#"{"error":{"message":"message content cannot be empty"}}"#.to_vec());
        }
        tokenizes_in(Dialect::Rust, &encoder, path, body)
    })
}

#[tokio::test]
async fn each_front_end_is_proved_by_its_own_rules() {
    let prompts = nothing_kept();
    let hash = unproved(&prompts, &bundle(0)).await;
    let (python, rust) = (reader(hash), EncoderKey { files: hash, dialect: Dialect::Rust });
    let parts = |dialect| {
        let text = |text: &str| serde_json::json!({ "type": "text", "text": text });
        let body = serde_json::json!({ "messages": [{ "role": "user", "content": [text("hello"), text("world")] }] }).to_string();
        let prompts = prompts.clone();
        async move { prompts.encode((TENANT, &EncoderKey { files: hash, dialect }), "/v1/chat/completions", body.into(), |_| true).await }
    };
    let (lanes, _lane) = engine(rust_with_words_from(0));
    prompts.prove(rust, &lanes, 3, "small").await;
    assert_eq!((prompts.status(&rust), prompts.status(&python)), (EncoderStatus::Proved, EncoderStatus::Unproved));
    // No part of `user : helloworld` is a known word.
    assert_eq!(parts(Dialect::Rust).await.unwrap().tokens, [0, 0, 0]);
    assert_eq!(parts(Dialect::Python).await.err(), Some(NotEncoded::NotProved));
    let (lanes, _lane) = engine(with_words_from(0));
    prompts.prove(python, &lanes, 3, "small").await;
    assert_eq!(prompts.status(&python), EncoderStatus::Proved);
    assert_eq!(parts(Dialect::Python).await.unwrap().tokens, [0, 0, 1, 2]);
}

#[tokio::test]
async fn a_different_text_joiner_leaves_only_parts_unproved() {
    let prompts = nothing_kept();
    let hash = unproved(&prompts, &bundle(0)).await;
    let (lanes, _lane) = engine(rust_with_words_from(0));
    prompts.prove(reader(hash), &lanes, 3, "small").await;
    let standing = prompts.status(&reader(hash));
    assert!(standing.is_proved() && standing.reason().starts_with("messages in parts"), "{standing:?}");
    let encoded = |content: serde_json::Value| {
        let body = serde_json::json!({ "messages": [{ "role": "user", "content": content }] }).to_string();
        let prompts = prompts.clone();
        async move { prompts.encode((TENANT, &reader(hash)), "/v1/chat/completions", body.into(), |_| true).await }
    };
    assert_eq!(encoded("hello".into()).await.unwrap().tokens, [0, 0, 1]);
    let parts = serde_json::json!([{ "type": "text", "text": "hello" }]);
    assert_eq!(encoded(parts).await, Err(NotEncoded::FormNotProved(PromptForm::Parts)));
}

/// An engine that ignores `continue_final_message`, as the Rust front-end of vLLM 0.24 does, or
/// refuses it.
fn that_continues_nothing(refuses: bool) -> Answers {
    let encoder = build_encoder(&bundle(0), 1024).unwrap();
    Box::new(move |path, body| {
        let mut fields: serde_json::Value = serde_json::from_slice(body).unwrap();
        let continues = fields.as_object_mut().unwrap().remove("continue_final_message").is_some();
        let (status, answer) = tokenizes(&encoder, path, fields.to_string().as_bytes());
        match (continues, refuses) {
            (false, _) => return (status, answer),
            (true, true) => return (400, b"{}".to_vec()),
            (true, false) => {}
        }
        // Most templates end a message with a special token.
        let mut answer: serde_json::Value = serde_json::from_slice(&answer).unwrap();
        answer["tokens"].as_array_mut().unwrap().push(2.into());
        (status, answer.to_string().into_bytes())
    })
}

#[tokio::test]
async fn an_engine_that_differs_in_one_form_keeps_the_others() {
    for refuses in [false, true] {
        let prompts = nothing_kept();
        let hash = unproved(&prompts, &bundle(0)).await;
        let (lanes, _lane) = engine(that_continues_nothing(refuses));
        prompts.prove(reader(hash), &lanes, 3, "small").await;
        let standing = prompts.status(&reader(hash));
        assert_eq!(standing, EncoderStatus::PartlyProved(PromptForms::ALL.without(PromptForms::default().with(PromptForm::Continued))));
        assert_eq!((standing.as_str(), standing.reason().as_str()), ("proved", "continued messages are placed by text"));
        assert_eq!(prompts.encode((TENANT, &reader(hash)), "/v1/completions", body("hello world"), |_| true).await.unwrap().tokens, [1, 2]);
        let chat = |others: serde_json::Value| {
            let mut body = others;
            body["messages"] = serde_json::json!([{ "role": "user", "content": "hello" }]);
            let prompts = prompts.clone();
            async move { prompts.encode((TENANT, &reader(hash)), "/v1/chat/completions", body.to_string().into(), |_| true).await }
        };
        assert_eq!(chat(serde_json::json!({})).await.unwrap().tokens, [0, 0, 1]);
        assert_eq!(chat(serde_json::json!({ "add_generation_prompt": false })).await.unwrap().tokens, [0, 0, 1]);
        let continued = serde_json::json!({ "add_generation_prompt": false, "continue_final_message": true });
        assert_eq!(chat(continued).await, Err(NotEncoded::FormNotProved(PromptForm::Continued)));
        assert_eq!(prompts.stats().failed, 0, "neither a template nor a tokenizer refused it");
    }
}

#[tokio::test]
async fn an_encoder_that_differs_from_the_engine_is_not_used() {
    let prompts = nothing_kept();
    let hash = unproved(&prompts, &bundle(0)).await;
    let (lanes, _lane) = engine(with_words_from(1));
    prompts.prove(reader(hash), &lanes, 3, "small").await;
    assert!(matches!(prompts.status(&reader(hash)), EncoderStatus::Mismatch(why) if !why.is_empty()));
    assert_eq!(
        prompts.encode((TENANT, &reader(hash)), "/v1/completions", body("hello world"), |_| true).await.err(),
        Some(NotEncoded::NotProved)
    );
}

#[tokio::test(start_paused = true)]
async fn a_failing_engine_leaves_the_encoder_unproved() {
    let prompts = nothing_kept();
    let hash = unproved(&prompts, &bundle(0)).await;
    for status in [404, 500, 503, 0, u32::MAX] {
        let (lanes, _lane) = engine(Box::new(move |_, _| (status, b"{}".to_vec())));
        prompts.prove(reader(hash), &lanes, 3, "small").await;
        assert_eq!(prompts.status(&reader(hash)), EncoderStatus::Unproved, "{status}");
        tokio::time::advance(Duration::from_secs(1)).await;
    }
    let (lanes, _lane) = engine(with_words_from(0));
    prompts.prove(reader(hash), &lanes, 3, "small").await;
    assert_eq!(prompts.status(&reader(hash)), EncoderStatus::Proved);
}

#[tokio::test]
async fn a_lost_lane_leaves_the_encoder_unproved() {
    let prompts = nothing_kept();
    let hash = unproved(&prompts, &bundle(0)).await;
    let (lanes, lane) = engine(with_words_from(0));
    lane.mark_lost(&StreamFault::lane_lost());
    prompts.prove(reader(hash), &lanes, 3, "small").await;
    assert_eq!(prompts.status(&reader(hash)), EncoderStatus::Unproved);
}

#[tokio::test]
async fn an_overlong_tokenize_answer_is_not_read_to_the_end() {
    let prompts = nothing_kept();
    let hash = unproved(&prompts, &bundle(0)).await;
    let lanes = Arc::new(Lanes::default());
    let lane = Lane::new(Counter::default());
    lanes.add(&lane);
    let (mut batches, served) = (lane.outbox().batches(), lane.clone());
    tokio::spawn(async move {
        // The engine sends as much as it has credit for, and never ends.
        while let Some(batch) = batches.next().await {
            for Frame { id, kind } in batch.frames {
                let frames = match kind {
                    Some(Kind::End(_)) => vec![
                        Frame::new(id, Kind::Response(ResponseHead { status: 200, headers: Vec::new() })),
                        Frame::new(id, Kind::Body(vec![b' '; hostler_proto::lane::WINDOW_BYTES].into())),
                    ],
                    Some(Kind::Credit(bytes)) => vec![Frame::new(id, Kind::Body(vec![b' '; bytes as usize].into()))],
                    _ => Vec::new(),
                };
                served.receive(FrameBatch { frames });
            }
        }
    });
    prompts.prove(reader(hash), &lanes, 3, "small").await;
    assert_eq!(prompts.status(&reader(hash)), EncoderStatus::Unproved);
    assert_eq!(lane.open_request_count(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_silent_engine_is_waited_for_until_the_deadline() {
    let prompts = nothing_kept();
    let hash = unproved(&prompts, &bundle(0)).await;
    let lanes = Arc::new(Lanes::default());
    let lane = Lane::new(Counter::default());
    lanes.add(&lane);
    let begun = tokio::time::Instant::now();
    prompts.prove(reader(hash), &lanes, 3, "small").await;
    assert_eq!(prompts.status(&reader(hash)), EncoderStatus::Unproved);
    assert!(begun.elapsed() >= super::SAMPLE_DEADLINE);
    assert_eq!(lane.open_request_count(), 0, "the request was cancelled");
}

#[tokio::test]
async fn an_abandoned_proof_may_be_repeated() {
    let prompts = nothing_kept();
    let hash = unproved(&prompts, &bundle(0)).await;
    let silent = Arc::new(Lanes::default());
    silent.add(&Lane::new(Counter::default()));
    let mut comparing = Box::pin(prompts.prove(reader(hash), &silent, 3, "small"));
    assert!(futures_util::poll!(comparing.as_mut()).is_pending());
    let (lanes, _lane) = engine(with_words_from(0));
    prompts.prove(reader(hash), &lanes, 3, "small").await;
    assert_eq!(prompts.status(&reader(hash)), EncoderStatus::Unproved, "one comparison at a time");
    drop(comparing);
    prompts.prove(reader(hash), &lanes, 3, "small").await;
    assert_eq!(prompts.status(&reader(hash)), EncoderStatus::Proved);
}
