//! Access log: every request has one line when it has ended, however it ended.

use std::path::{Path, PathBuf};

use hostler_router::AccessFormat;
use http::Request;
use http_body_util::Full;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{CHAT, Endpoint, Fleet, MODEL, Setup, chat, chat_stream, raw, unresumed_stream, until};

async fn fleet(setup: Setup) -> (Fleet, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = log_of(&folder);
    let fleet = Fleet::start(setup.router(|router| {
        router.access_log = AccessFormat::Json;
        router.access_log_file = path;
    }))
    .await;
    (fleet, folder)
}

fn log_of(folder: &TempDir) -> PathBuf {
    folder.path().join("access.log")
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

async fn line(folder: &TempDir, what: &str, is: impl Fn(&Value) -> bool) -> Value {
    let path = log_of(folder);
    until(&format!("the line of {what}"), async || {
        let found = lines(&path);
        let mut ours = found.iter().filter(|line| is(line));
        match (ours.next(), ours.next()) {
            (Some(line), None) => Ok(line.clone()),
            _ => Err(format!("{found:#?}")),
        }
    })
    .await
}

async fn line_of(folder: &TempDir, id: Option<&str>) -> Value {
    let id = id.expect("an answer of an engine has our id").to_owned();
    line(folder, &id, |line| line["id"] == *id).await
}

fn request(body: &Value, headers: &[(&str, &str)]) -> Request<Full<bytes::Bytes>> {
    let request = Request::post(format!("{CHAT}?api_key=hidden")).header("content-type", "application/json");
    let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    request.body(Full::from(body.to_string())).unwrap()
}

#[tokio::test(start_paused = true)]
async fn an_answer_is_logged_with_its_costs_without_its_text() {
    let (fleet, folder) = fleet(Setup::agents(1).engine("--enable-prompt-tokens-details")).await;
    let labels = [("x-request-id", "job-7"), ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")];
    let plain = fleet.edge().request(request(&chat(5), &labels)).await;
    let line = line_of(&folder, plain.header("x-hostler-id")).await;
    let usage = &plain.json()["usage"];
    for (name, expected) in [
        ("status", json!(200)),
        ("outcome", json!("complete")),
        ("method", json!("POST")),
        ("path", json!(CHAT)),
        ("model", json!(MODEL)),
        ("replica", json!("n0/0")),
        ("attempts", json!(1)),
        ("tokens_in", usage["prompt_tokens"].clone()),
        ("tokens_out", json!(5)),
        ("tokens_cached", json!(0)),
        ("queued", json!(0.0)),
        ("bytes", json!(plain.body.len())),
        ("client_id", json!("job-7")),
        ("trace", json!("4bf92f3577b34da6a3ce929d0e0e4736")),
        ("cause", Value::Null),
    ] {
        assert_eq!(line[name], expected, "{name} in {line}");
    }
    let seconds = |name: &str| line[name].as_f64().unwrap();
    assert!(seconds("first") > 0.0 && seconds("total") >= seconds("first"), "{line}");

    let mut body = chat_stream(20);
    body["stream_options"] = json!({"include_usage": true});
    let stream = fleet.edge().request(request(&body, &[])).await;
    stream.assert_whole_stream();
    let line = line_of(&folder, stream.header("x-hostler-id")).await;
    assert_eq!((&line["tokens_out"], &line["bytes"]), (&json!(20), &json!(stream.body.len())), "{line}");
    // Twenty steps of 5 ms lie between the first token and the last.
    assert!(line["total"].as_f64().unwrap() - line["first"].as_f64().unwrap() > 0.05, "{line}");
    let text = std::fs::read_to_string(log_of(&folder)).unwrap();
    assert!(!text.contains("hidden") && !text.contains("engines."), "{text}");
    assert_eq!(fleet.routers[0].metric("hostler_access_log_dropped_total").await, 0.0);
}

#[tokio::test(start_paused = true)]
async fn a_refused_request_is_logged_with_its_cause() {
    let (fleet, folder) = fleet(Setup::agents(1).router(|router| router.max_body_bytes = 4096)).await;
    let edge = fleet.edge();
    let refused = async |what: &str, status: u64, cause: &str| {
        let line = line(&folder, what, |line| line["cause"] == cause).await;
        assert_eq!((line["status"].as_u64(), &line["outcome"], &line["id"]), (Some(status), &json!("refused"), &line["id"]), "{line}");
        line
    };
    edge.get("/nothing/here?token=hidden").await;
    let line = refused("no route", 404, "no_route").await;
    assert_eq!((&line["path"], &line["method"]), (&json!("/nothing/here"), &json!("GET")));
    edge.post("/api/nothing", &json!({})).await;
    edge.post("/health", &json!({})).await;
    let page = Endpoint::Tcp(fleet.routers[0].admin).get("/metrics").await.text();
    assert!(page.contains("hostler_refused_total{reason=\"no_route\"} 3\n"), "{page}");
    edge.post(CHAT, &json!({"model": "x\n2026-01-01T00:00:00Z status=200", "messages": []})).await;
    let line = refused("an unknown model", 404, "unknown_model").await;
    assert_eq!(line["model"], "x\n2026-01-01T00:00:00Z status=200", "escaped, and so one line");
    edge.post(CHAT, &json!({"model": MODEL, "messages": [], "pad": "x".repeat(5000)})).await;
    refused("a body that is too large", 413, "too_large").await;
    let image = json!({"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data/"}});
    edge.post(CHAT, &json!({"model": MODEL, "messages": [{"role": "user", "content": [image]}]})).await;
    refused("a medium", 400, "media").await;
    raw(fleet.routers[0].edge, b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n").await;
    refused("a head that is none", 400, "malformed").await;
    // A refusal by the engine itself counts as its answer.
    let answer = edge.post(CHAT, &json!({"model": MODEL, "messages": "no list"})).await;
    let line = line_of(&folder, answer.header("x-hostler-id")).await;
    assert_eq!((&line["outcome"], &line["cause"]), (&json!("rejected"), &json!("engine")), "{line}");
    assert_eq!(line["status"].as_u64(), Some(answer.status.as_u16().into()));
}

#[tokio::test(start_paused = true)]
async fn a_lookup_of_an_unknown_model_is_logged_and_counted() {
    let (fleet, folder) = fleet(Setup::agents(1)).await;
    assert_eq!(fleet.edge().get("/v1/models/nobody").await.status, 404);
    assert_eq!(fleet.edge().post("/api/show", &json!({"model": "nobody"})).await.status, 404);
    assert_eq!(fleet.edge().post("/api/generate", &json!({"model": "nobody"})).await.status, 404);
    for path in ["/v1/models/nobody", "/api/show", "/api/generate"] {
        let line = line(&folder, path, |line| line["path"] == path).await;
        assert_eq!(
            (&line["cause"], &line["outcome"], &line["status"]),
            (&json!("unknown_model"), &json!("refused"), &json!(404)),
            "{line}"
        );
    }
    let page = Endpoint::Tcp(fleet.routers[0].admin).get("/metrics").await.text();
    assert!(page.contains("hostler_refused_total{reason=\"request\"} 3\n"), "{page}");
}

#[tokio::test(start_paused = true)]
async fn broken_and_abandoned_answers_are_logged() {
    let (fleet, folder) = fleet(Setup::agents(1)).await;
    let mut stream = fleet.edge().open(CHAT, &chat_stream(10_000)).await;
    stream.events(3).await;
    let id = stream.headers["x-hostler-id"].to_str().unwrap().to_owned();
    drop(stream);
    let line = line_of(&folder, Some(&id)).await;
    assert_eq!((&line["outcome"], &line["status"]), (&json!("client_left"), &json!(200)), "{line}");
    assert!(line["bytes"].as_u64().unwrap() > 0 && line["first"].as_f64().is_some(), "{line}");

    let mut stream = fleet.edge().open(CHAT, &unresumed_stream(10_000)).await;
    stream.events(3).await;
    fleet.kill("n0/0").await;
    let broken = stream.finish().await;
    broken.assert_broken_stream();
    let line = line_of(&folder, broken.header("x-hostler-id")).await;
    assert_eq!((&line["outcome"], &line["cause"]), (&json!("broken"), &json!("engine_lost")), "{line}");
    assert_eq!(line["bytes"], json!(broken.body.len()), "{line}");
}
