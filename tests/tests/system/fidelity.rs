//! Fidelity: the engine's bytes reach the client unchanged, and the client's bytes reach the
//! engine.

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderMap};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio_util::task::AbortOnDropHandle;

use crate::harness::{Answer, CHAT, Endpoint, Fleet, MODEL, Setup, chat, chat_stream, unresumed_stream, until};

/// A request with an id, so that the ids in its answer are not random.
fn identified(path: &str, body: &Value) -> Request<Full<Bytes>> {
    let request = Request::builder().method(Method::POST).uri(path).header(CONTENT_TYPE, "application/json");
    request.header("x-request-id", "the-same").body(Full::from(body.to_string())).unwrap()
}

/// Body without the parts that differ between any two answers: times, and the ids that engines draw
/// at random.
fn normal(answer: &Answer) -> String {
    let mut text = answer.text();
    for (before, differs) in [
        ("\"created\":", char::is_numeric as fn(char) -> bool),
        ("\"created_at\":", char::is_numeric),
        ("msg_", char::is_alphanumeric),
        ("-tool-", char::is_alphanumeric),
    ] {
        let mut parts = text.split(before);
        let mut kept = parts.next().unwrap().to_owned();
        for part in parts {
            kept.push_str(before);
            kept.push_str(part.trim_start_matches(differs));
        }
        text = kept;
    }
    text
}

/// Headers without the date, those of the connection, and the router's own.
fn normal_headers(answer: &Answer) -> HeaderMap {
    let mut headers = answer.headers.clone();
    for own in ["date", "connection", "transfer-encoding", "x-hostler-id", "x-accel-buffering"] {
        headers.remove(own);
    }
    headers
}

/// Asks the edge and the engine until both give equal answers.
///
/// The second time a prompt is cached, and an engine without processor time merges events, which no
/// test can prevent.
async fn assert_same(edge: &Endpoint, engine: &Endpoint, path: &str, body: &Value) -> Answer {
    for attempt in 0.. {
        let through = edge.request(identified(path, body)).await;
        let direct = engine.request(identified(path, body)).await;
        let alike = normal(&through) == normal(&direct) && normal_headers(&through) == normal_headers(&direct);
        if !alike && attempt < 5 {
            continue;
        }
        assert_eq!(normal(&through), normal(&direct), "{path} {body}");
        assert_eq!((through.status, &through.ended), (direct.status, &direct.ended), "{path} {body}");
        assert_eq!(normal_headers(&through), normal_headers(&direct), "{path} {body}");
        return through;
    }
    unreachable!("the loop returns")
}

fn edited(mut body: Value, changes: Value) -> Value {
    let changes = changes.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(changes);
    body
}

#[tokio::test(start_paused = true)]
async fn every_route_answers_as_the_engine_itself_does() {
    let fleet = Fleet::start(Setup::agents(1).engine("--sim-step-ms 10 --enable-request-id-headers")).await;
    let (edge, engine) = (fleet.edge(), fleet.engine("n0/0").await);
    let tools = json!({"tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}], "tool_choice": "required"});
    for (path, body) in [
        (CHAT, chat(8)),
        (CHAT, chat_stream(8)),
        (CHAT, edited(chat_stream(5), json!({"stream_options": {"include_usage": true, "continuous_usage_stats": true}}))),
        (CHAT, edited(chat(5), json!({"n": 3, "logprobs": true, "top_logprobs": 2}))),
        (CHAT, edited(chat_stream(40), tools)),
        // Fields that only vLLM knows pass like all others.
        (CHAT, edited(chat(3), json!({"return_token_ids": true, "cache_salt": "salt", "x_unknown": {"a": [1, null]}}))),
        ("/v1/completions", json!({"model": MODEL, "prompt": "Once", "max_tokens": 6})),
        ("/v1/completions", json!({"model": MODEL, "prompt": [11, 22, 33], "max_tokens": 6, "stream": true})),
        ("/v1/completions", json!({"model": MODEL, "prompt": ["one", "two"], "max_tokens": 3, "echo": true})),
        ("/v1/embeddings", json!({"model": MODEL, "input": ["one", "two"], "encoding_format": "base64"})),
        ("/v1/responses", json!({"model": MODEL, "input": "Hello", "max_output_tokens": 6})),
        ("/v1/responses", json!({"model": MODEL, "input": "Hello", "max_output_tokens": 6, "stream": true})),
        ("/v1/messages", json!({"model": MODEL, "messages": chat(1)["messages"], "max_tokens": 6})),
        ("/v1/messages", json!({"model": MODEL, "messages": chat(1)["messages"], "max_tokens": 6, "stream": true})),
        ("/v1/messages/count_tokens", json!({"model": MODEL, "messages": chat(1)["messages"]})),
        ("/tokenize", json!({"model": MODEL, "prompt": "Hello, engine"})),
        ("/detokenize", json!({"model": MODEL, "tokens": [1, 2, 3]})),
    ] {
        let answer = assert_same(&edge, &engine, path, &body).await;
        assert_eq!((answer.status, answer.ended.clone()), (StatusCode::OK, Ok(())), "{path} {body}: {}", answer.text());
        assert_eq!(answer.header("x-request-id"), Some("the-same"));
    }
    assert_eq!(edge.get("/version").await.body, engine.get("/version").await.body);
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn an_engines_errors_pass_verbatim() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let (edge, engine) = (fleet.edge(), fleet.engine("n0/0").await);
    for (path, body, status) in [
        (CHAT, edited(chat(3), json!({"temperature": -1})), 400),
        (CHAT, edited(chat(3), json!({"messages": "no list"})), 400),
        (CHAT, edited(chat(3), json!({"max_tokens": 1_000_000})), 400),
        (CHAT, json!({"model": MODEL}), 400),
        (CHAT, json!(["no", "object"]), 400),
        // The engine judges a model that is not a string.
        (CHAT, edited(chat(3), json!({"model": 7})), 400),
        ("/v1/completions", edited(json!({"model": MODEL, "prompt": "x"}), json!({"n": 0})), 400),
        ("/v1/nothing", json!({}), 404),
        ("/v1/nothing/below?x=%20y", json!({}), 404),
        ("/v2/rerank", json!({}), 404),
    ] {
        let answer = assert_same(&edge, &engine, path, &body).await;
        assert_eq!(answer.status, status, "{path} {body}: {}", answer.text());
    }
    let (through, direct) = (edge.get(CHAT).await, engine.get(CHAT).await);
    assert_eq!((through.status, &through.body), (direct.status, &direct.body));
    assert_eq!((through.status.as_u16(), through.header("allow")), (405, Some("POST")));
}

#[tokio::test(start_paused = true)]
async fn a_large_body_arrives_whole_with_a_length_or_chunked() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let (edge, engine) = (fleet.edge(), fleet.engine("n0/0").await);
    // The text takes several windows of a lane, and again in the answer.
    let text = "all engines run ".repeat(100_000);
    let body = json!({"model": MODEL, "prompt": text});
    let direct = engine.post("/tokenize", &body).await;
    assert!(direct.body.len() > 1 << 20, "{} bytes are no large answer", direct.body.len());
    let through = edge.post("/tokenize", &body).await;
    assert!(through.status == 200 && through.body == direct.body, "{} bytes came", through.body.len());

    let Endpoint::Tcp(address) = edge else { unreachable!("the edge is a TCP address") };
    let small = json!({"model": MODEL, "prompt": "Hello"}).to_string();
    let (first, second) = small.split_at(10);
    let request = format!(
        "POST /tokenize HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{first}\r\n{:x}\r\n{second}\r\n0\r\n\r\n",
        first.len(),
        second.len()
    );
    let answer = crate::harness::raw(address, request.as_bytes()).await;
    let direct = fleet.engine("n0/0").await.post("/tokenize", &json!({"model": MODEL, "prompt": "Hello"})).await;
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with(&direct.text()), "{answer}");
}

#[tokio::test(start_paused = true)]
async fn models_are_listed_together_and_each_request_finds_its_engine() {
    let setup = Setup::two_agents().engine_of(0, "--served-model-name shared small").engine_of(1, "--served-model-name shared large/v2");
    let fleet = Fleet::start(setup).await;
    let edge = fleet.edge();
    let list = edge.get("/v1/models").await;
    let ids: Vec<Value> = list.json()["data"].as_array().unwrap().iter().map(|card| card["id"].clone()).collect();
    assert_eq!(ids, ["large/v2", "shared", "small"], "{}", list.text());
    assert_eq!(list.json()["object"], "list");
    let card = edge.get("/v1/models/large/v2").await;
    assert_eq!((card.status, &card.json()), (StatusCode::OK, &list.json()["data"][0]));
    let missing = edge.get("/v1/models/none").await;
    assert_eq!(missing.status, 404);
    assert!(missing.message().contains("large/v2, shared, small"), "{}", missing.text());

    for (model, replica, other) in [("small", "n0/0", "n1/0"), ("large/v2", "n1/0", "n0/0")] {
        let before = fleet.replica(other).await.served;
        for _ in 0..3 {
            let answer = edge.post(CHAT, &edited(chat(2), json!({"model": model}))).await;
            assert_eq!((answer.status, &answer.json()["choices"][0]["finish_reason"]), (StatusCode::OK, &json!("length")));
        }
        fleet.until_replica(replica, "three served", |replica| replica.served >= 3).await;
        assert_eq!(fleet.replica(other).await.served, before, "{other} does not serve {model}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_model_named_by_a_path_is_served_by_its_last_part_too() {
    let fleet = Fleet::start(Setup::two_agents().agent(|agent| agent.model = "/models/tiny".into())).await;
    let edge = fleet.edge();
    let list = edge.get("/v1/models").await.json();
    assert_eq!(
        (&list["data"][0]["id"], &list["data"][1]["id"], list["data"].as_array().unwrap().len()),
        (&json!("/models/tiny"), &json!("tiny"), 2)
    );
    let answer = edge.post(CHAT, &edited(chat(2), json!({"model": "tiny"}))).await;
    assert_eq!((answer.status, &answer.json()["model"]), (StatusCode::OK, &json!("/models/tiny")), "the name that vLLM gives");
    assert_eq!(fleet.replica("n1/0").await.models, ["/models/tiny", "tiny"]);
    let unknown = edge.post(CHAT, &edited(chat(2), json!({"model": "none"}))).await;
    assert!(unknown.message().ends_with("/models/tiny, tiny."), "{}", unknown.text());
}

#[tokio::test(start_paused = true)]
async fn an_alias_of_two_models_is_neither_ones() {
    let names = "--served-model-name tiny";
    let fleet = Fleet::start(Setup::two_agents().agent(|agent| agent.model = "/models/tiny".into()).engine_of(1, names)).await;
    assert_eq!(fleet.replica("n0/0").await.models, ["/models/tiny"]);
    for _ in 0..4 {
        let answer = fleet.edge().post(CHAT, &edited(chat(2), json!({"model": "tiny"}))).await;
        assert_eq!(answer.json()["model"], "tiny", "the user's own name is the only one");
    }
}

#[tokio::test(start_paused = true)]
async fn an_audio_form_goes_to_the_engine_of_its_model() {
    let setup = Setup::two_agents().engine_of(0, "--served-model-name small").engine_of(1, "--served-model-name large");
    let fleet = Fleet::start(setup).await;
    let ask = async |model: &str| {
        let part = |head: &str, value: &str| format!("--b\r\nContent-Disposition: form-data; {head}\r\n\r\n{value}\r\n");
        let form = part("name=\"file\"; filename=\"a.wav\"", "RIFF") + &part("name=\"model\"", model) + "--b--\r\n";
        let request = Request::post("/v1/audio/transcriptions").header(CONTENT_TYPE, "multipart/form-data; boundary=b");
        fleet.edge().request(request.header("x-hostler-explain", "1").body(Full::from(form)).unwrap()).await
    };
    for (model, replica) in [("small", "n0/0"), ("large", "n1/0"), ("small", "n0/0"), ("large", "n1/0")] {
        let answer = ask(model).await;
        // Simulated engines do not transcribe; this is their own answer.
        assert_eq!(answer.text(), r#"{"detail":"Not Found"}"#, "{model}");
        let reason = answer.header("x-hostler-reason").unwrap();
        assert!(reason.contains(&format!("replica={replica} ")), "{model}: {reason}");
    }
    let unknown = ask("none").await;
    assert_eq!(unknown.status, StatusCode::NOT_FOUND);
    assert_eq!(unknown.message(), "The model `none` does not exist. Valid aliases: large, small.");
}

#[tokio::test(start_paused = true)]
async fn an_engines_operator_paths_are_not_reachable() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let edge = fleet.edge();
    for path in ["/metrics", "/v1", "//v1/models"] {
        let answer = edge.get(path).await;
        assert_eq!((answer.status, answer.text().as_str()), (StatusCode::NOT_FOUND, r#"{"detail":"Not Found"}"#), "{path}");
    }
    for path in ["/sim/fault", "/sleep", "/reset_prefix_cache", "/wake_up", "/abort_requests", "/inference/v1/abort_requests"] {
        let answer = edge.post(path, &json!({"kind": "busy"})).await;
        assert_eq!((answer.status, answer.text().as_str()), (StatusCode::NOT_FOUND, r#"{"detail":"Not Found"}"#), "{path}");
    }
    assert_eq!(edge.post(CHAT, &chat(2)).await.status, 200, "the fault reached the engine");
    assert_eq!(edge.get("/health").await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn every_route_listed_by_the_edge_exists() {
    let folder = tempfile::tempdir().unwrap();
    let fleet = Fleet::start(Setup::agents(1).router(|router| router.batches_dir = folder.path().to_owned())).await;
    let edge = fleet.edge();
    let document = edge.get("/openapi.json").await.json();
    assert_eq!(document["security"], json!([]));
    let paths = document["paths"].as_object().unwrap();
    assert!(paths.len() > 30, "{paths:?}");
    for (path, item) in paths {
        let path = path.replace("{model}", MODEL).replace("{id}", "resp_1");
        let item = item["$ref"].as_str().map_or(item, |reference| document.pointer(&reference[1..]).unwrap());
        for method in item.as_object().unwrap().keys() {
            let method = Method::from_bytes(method.to_ascii_uppercase().as_bytes()).unwrap();
            let request = Request::builder().method(&method).uri(&path).header(CONTENT_TYPE, "application/json");
            let answer = edge.request(request.body(Full::from(if method == Method::POST { "{}" } else { "" })).unwrap()).await;
            assert!(
                !answer.status.is_server_error() && answer.status != StatusCode::METHOD_NOT_ALLOWED,
                "{method} {path}: {}",
                answer.text()
            );
        }
    }
    assert_eq!(edge.post("/docs", &json!({})).await.status, StatusCode::METHOD_NOT_ALLOWED);
    let page = Endpoint::Tcp(fleet.routers[0].admin).get("/metrics").await.text();
    assert!(page.contains("hostler_refused_total{reason=\"no_route\"} 1\n"), "the one with a wrong method: {page}");
}

#[tokio::test(start_paused = true)]
async fn the_load_route_sums_all_replicas() {
    let fleet = Fleet::start(Setup::agents(2).engine("--sim-step-ms 20")).await;
    let edge = fleet.edge();
    let mut streams = Vec::new();
    for _ in 0..3 {
        streams.push(edge.open(CHAT, &chat_stream(500)).await);
    }
    until("three requests in the load", async || {
        let answer = edge.get("/load").await;
        if answer.json() == json!({"server_load": 3}) { Ok(()) } else { Err(answer.text()) }
    })
    .await;
    drop(streams);
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn http_2_clients_get_the_same_answers() {
    let fleet = Fleet::start(Setup::agents(1).engine("--sim-step-ms 10")).await;
    let stream = tokio::net::TcpStream::connect(fleet.routers[0].edge).await.unwrap();
    let (sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    let _connection = AbortOnDropHandle::new(tokio::spawn(async { drop(connection.await) }));
    let engine = fleet.engine("n0/0").await;
    // From now on both find the prompt cached.
    assert_eq!(engine.post(CHAT, &chat(8)).await.status, 200);
    for body in [chat(8), chat(20_000), chat_stream(8)] {
        let mut request = identified(CHAT, &body);
        *request.uri_mut() = format!("http://a{CHAT}").parse().unwrap();
        let (head, through) = sender.clone().send_request(request).await.unwrap().into_parts();
        let ended = through.collect().await.map(|body| body.to_bytes().to_vec());
        let through = Answer { status: head.status, headers: head.headers, body: ended.unwrap(), ended: Ok(()) };
        let direct = engine.request(identified(CHAT, &body)).await;
        assert_eq!((through.status, through.events().len()), (direct.status, direct.events().len()));
        if !direct.text().starts_with("data:") {
            assert_eq!(normal(&through), normal(&direct));
        }
    }
    // A stream that breaks is reset, after its error event.
    let mut request = identified(CHAT, &unresumed_stream(10_000));
    *request.uri_mut() = format!("http://a{CHAT}").parse().unwrap();
    let mut body = sender.clone().send_request(request).await.unwrap().into_body();
    let mut read = body.frame().await.unwrap().unwrap().into_data().unwrap().to_vec();
    fleet.kill("n0/0").await;
    let ended = loop {
        match body.frame().await {
            Some(Ok(frame)) => read.extend(frame.into_data().unwrap_or_default()),
            Some(Err(error)) => break Err(error.to_string()),
            None => break Ok(()),
        }
    };
    Answer { status: StatusCode::OK, headers: HeaderMap::new(), body: read, ended }.assert_broken_stream();
}
