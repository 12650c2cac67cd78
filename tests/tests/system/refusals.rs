//! Requests that no engine sees: each gets a clear answer in OpenAI's form, and nothing is lost by
//! it.

use std::time::Duration;

use tokio::time::Instant;

use bytes::Bytes;
use hostler_proto::agent::v1::Phase;
use http::Request;
use http_body_util::Full;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::harness::{CHAT, Endpoint, Fleet, Setup, chat, chat_stream, raw, soon};

fn json_text(body: &'static str) -> Request<Full<Bytes>> {
    Request::post(CHAT).header("content-type", "application/json").body(Full::from(body)).unwrap()
}

#[tokio::test(start_paused = true)]
async fn an_unknown_model_is_refused_naming_the_known_ones() {
    let fleet = Fleet::start(Setup::agents(1).engine("--served-model-name one two")).await;
    let answer = fleet.edge().post(CHAT, &json!({"model": "three", "messages": []})).await;
    assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (404, None));
    assert_eq!(answer.message(), "The model `three` does not exist. Valid aliases: one, two.");
    assert_eq!(answer.json()["error"]["param"], "model");
    assert_eq!(fleet.replica("n0/0").await.served, 0);
}

#[tokio::test(start_paused = true)]
async fn a_request_without_any_agent_learns_when_to_retry() {
    let fleet = Fleet::start(Setup::agents(0)).await;
    for body in [chat(1), chat_stream(1)] {
        let answer = fleet.edge().post(CHAT, &body).await;
        assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (503, Some("10")));
        assert!(answer.message().contains("no agent has attached yet"), "{}", answer.text());
    }
    for (probe, status) in [("/health", 503), ("/healthz", 503), ("/readyz", 503), ("/livez", 200)] {
        assert_eq!(fleet.edge().get(probe).await.status, status, "{probe}");
    }
    assert_eq!(fleet.edge().post("/livez", &chat(1)).await.status, 405);
    let readiness = Endpoint::Tcp(fleet.routers[0].admin).get("/readyz").await;
    assert_eq!((readiness.status.as_u16(), readiness.text().as_str()), (503, "no replica is ready\n"));
    assert_eq!(Endpoint::Tcp(fleet.routers[0].admin).get("/livez").await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn a_request_learns_that_every_engine_is_loading() {
    let short = Duration::from_millis(100);
    let setup = Setup::two_agents().engine("--sim-start-ms 60000").router(|router| router.max_queue_wait = short);
    let fleet = Fleet::launch(setup).await;
    for id in ["n0/0", "n1/0"] {
        crate::harness::until("both replicas known", async || {
            let known = fleet.admin().replicas().await.map_err(|status| status.to_string())?;
            let loads = known.iter().any(|replica| replica.id == id && replica.phase.as_str_name() == "PHASE_LOADING");
            if loads { Ok(()) } else { Err(format!("{known:#?}")) }
        })
        .await;
    }
    let answer = fleet.edge().post(CHAT, &chat(1)).await;
    assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (503, Some("10")));
    let message = answer.message();
    assert!(message.contains("n0/0 is loading") && message.contains("n1/0 is loading"), "{message}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_is_told_to_retry_after_the_expected_start() {
    let short = Duration::from_millis(100);
    let fleet =
        Fleet::start(Setup::agents(1).engines_as_processes().engine("--sim-start-ms 2000").router(|router| router.max_queue_wait = short))
            .await;
    // The next start is expected to take as long as the first one.
    fleet.kill("n0/0").await;
    let seconds = crate::harness::until("an estimate", async || {
        let answer = fleet.edge().post(CHAT, &chat(1)).await;
        match answer.header("retry-after").and_then(|seconds| seconds.parse::<u64>().ok()) {
            Some(seconds) if answer.status == 503 && answer.message().contains("n0/0 is loading") && seconds != 10 => Ok(seconds),
            _ => Err(answer.text()),
        }
    })
    .await;
    assert!((2..=60).contains(&seconds), "{seconds}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_engine_is_reported_to_clients_and_operators() {
    let fleet = Fleet::launch(Setup::agents(1).engines_as_processes().engine("--sim-fail-start")).await;
    crate::harness::until("a failed replica", async || {
        let known = fleet.admin().replicas().await.map_err(|status| status.to_string())?;
        let failed = known.iter().any(|replica| replica.reason.contains("Engine core initialization failed"));
        if failed { Ok(()) } else { Err(format!("{known:#?}")) }
    })
    .await;
    let answer = fleet.edge().post(CHAT, &chat(1)).await;
    assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (503, Some("10")));
    assert!(answer.message().contains("n0/0 is "), "{}", answer.text());
    assert!(!answer.message().contains("Traceback"), "the log is for operators: {}", answer.text());
    let log = fleet.admin().logs("n0/0", 50).await.unwrap().join("\n");
    assert!(log.contains("Traceback") && log.contains("Engine core initialization failed"), "{log}");
}

#[tokio::test(start_paused = true)]
async fn a_model_whose_only_engine_is_down_is_still_known() {
    let setup = Setup::two_agents().engine_of(0, "--served-model-name small").engine_of(1, "--served-model-name large");
    let fleet = Fleet::start(setup).await;
    fleet.admin().drain("n1/0").await.unwrap();
    fleet.until_replica("n1/0", "stopped", |replica| replica.phase == Phase::Stopped).await;
    let answer = fleet.edge().post(CHAT, &json!({"model": "large", "messages": []})).await;
    assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (503, Some("10")), "{}", answer.text());
    assert!(answer.message().contains("n1/0"), "{}", answer.text());
}

#[tokio::test(start_paused = true)]
async fn a_too_large_body_is_refused_announced_or_not() {
    let fleet = Fleet::start(Setup::agents(1).router(|router| router.max_body_bytes = 1000)).await;
    let edge = fleet.routers[0].edge;
    let announced =
        raw(edge, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 1001\r\n\r\n").await;
    let chunk = "x".repeat(600);
    let chunked = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n258\r\n{chunk}\r\n258\r\n{chunk}\r\n0\r\n\r\n"
    );
    for answer in [announced, raw(edge, chunked.as_bytes()).await] {
        assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
        assert!(answer.contains("larger than the 1000 bytes that router.max_body_bytes allows"), "{answer}");
    }
    let exactly = format!("{{\"model\":\"simulated\",\"prompt\":\"{}\"}}", "y".repeat(1000 - 33));
    let request = Request::post("/tokenize").header("content-type", "application/json").body(Full::from(exactly.clone())).unwrap();
    assert_eq!((exactly.len(), fleet.edge().request(request).await.status.as_u16()), (1000, 200));
}

#[tokio::test(start_paused = true)]
async fn malformed_json_is_refused_with_its_position() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    for (body, position) in [
        // These are in the engine's words.
        ("{\"model\": \"simulated\",\n \"messages\": [}", "'body.37'"),
        ("{\"model\": \"simulated\"", "'body.21'"),
        ("{} {}", "'body.3'"),
        ("[1, 2", "'body.5'"),
        // This one is in the router's words; a real engine would accept the body.
        ("{\"model\": \"simulated\", \"temperature\": NaN}", "not valid JSON: expected value at line 1 column 39"),
    ] {
        let answer = fleet.edge().request(json_text(body)).await;
        assert_eq!(answer.status, 400, "{body}");
        assert!(answer.message().contains(position), "{body}: {}", answer.text());
    }
}

#[tokio::test(start_paused = true)]
async fn requests_with_ambiguous_length_or_target_are_refused() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let edge = fleet.routers[0].edge;
    let post = "POST /v1/completions HTTP/1.1\r\n";
    for (what, head) in [
        ("length, then chunked", format!("{post}Host: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")),
        ("chunked, then length", format!("{post}Host: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n")),
        ("two lengths", format!("{post}Host: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd")),
        ("two hosts", "GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n".to_owned()),
        ("no host", "GET /v1/models HTTP/1.1\r\n\r\n".to_owned()),
        ("no HTTP", "what is this\r\n\r\n".to_owned()),
        ("a blank before the colon", "GET /v1/models HTTP/1.1\r\nHost : a\r\n\r\n".to_owned()),
        (
            "a length behind the body",
            format!("{post}Host: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\nContent-Length: 9\r\n\r\n"),
        ),
        ("a key behind the body", format!("{post}Host: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\nAuthorization: a\r\n\r\n")),
    ] {
        // A second request on the same connection would be the smuggled one; it must get no answer.
        let answer = raw(edge, format!("{head}GET /health HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 400 "), "{what}: {answer}");
        assert_eq!(answer.lines().filter(|line| line.starts_with("HTTP/1.1 ")).count(), 1, "{what}: {answer}");
        assert!(answer.contains("\"code\":400") && answer.contains("\"type\":\"BadRequestError\""), "{what}: {answer}");
    }
    assert_eq!(fleet.replica("n0/0").await.served, 0);
}

#[tokio::test(start_paused = true)]
async fn a_head_refused_by_hyper_is_answered_with_advice() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let edge = fleet.routers[0].edge;
    let get = "GET /health HTTP/1.1\r\nHost: a\r\n";
    for (head, status, words) in [
        ("what is this\r\n\r\n".to_owned(), 400, "name: value"),
        (format!("GET /{} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", "x".repeat(65_000)), 404, "Not Found"),
        (format!("GET /{}", "x".repeat(70_000)), 431, "send fewer or shorter ones"),
        (format!("{get}{}\r\n", "X: y\r\n".repeat(200)), 431, "more than 100 headers"),
        (format!("{get}\r\n{get}{}\r\n", "X: y\r\n".repeat(200)), 431, "more than 100 headers"),
    ] {
        let answers = raw(edge, head.as_bytes()).await;
        let refusal = answers.rfind("HTTP/1.1 ").map(|begin| &answers[begin..]).unwrap_or_default();
        let (fields, body) = refusal.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answers:?}"));
        assert!(fields.starts_with(&format!("HTTP/1.1 {status} ")) && body.contains(words), "{status}: {answers}");
        let length = fields.lines().filter_map(|field| field.to_ascii_lowercase().strip_prefix("content-length: ").map(str::to_owned));
        assert_eq!(length.collect::<Vec<_>>(), [body.len().to_string()], "{answers}");
        if status != 404 {
            let error: serde_json::Value = serde_json::from_str(body).unwrap();
            assert_eq!((&error["error"]["code"], &error["error"]["param"]), (&json!(status), &json!(null)), "{body}");
            assert!(fields.contains("content-type: application/json") && fields.contains("connection: close"), "{fields}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_sends_too_slowly_is_cut_off() {
    let slow = Duration::from_millis(300);
    let fleet = Fleet::start(Setup::agents(1).router(|router| {
        (router.header_timeout, router.body_timeout) = (slow, slow);
    }))
    .await;
    let edge = fleet.routers[0].edge;
    for (sent, status) in [
        ("POST /v1/completions HTTP/1.1\r\nHost: a\r\n", None),
        ("", None),
        // This may still become HTTP/2.
        ("P", None),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", None),
        ("POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nabc", Some("HTTP/1.1 408 ")),
    ] {
        let begun = Instant::now();
        let mut stream = TcpStream::connect(edge).await.unwrap();
        stream.write_all(sent.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let _ = soon(&format!("an end of {sent:?}"), stream.read_to_end(&mut answer)).await;
        let answer = String::from_utf8_lossy(&answer);
        assert!(begun.elapsed() >= slow * 9 / 10, "{sent:?} was cut off after {:?}", begun.elapsed());
        if let Some(status) = status {
            assert!(answer.starts_with(status), "{sent:?}: {answer}");
        } else {
            assert!(!answer.starts_with("HTTP/1.1 200 "), "{sent:?}: {answer}");
        }
    }
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_full_router_refuses_until_it_has_room() {
    let fleet = Fleet::start(Setup::agents(1).router(|router| router.max_in_flight = 2)).await;
    let edge = fleet.edge();
    let mut first = edge.open(CHAT, &chat_stream(10_000)).await;
    let mut second = edge.open(CHAT, &chat_stream(10_000)).await;
    first.events(2).await;
    second.events(2).await;
    let answer = edge.post(CHAT, &chat(1)).await;
    assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (429, Some("1")));
    assert!(
        answer.message().contains("2 requests are in flight") && answer.message().contains("router.max_in_flight"),
        "{}",
        answer.text()
    );
    assert_eq!(edge.get("/v1/models").await.status, 200, "what costs nothing is answered");
    drop(first);
    crate::harness::until("a place", async || {
        let answer = edge.post(CHAT, &chat(1)).await;
        if answer.status == 200 { Ok(()) } else { Err(answer.text()) }
    })
    .await;
    drop(second);
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_chat_with_tools_learns_that_no_engine_reads_calls() {
    let fleet = Fleet::start(Setup::agents(1).engine("--enable-auto-tool-choice")).await;
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    let ask = async |choice: Value| {
        let mut body = chat(1);
        body["tools"] = json!([tool]);
        body["tool_choice"] = choice;
        fleet.edge().post(CHAT, &body).await
    };
    for choice in [json!("auto"), json!("required"), Value::Null] {
        let answer = ask(choice).await;
        assert_eq!(answer.status, 400, "{}", answer.text());
        assert!(answer.message().contains("--tool-call-parser NAME"), "{}", answer.message());
    }
    assert_eq!(ask(json!("none")).await.status, 200);
}
