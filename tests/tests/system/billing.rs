//! Billing of callers: they pay for all that engines compute for them.
//!
//! Neither repeated text in an answer nor a client that leaves before the end changes that.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use bytes::Bytes;
use hostler_router::keys::{KeyEntry, KeyLimits, Secret, change};
use http::{Method, Request, StatusCode};
use http_body_util::Full;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{Answer, CHAT, Endpoint, Fleet, MODEL, Setup, chat, chat_stream, unresumed_stream, until};

const RESPONSES: &str = "/v1/responses";

/// Token limit above the usage of any test.
const MUCH: u64 = 1_000_000;

/// A fleet whose engines keep responses, and the file of its keys.
async fn billed(agents: usize) -> (Fleet, TempDir, PathBuf) {
    billed_by(agents, "").await
}

/// A billed fleet whose engines have these additional flags.
async fn billed_by(agents: usize, flags: &str) -> (Fleet, TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("keys.toml");
    // A fleet that has keys begins with one.
    key(&file, "first", KeyLimits::default());
    let setup = Setup::agents(agents).engine("--sim-step-ms 1 --sim-store-responses").engine(flags);
    let keys = file.clone();
    (Fleet::start(setup.router(|router| router.keys_file = keys)).await, folder, file)
}

fn key(file: &Path, tenant: &str, limits: KeyLimits) -> String {
    let secret = Secret::random().unwrap();
    let entry = KeyEntry { name: tenant.to_owned(), limits, ..KeyEntry::new(&secret, tenant, SystemTime::now()) };
    change(file, true, |entries| {
        entries.push(entry);
        Ok(())
    })
    .unwrap();
    secret.reveal().to_owned()
}

/// A key that may generate this many tokens in a day, once the router knows it.
async fn paying(fleet: &Fleet, file: &Path, tenant: &str, tokens: u64) -> String {
    let key = key(file, tenant, KeyLimits { output_per_day: Some(tokens), ..KeyLimits::default() });
    until("the router's reading of the key", async || match left(fleet, &key).await {
        Some(_) => Ok(()),
        None => Err("it does not know it".to_owned()),
    })
    .await;
    key
}

fn request(method: Method, path: &str, body: Option<&Value>, key: &str) -> Request<Full<Bytes>> {
    let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
    let body = body.map_or_else(Full::default, |body| Full::from(body.to_string()));
    request.header("authorization", format!("Bearer {key}")).body(body).unwrap()
}

async fn post(fleet: &Fleet, path: &str, body: &Value, key: &str) -> Answer {
    fleet.edge().request(request(Method::POST, path, Some(body), key)).await
}

/// Tokens that a key may still generate.
async fn left(fleet: &Fleet, key: &str) -> Option<u64> {
    let models = fleet.edge().request(request(Method::GET, "/v1/models", None, key)).await;
    models.header("x-ratelimit-remaining-tokens").map(|left| left.parse().unwrap())
}

/// Waits until a key has paid for `tokens`.
async fn until_paid(fleet: &Fleet, key: &str, of: u64, tokens: std::ops::RangeInclusive<u64>) {
    until(&format!("a bill of {tokens:?} tokens"), async || {
        let paid = of - left(fleet, key).await.unwrap();
        if tokens.contains(&paid) { Ok(()) } else { Err(format!("{paid} are paid for")) }
    })
    .await;
}

/// A response of 500 tokens, cut from a longer text, with a tool whose schema has these fields.
fn response(fields: &Value, stream: bool) -> Value {
    let mut schema = json!({"type": "string", "minLength": 9000});
    schema.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    // A tool's schema is part of the prompt, and one that fills the context is refused.
    let mut parameters = fields.clone();
    parameters.as_object_mut().unwrap().remove("x");
    let tool = json!({"type": "function", "name": "f", "parameters": parameters});
    json!({
        "model": MODEL, "input": "Hello", "max_output_tokens": 500, "ignore_eos": true, "stream": stream, "tools": [tool],
        "text": {"format": {"type": "json_schema", "name": "s", "schema": schema}},
    })
}

#[tokio::test(start_paused = true)]
async fn a_schema_that_mentions_zero_usage_makes_nothing_free() {
    let (fleet, _folder, file) = billed(1).await;
    let free = json!({"usage": {"input_tokens": 0, "output_tokens": 0}});
    // Include a case in which the whole is too long to be held.
    let long = json!({"x": "y".repeat(300_000), "usage": {"input_tokens": 0, "output_tokens": 0}});
    for (number, (schema, stream)) in [(&free, false), (&free, true), (&long, false), (&long, true)].into_iter().enumerate() {
        let key = paying(&fleet, &file, &format!("t{number}"), MUCH).await;
        let answer = post(&fleet, RESPONSES, &response(schema, stream), &key).await;
        assert!(answer.status == StatusCode::OK && answer.ended == Ok(()) && answer.text().contains(r#""output_tokens":500"#));
        until_paid(&fleet, &key, MUCH, 500..=500).await;
    }
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_tenant_cannot_inflate_the_lengths_expected_of_others() {
    let (fleet, _folder, file) = billed(1).await;
    let (cheat, other) = (paying(&fleet, &file, "cheat", MUCH).await, paying(&fleet, &file, "other", 100_000).await);
    let schema = json!({"usage": {"input_tokens": 1, "output_tokens": 1_000_000_000_000_000_000_u64}});
    for _ in 0..3 {
        assert_eq!(post(&fleet, RESPONSES, &response(&schema, false), &cheat).await.status, StatusCode::OK);
    }
    let mut body = chat(1);
    body.as_object_mut().unwrap().remove("max_tokens");
    let answer = post(&fleet, CHAT, &body, &other).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_schema_says_abort_runs_once() {
    let (fleet, _folder, file) = billed(3).await;
    let key = paying(&fleet, &file, "t", MUCH).await;
    let schema = json!({"finish_reason": "abort", "choices": [{"finish_reason": "abort"}]});
    let answer = post(&fleet, RESPONSES, &response(&schema, false), &key).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    assert_eq!(fleet.routers[0].metric("hostler_retries_total").await, 0.0);
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_stream_without_usage_costs_the_estimate_at_least() {
    let (fleet, _folder, file) = billed(1).await;
    // No client waits for the end of the first, which would report the usage.
    let leaves = paying(&fleet, &file, "leaves", MUCH).await;
    let mut body = chat_stream(200);
    body["stream_options"] = json!({"include_usage": true});
    let mut leaving = fleet.edge().send(request(Method::POST, CHAT, Some(&body), &leaves)).await;
    leaving.events(3).await;
    drop(leaving);
    fleet.until_idle().await;
    until_paid(&fleet, &leaves, MUCH, 200..=200).await;
    let page = Endpoint::Tcp(fleet.routers[0].admin).get("/metrics").await.text();
    let shown = |line: &str| page.lines().any(|shown| shown == line);
    assert!(
        shown("hostler_tenant_requests_total{tenant=\"leaves\"} 1") && shown("hostler_tenant_in_flight{tenant=\"leaves\"} 0"),
        "{page}"
    );

    let silent = paying(&fleet, &file, "silent", MUCH).await;
    post(&fleet, CHAT, &chat_stream(600), &silent).await.assert_whole_stream();
    // A reservation for an answer is 256 tokens at first; each of the 600 came in a separate event.
    until_paid(&fleet, &silent, MUCH, 590..=602).await;
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn each_token_costs_where_events_have_twenty() {
    let (fleet, _folder, file) = billed_by(1, "--stream-interval 20").await;
    // The router has only the text of such a stream. A reservation is 256 tokens at first.
    let unknown = paying(&fleet, &file, "unknown", MUCH).await;
    post(&fleet, CHAT, &unresumed_stream(1500), &unknown).await.assert_whole_stream();
    until_paid(&fleet, &unknown, MUCH, 500..=1500).await;

    let known = paying(&fleet, &file, "known", MUCH).await;
    post(&fleet, CHAT, &chat_stream(1500), &known).await.assert_whole_stream();
    until_paid(&fleet, &known, MUCH, 1500..=1500).await;
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn reading_a_stored_response_costs_nothing() {
    let (fleet, _folder, file) = billed(1).await;
    let key = paying(&fleet, &file, "t", MUCH).await;
    let made = post(&fleet, RESPONSES, &json!({"model": MODEL, "input": "Hello", "max_output_tokens": 40, "ignore_eos": true}), &key).await;
    let id = made.json()["id"].as_str().unwrap().to_owned();
    until_paid(&fleet, &key, MUCH, 40..=40).await;
    for _ in 0..3 {
        let found = fleet.edge().request(request(Method::GET, &format!("{RESPONSES}/{id}"), None, &key)).await;
        assert_eq!(found.json()["usage"]["output_tokens"], 40);
    }
    fleet.until_idle().await;
    assert_eq!(left(&fleet, &key).await, Some(MUCH - 40));
}

#[tokio::test(start_paused = true)]
async fn background_requests_that_cannot_be_counted_are_refused() {
    let (fleet, _folder, file) = billed(1).await;
    let body = |stream: bool| json!({"model": MODEL, "input": "Hello", "max_output_tokens": 4, "background": true, "stream": stream});
    let limits = [
        KeyLimits { output_per_day: Some(MUCH), ..KeyLimits::default() },
        KeyLimits { input_per_minute: Some(MUCH), ..KeyLimits::default() },
        KeyLimits { in_flight: Some(1), ..KeyLimits::default() },
    ];
    for (number, limits) in limits.into_iter().enumerate() {
        let key = key(&file, &format!("t{number}"), limits);
        until("the router's reading of the key", async || {
            let refused = post(&fleet, RESPONSES, &body(number == 0), &key).await;
            if refused.status == StatusCode::UNAUTHORIZED { Err(refused.text()) } else { Ok(()) }
        })
        .await;
        let refused = post(&fleet, RESPONSES, &body(number == 0), &key).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{}", refused.text());
        assert!(refused.message().contains("`background` is not for keys with limits"), "{}", refused.text());
        let mut waited_for = body(false);
        waited_for["background"] = json!(false);
        assert_eq!(post(&fleet, RESPONSES, &waited_for, &key).await.status, StatusCode::OK);
    }
    let free = key(&file, "free", KeyLimits { requests_per_minute: Some(100), ..KeyLimits::default() });
    until("an answer to a key without such limits", async || {
        let queued = post(&fleet, RESPONSES, &body(false), &free).await;
        if queued.status == StatusCode::OK { Ok(()) } else { Err(queued.text()) }
    })
    .await;
}
