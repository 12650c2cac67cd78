//! Sleeping, waking and LoRA adapters, as an agent orders them.

use http::StatusCode;
use serde_json::{Value, json};

use super::RunningEngine;

const PROMPT: &str = r#"{"prompt":"one two three","max_tokens":8}"#;

async fn text(engine: &RunningEngine, body: &str) -> String {
    let answer = engine.post("/v1/completions", body).await;
    assert_eq!(answer.status, StatusCode::OK, "{:?}", answer.json());
    answer.json()["choices"][0]["text"].as_str().unwrap().to_owned()
}

async fn names(engine: &RunningEngine) -> Vec<Value> {
    let models = engine.get("/v1/models").await.json();
    models["data"].as_array().unwrap().iter().map(|card| card["id"].clone()).collect()
}

#[tokio::test]
async fn optional_routes_are_missing_without_their_flags() {
    let engine = RunningEngine::start(&["--enable-lora", "--enable-sleep-mode"]).await;
    for path in ["/sleep", "/wake_up", "/collective_rpc", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"] {
        let answer = engine.post(path, "{}").await;
        assert_eq!((answer.status, answer.json()), (StatusCode::NOT_FOUND, json!({"detail": "Not Found"})), "{path}");
    }
}

#[tokio::test]
async fn a_request_to_a_sleeping_engine_waits_for_wake_up() {
    let engine = RunningEngine::start(&["--sim-dev-mode"]).await;
    let before = text(&engine, PROMPT).await;
    let asleep = engine.post("/sleep?level=1", "").await;
    assert_eq!(asleep.json(), json!({"status": "sleeping", "level": 1}));
    assert_eq!(engine.get("/is_sleeping").await.json(), json!({"is_sleeping": true}));
    assert_eq!(engine.get("/health").await.status, StatusCode::OK);
    let waiting = text(&engine, PROMPT);
    tokio::pin!(waiting);
    let early = tokio::time::timeout(std::time::Duration::from_millis(200), &mut waiting).await;
    assert!(early.is_err(), "it answered in its sleep");
    let awake = engine.post("/wake_up", "").await;
    assert_eq!(awake.json(), json!({"status": "awake", "tags": null}));
    assert_eq!(waiting.await, before);
    assert_eq!(engine.get("/is_sleeping").await.json(), json!({"is_sleeping": false}));
}

#[tokio::test]
async fn a_sleep_aborts_running_requests() {
    let engine = RunningEngine::start(&["--sim-dev-mode"]).await;
    let running = engine.post("/v1/completions", r#"{"prompt":"a","max_tokens":4000}"#);
    let sleeping = async {
        engine.wait_for_metric("vllm:num_requests_running", 1.0).await;
        engine.post("/sleep", "").await
    };
    let (answer, asleep) = tokio::join!(running, sleeping);
    assert_eq!(asleep.status, StatusCode::OK);
    assert_eq!(answer.json()["choices"][0]["finish_reason"], "abort");
}

#[tokio::test]
async fn an_engine_without_weights_answers_wrongly_until_they_are_reloaded() {
    let engine = RunningEngine::start(&["--sim-dev-mode"]).await;
    let before = text(&engine, PROMPT).await;
    engine.post("/sleep?level=2", "").await;
    engine.post("/wake_up", "").await;
    assert_ne!(text(&engine, PROMPT).await, before);
    engine.post("/sleep?level=2", "").await;
    let half = engine.post("/wake_up?tags=weights", "").await;
    assert_eq!(half.json(), json!({"status": "sleeping", "tags": ["weights"]}));
    engine.post("/collective_rpc", r#"{"method":"reload_weights"}"#).await;
    let awake = engine.post("/wake_up?tags=kv_cache", "").await;
    assert_eq!(awake.json(), json!({"status": "awake", "tags": ["kv_cache"]}));
    assert_eq!(text(&engine, PROMPT).await, before);
}

#[tokio::test]
async fn a_loaded_adapter_is_a_model_of_its_own() {
    let engine = RunningEngine::start(&["--sim-runtime-lora", "--enable-lora"]).await;
    let path = engine.directory.path().to_str().unwrap();
    let load = |name: &str, path: &str| json!({"lora_name": name, "lora_path": path}).to_string();
    let unknown = engine.post("/v1/completions", r#"{"model":"poet","prompt":"one two three","max_tokens":8}"#).await;
    assert_eq!(unknown.status, StatusCode::NOT_FOUND);
    assert_eq!(engine.post("/v1/load_lora_adapter", &load("poet", path)).await.status, StatusCode::OK);
    assert_eq!(names(&engine).await, ["tiny", "poet"]);
    let card = engine.get("/v1/models").await.json()["data"][1].clone();
    assert_eq!((card["parent"].as_str(), card["root"].as_str()), (Some("tiny"), Some(path)));
    let own = text(&engine, PROMPT).await;
    assert_ne!(text(&engine, r#"{"model":"poet","prompt":"one two three","max_tokens":8}"#).await, own);

    let refused = [
        (load("poet", path), 400, "already been loaded"),
        (load("tiny", path), 400, "conflicts"),
        (load("x", "/no/where"), 404, "No adapter"),
    ];
    for (body, status, words) in refused {
        let answer = engine.post("/v1/load_lora_adapter", &body).await;
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(answer.status.as_u16() == status && message.contains(words), "{status} {message}");
    }
    assert_eq!(engine.post("/v1/unload_lora_adapter", r#"{"lora_name":"poet"}"#).await.status, StatusCode::OK);
    assert_eq!(names(&engine).await, ["tiny"]);
    assert_eq!(engine.post("/v1/unload_lora_adapter", r#"{"lora_name":"poet"}"#).await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn an_engine_without_lora_refuses_adapters() {
    let engine = RunningEngine::start(&["--sim-runtime-lora"]).await;
    let answer = engine.post("/v1/load_lora_adapter", r#"{"lora_name":"poet","lora_path":"/tmp"}"#).await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("LoRA is not enabled"));
}
