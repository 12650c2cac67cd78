//! Starting, stopping, dying, and clients that come and go.

use std::io::ErrorKind;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::{PATIENCE, RunningEngine, engine_flags};
use crate::{Address, Engine, EngineArgs, Error};

#[tokio::test]
async fn a_starting_engine_is_bound_and_refuses_connections() {
    let engine = RunningEngine::launch(&["--sim-start-ms", "60000"]);
    assert!(engine.socket.exists());
    let refused = UnixStream::connect(&engine.socket).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    engine.stop().await.expect("it can be stopped while it starts");
}

#[tokio::test]
async fn a_socket_file_left_behind_stops_the_start() {
    let engine = RunningEngine::start(&[]).await;
    let (socket, _directory) = (engine.socket.clone(), tempfile::tempdir().unwrap());
    engine.shutdown.cancel();
    let RunningEngine { ended, directory, .. } = engine;
    ended.await.unwrap().unwrap();
    assert!(socket.exists(), "like vLLM, it leaves the file");
    let failed = Engine::bind(EngineArgs::from_flags(&engine_flags(&socket, &[])));
    let Err(error) = failed else { panic!("it must not bind") };
    assert!(error.to_string().starts_with("OSError: [Errno 98] Address already in use"), "{error}");
    drop(directory);
}

#[tokio::test]
async fn a_failing_start_ends_with_an_error() {
    let engine = RunningEngine::launch(&["--sim-fail-start"]);
    assert!(matches!(engine.ended.await.unwrap(), Err(Error::FailedStart)));
}

#[tokio::test]
async fn bad_arguments_are_refused_with_their_names() {
    for (flags, name) in [
        (["--max-model-len", "1000000"], "--max-model-len"),
        (["--kv-events-config", "{\"enable_kv_cache_event\":true}"], "--kv-events-config"),
        (["--host", "nowhere"], "--host"),
        (["--block-size", "0"], "--block-size"),
    ] {
        let error = Engine::bind(EngineArgs::from_flags(&flags)).err().expect("it is refused");
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[tokio::test]
async fn a_request_whose_client_leaves_is_removed_at_once() {
    let engine = RunningEngine::start(&[]).await;
    for stream in ["true", "false"] {
        let body = format!(r#"{{"prompt":"a","max_tokens":3000,"stream":{stream},"n":2}}"#);
        let mut clients = Vec::new();
        for _ in 0..4 {
            clients.push(engine.open("POST", "/v1/completions", "", &body).await);
        }
        engine.wait_for_metric("vllm:num_requests_running", 8.0).await;
        drop(clients);
        engine.wait_for_metric("vllm:num_requests_running", 0.0).await;
        assert_eq!(engine.metric("vllm:kv_cache_usage_perc").await, 0.0);
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_up_nobody_else() {
    let engine = RunningEngine::start(&["--sim-step-ms", "0.1", "--max-model-len", "16384"]).await;
    let body = r#"{"prompt":"a","max_tokens":16000,"stream":true}"#;
    let _stalled = engine.open("POST", "/v1/completions", "", body).await;
    engine.wait_for_metric("vllm:num_requests_running", 1.0).await;
    let answer = engine.post("/v1/completions", r#"{"prompt":"b","max_tokens":50,"stream":true}"#).await;
    assert_eq!(answer.chunks.last().unwrap(), "data: [DONE]\n\n");
}

#[tokio::test]
async fn a_dying_engine_breaks_its_streams_and_returns_an_error() {
    let engine = RunningEngine::start(&[]).await;
    let body = r#"{"prompt":"a","max_tokens":3000,"stream":true}"#;
    let (answer, ()) = tokio::join!(engine.post("/v1/completions", body), async {
        engine.wait_for_count("vllm:generation_tokens_total", 3.0).await;
        // The engine may be gone before it has answered.
        let mut dying = engine.open("POST", "/sim/fault", "", r#"{"kind":"die"}"#).await;
        let _ = dying.read(&mut [0; 64]).await;
    });
    assert!(!answer.complete, "no last chunk");
    assert!(answer.chunks.len() >= 3);
    let ended = tokio::time::timeout(PATIENCE, engine.ended).await.unwrap().unwrap();
    assert!(matches!(ended, Err(Error::Died)));
    let timed = RunningEngine::launch(&["--sim-die-after-ms", "20"]);
    assert!(matches!(timed.ended.await.unwrap(), Err(Error::Died)));
}

#[tokio::test]
async fn a_hung_engine_looks_healthy_and_its_gauges_freeze() {
    let engine = RunningEngine::start(&[]).await;
    engine.post("/sim/fault", r#"{"kind":"hang"}"#).await;
    let _stuck = engine.open("POST", "/v1/completions", "", r#"{"prompt":"a","max_tokens":5}"#).await;
    tokio::time::sleep(Duration::from_millis(30)).await;
    assert_eq!(engine.get("/health").await.status, 200);
    assert_eq!(engine.metric("vllm:num_requests_running").await, 0.0);
    assert_eq!(engine.metric("vllm:num_requests_waiting").await, 0.0);
    engine.post("/sim/fault", r#"{"kind":"ok"}"#).await;
    engine.wait_for_count("vllm:generation_tokens_total", 5.0).await;
    engine.post("/sim/fault", r#"{"kind":"hang"}"#).await;
    engine.stop().await.expect("even a hung engine stops in the end");
}

#[tokio::test]
async fn streams_finish_in_the_grace_and_late_requests_fail() {
    let engine = RunningEngine::start(&["--shutdown-timeout", "15"]).await;
    let body = r#"{"prompt":"a","max_tokens":500,"stream":true}"#;
    let (answer, late) = tokio::join!(engine.post("/v1/completions", body), async {
        engine.wait_for_count("vllm:generation_tokens_total", 3.0).await;
        engine.shutdown.cancel();
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(engine.get("/health").await.status, 200);
        engine.post("/v1/completions", body).await
    });
    assert!(answer.chunks[499].contains(r#""finish_reason":"length""#), "{}", answer.chunks[499]);
    assert_eq!(late.status, 500);
    assert_eq!(late.json()["error"]["message"], "cannot schedule new futures after shutdown");
    engine.stop().await.unwrap();
}

#[tokio::test]
async fn an_engine_prints_the_port_that_the_system_chose() {
    let args = EngineArgs::from_flags(&["--port", "0", "--sim-start-ms", "0", "--sim-step-ms", "1"]);
    let engine = Engine::bind(args).unwrap();
    let Address::Tcp(address) = *engine.address() else { panic!("it listens on TCP") };
    let stop = tokio_util::sync::CancellationToken::new();
    let ended = tokio::spawn(engine.run(stop.clone().cancelled_owned()));
    let mut stream = loop {
        match tokio::net::TcpStream::connect(address).await {
            Ok(stream) => break stream,
            Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    };
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut start = [0; 15];
    stream.read_exact(&mut start).await.unwrap();
    assert_eq!(&start, b"HTTP/1.1 200 OK");
    stop.cancel();
    // The idle connection does not delay the stop.
    tokio::time::timeout(PATIENCE, ended).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn the_small_routes_answer_as_vllm_does() {
    let engine = RunningEngine::start(&["--enable-server-load-tracking"]).await;
    assert_eq!(engine.get("/version").await.body, br#"{"version":"0.32.0"}"#);
    assert_eq!(engine.get("/load").await.body, br#"{"server_load":0}"#);
    assert!(engine.get("/health").await.body.is_empty());
    assert_eq!(engine.get("/ping").await.status, 200);
    let models = engine.get("/v1/models").await.json();
    assert_eq!(models["data"][0]["id"], "tiny");
    assert_eq!(models["data"][0]["max_model_len"], 4096);
    let text = "Grüße aus dem \"Heizhaus\" 🚂\n";
    let tokens = engine.post("/tokenize", &format!(r#"{{"prompt":{text:?}}}"#)).await.json();
    let back = engine.post("/detokenize", &format!(r#"{{"tokens":{}}}"#, tokens["tokens"])).await;
    assert_eq!(back.json()["prompt"], text);
    let _running = engine.open("POST", "/v1/completions", "", r#"{"prompt":"a","max_tokens":900}"#).await;
    engine.wait_for_metric("vllm:num_requests_running", 1.0).await;
    assert_eq!(engine.get("/load").await.body, br#"{"server_load":1}"#);
}

#[tokio::test]
async fn embeddings_are_unit_vectors_in_both_encodings() {
    let engine = RunningEngine::start(&[]).await;
    let body = r#"{"input":["a b","c"],"dimensions":8}"#;
    let answer = engine.post("/v1/embeddings", body).await.json();
    let vector: Vec<f64> = serde_json::from_value(answer["data"][1]["embedding"].clone()).unwrap();
    let length: f64 = vector.iter().map(|value| value * value).sum();
    assert!((length - 1.0).abs() < 1e-5);
    let body = r#"{"input":["a b","c"],"dimensions":8,"encoding_format":"base64"}"#;
    let encoded = engine.post("/v1/embeddings", body).await.json();
    // 8 floats are 32 bytes: 10 whole groups of three bytes and one of two.
    let text = encoded["data"][1]["embedding"].as_str().unwrap();
    assert_eq!((text.len(), text.ends_with('=')), (44, true));
    assert_eq!(encoded["usage"]["prompt_tokens"], answer["usage"]["prompt_tokens"]);
}

#[tokio::test]
async fn choices_are_numbered_across_all_prompts() {
    let engine = RunningEngine::start(&[]).await;
    let body = r#"{"prompt":[[1,2],[1,2,3]],"n":2,"max_tokens":3}"#;
    let answer = engine.post("/v1/completions", body).await.json();
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    assert_eq!(choices[3]["index"], 3);
    assert_ne!(choices[0]["text"], choices[1]["text"], "choices of one prompt differ");
    let both = r#"{"prompt":["a","b"],"max_tokens":2,"stream":true,"stream_options":{"include_usage":true}}"#;
    let stream = engine.post("/v1/completions", both).await;
    assert!(stream.chunks[stream.chunks.len() - 2].contains(r#""completion_tokens":4"#));
}
