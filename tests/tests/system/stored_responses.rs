//! Responses that an engine keeps.
//!
//! Their creator finds, continues and ends them, through any router that may know, and nobody else
//! does.

use std::path::Path;

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::Full;
use serde_json::{Value, json};

use crate::harness::{Answer, Endpoint, Fleet, MODEL, Setup, hostler, soon};

const RESPONSES: &str = "/v1/responses";

fn keeping(routers: usize) -> Setup {
    Setup::agents(3).routers(routers).engine("--sim-step-ms 1 --sim-store-responses")
}

fn request(method: Method, path: &str, body: &Value, key: &str) -> Request<Full<Bytes>> {
    let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
    let request = if key.is_empty() { request } else { request.header("authorization", format!("Bearer {key}")) };
    request.body(Full::from(if body.is_null() { String::new() } else { body.to_string() })).unwrap()
}

async fn make(edge: &Endpoint, changes: Value, key: &str) -> Answer {
    let mut body = json!({"model": MODEL, "input": "Hello", "max_output_tokens": 4});
    body.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    edge.request(request(Method::POST, RESPONSES, &body, key)).await
}

async fn about(edge: &Endpoint, method: Method, id: &str, below: &str, key: &str) -> Answer {
    edge.request(request(method, &format!("{RESPONSES}/{id}{below}"), &Value::Null, key)).await
}

/// Id of a response, whole or streamed.
fn id(answer: &Answer) -> String {
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    let text = answer.text();
    text[text.find("\"id\":\"").unwrap() + 6..].split('"').next().unwrap().to_owned()
}

/// Checks that an answer says, in an engine's words, that there is no such response.
fn assert_missing(answer: &Answer, id: &str) {
    let message = format!("Response with id '{id}' not found.");
    let error = json!({"error": {"message": message, "type": "invalid_request_error", "param": "response_id", "code": 404}});
    assert_eq!((answer.status, answer.json()), (StatusCode::NOT_FOUND, error));
}

#[tokio::test(start_paused = true)]
async fn a_stored_response_is_found_and_continued_on_its_engine() {
    let fleet = Fleet::start(keeping(2)).await;
    let (edge, other) = (fleet.routers[0].edge(), fleet.routers[1].edge());
    // There are so many that chance would not find even half of them.
    for number in 0..9 {
        let made = make(&edge, json!({"stream": number % 3 == 1, "background": number % 3 == 2}), "").await;
        let id = id(&made);
        for router in [&edge, &other, &other] {
            let found = about(router, Method::GET, &id, "", "").await;
            assert_eq!((found.status, &found.json()["id"]), (StatusCode::OK, &json!(id)), "number {number}");
            let after = make(router, json!({"previous_response_id": id, "stream": number % 2 == 0}), "").await;
            assert_eq!(after.status, StatusCode::OK, "number {number}: {}", after.text());
        }
        let unchanged = about(&other, Method::DELETE, &id, "", "").await;
        assert_eq!((unchanged.status, unchanged.header("allow")), (StatusCode::METHOD_NOT_ALLOWED, Some("GET")));
    }
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_continuation_whose_engine_died_is_refused_at_once() {
    let fleet = Fleet::start(keeping(1).engine("--sim-die-on deadly")).await;
    let edge = fleet.edge();
    let made = id(&make(&edge, json!({}), "").await);
    // No other engine knows the response, and it is a suspect now.
    let lost = make(&edge, json!({"previous_response_id": made, "input": "deadly"}), "");
    let lost = soon("an answer", lost).await;
    assert!(lost.status.is_client_error() || lost.status.is_server_error(), "{} {}", lost.status, lost.text());
}

#[tokio::test(start_paused = true)]
async fn a_background_response_is_cancelled_where_it_runs() {
    let fleet = Fleet::start(keeping(2)).await;
    for number in 0..6 {
        let (edge, other) = (fleet.routers[number % 2].edge(), fleet.routers[1 - number % 2].edge());
        let made = id(&make(&edge, json!({"background": true, "max_output_tokens": 10_000, "ignore_eos": true}), "").await);
        let ended = about(&other, Method::POST, &made, "/cancel", "").await;
        assert_eq!((ended.status, &ended.json()["status"]), (StatusCode::OK, &json!("cancelled")), "{}", ended.text());
        let again = about(&edge, Method::POST, &made, "/cancel", "").await;
        assert_eq!(again.status, StatusCode::BAD_REQUEST, "{}", again.text());
    }
}

#[tokio::test(start_paused = true)]
async fn a_response_that_nobody_keeps_is_not_found() {
    let fleet = Fleet::start(keeping(1)).await;
    let edge = fleet.edge();
    let forgotten = id(&make(&edge, json!({"store": false}), "").await);
    for id in [&forgotten, "resp_none", "resp_%C3%BC"] {
        let decoded = id.replace("%C3%BC", "ü");
        assert_missing(&about(&edge, Method::GET, id, "", "").await, &decoded);
        assert_missing(&about(&edge, Method::POST, id, "/cancel", "").await, &decoded);
        assert_missing(&make(&edge, json!({"previous_response_id": decoded}), "").await, &decoded);
    }
    // The engine dies, and its kept responses with it.
    let kept = id(&make(&edge, json!({}), "").await);
    for agent in 0..3 {
        let before = fleet.replica(&format!("n{agent}/0")).await.epoch;
        fleet.kill(&format!("n{agent}/0")).await;
        fleet.until_replica(&format!("n{agent}/0"), "another life", |replica| replica.is_ready() && replica.epoch != before).await;
    }
    assert_missing(&about(&edge, Method::GET, &kept, "", "").await, &kept);
}

async fn key(file: &Path, tenant: &str) -> String {
    let made = hostler(&["keys", "create", "--tenant", tenant, "--file", file.to_str().unwrap()]).await;
    assert!(made.success, "{}", made.stderr);
    made.stdout.split_whitespace().find(|word| word.starts_with("hk_")).unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stored_response_is_visible_only_to_its_tenant() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys.toml");
    let (owner, same_tenant, other) = (key(&file, "us").await, key(&file, "us").await, key(&file, "them").await);
    let fleet = Fleet::start(keeping(2).router(|router| router.keys_file = file)).await;
    let edge = fleet.routers[0].edge();
    let kept = id(&make(&edge, json!({}), &owner).await);
    let running = id(&make(&edge, json!({"background": true, "max_output_tokens": 10_000, "ignore_eos": true}), &owner).await);
    for key in [&owner, &same_tenant] {
        assert_eq!(id(&about(&edge, Method::GET, &kept, "", key).await), kept);
    }
    let found = edge.request(request(Method::GET, &format!("{RESPONSES}/{kept}"), &Value::Null, &other)).await;
    assert_missing(&found, &kept);
    let escaped = edge.request(request(Method::GET, &format!("/v1/%72esponses/{kept}"), &Value::Null, &other)).await;
    assert_eq!(escaped.status, StatusCode::BAD_REQUEST, "{}", escaped.text());
    assert_missing(&about(&edge, Method::POST, &running, "/cancel", &other).await, &running);
    assert_missing(&make(&edge, json!({"previous_response_id": kept}), &other).await, &kept);
    let replaced = make(&edge, json!({"request_id": kept}), &other).await;
    assert_eq!(replaced.status, StatusCode::FORBIDDEN, "{}", replaced.text());
    // Only the first router knows the owner.
    assert_missing(&about(&fleet.routers[1].edge(), Method::GET, &kept, "", &owner).await, &kept);
    assert_eq!(about(&edge, Method::POST, &running, "/cancel", &same_tenant).await.json()["status"], "cancelled");
}
