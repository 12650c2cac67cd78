//! Bodies of requests at their limits: compressed, arriving slowly by the dozen, and answers that a
//! client of HTTP/2 does not take.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use hostler_agent::FrontEnd;
use hostler_proto::inference::v1::generate_request::Prompt;
use hostler_proto::inference::v1::inference_client::InferenceClient;
use hostler_proto::inference::v1::{Chat, GenerateRequest, Message, TokenIds};
use http::Request;
use http_body_util::{Full, StreamBody};
use hyper::body::Frame;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::harness::{CHAT, Endpoint, Fleet, MODEL, Setup, Workplace, chat, chat_stream, raw, soon, until};

fn in_gzip(body: &[u8]) -> Request<Full<Bytes>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(body).unwrap();
    let body = Full::from(encoder.finish().unwrap());
    Request::post(CHAT).header("content-type", "application/json").header("content-encoding", "gzip").body(body).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_compressed_body_is_decompressed_where_allowed_and_otherwise_refused() {
    let body = chat(3).to_string();
    let fleet = Fleet::start(Setup::agents(1)).await;
    let answer = fleet.edge().request(in_gzip(body.as_bytes())).await;
    assert_eq!((answer.status.as_u16(), answer.header("accept-encoding")), (415, Some("identity")));
    assert!(answer.message().contains("`gzip`") && answer.message().contains("router.decompress_bodies"), "{}", answer.text());
    assert_eq!(fleet.replica("n0/0").await.served, 0);

    let fleet = Fleet::start(Setup::agents(1).router(|router| router.decompress_bodies = true)).await;
    let answer = fleet.edge().request(in_gzip(body.as_bytes())).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let bomb = fleet.edge().request(in_gzip(&vec![b' '; 64 << 20])).await;
    assert_eq!(bomb.status, 413, "{}", bomb.text());
    assert!(bomb.message().contains("200 times as large"), "{}", bomb.text());
}

#[tokio::test(start_paused = true)]
async fn arriving_bodies_stay_within_the_body_memory() {
    let fleet =
        Fleet::start(Setup::agents(1).router(|router| (router.max_buffered_body_bytes, router.max_body_bytes) = (1 << 20, 900_000))).await;
    let edge = fleet.routers[0].edge;
    let head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 900000\r\n\r\n";
    let refused = format!("{head}{}", "x".repeat(400_000));
    let first = crate::harness::until("a refusal for want of memory", async || {
        // The later arrival of the two is refused, so both are sent again until that is the second.
        let mut first = TcpStream::connect(edge).await.unwrap();
        first.write_all(format!("{head}{}", "x".repeat(800_000)).as_bytes()).await.unwrap();
        let answer = timeout(Duration::from_secs(1), raw(edge, refused.as_bytes())).await.unwrap_or_default();
        let is_refused = answer.starts_with("HTTP/1.1 429 ") && answer.contains("router.max_buffered_body_bytes");
        if is_refused { Ok(first) } else { Err(answer) }
    })
    .await;
    assert_eq!(fleet.edge().post(CHAT, &chat(1)).await.status, 200, "a small one finds room");
    drop(first);
    fleet.until_idle().await;
}

/// A request with a body of 400 KB.
fn large(stream: bool) -> Value {
    let padding = "x".repeat(400_000);
    json!({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": if stream { 10_000 } else { 1 }, "stream": stream, "padding": padding})
}

#[tokio::test(start_paused = true)]
async fn bodies_waiting_for_their_answer_stay_within_the_memory() {
    let fleet =
        Fleet::start(Setup::agents(1).router(|router| (router.max_buffered_body_bytes, router.max_body_bytes) = (1 << 20, 900_000))).await;
    fleet.fault("n0/0", "hang").await;
    let ask = |body: Value| {
        let edge = fleet.edge();
        tokio::spawn(async move { edge.post(CHAT, &body).await })
    };
    let waiting = [ask(large(false)), ask(large(false))];
    fleet.until_replica("n0/0", "two large ones", |replica| replica.local_in_flight == 2).await;
    let refused = timeout(Duration::from_secs(10), fleet.edge().post(CHAT, &large(false))).await.expect("a refusal, at once");
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (429, Some("1")), "{}", refused.text());
    assert!(refused.message().contains("router.max_buffered_body_bytes"), "{}", refused.text());
    let small = ask(chat(1));
    fleet.until_replica("n0/0", "a small one", |replica| replica.local_in_flight == 3).await;
    fleet.fault("n0/0", "ok").await;
    for answer in waiting.into_iter().chain([small]) {
        assert_eq!(soon("an answer", answer).await.unwrap().status, 200);
    }
    let mut streams = Vec::new();
    for _ in 0..4 {
        let mut stream = fleet.edge().open(CHAT, &large(true)).await;
        stream.events(1).await;
        assert_eq!(stream.status, 200, "an answer that has begun needs its body no more");
        streams.push(stream);
    }
    drop(streams);
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_translated_body_takes_its_memory_once() {
    let setup = Setup::agents(1).agent(|agent| agent.front_end = FrontEnd::Rust);
    let fleet = Fleet::start(setup.router(|router| (router.max_buffered_body_bytes, router.max_body_bytes) = (1 << 20, 900_000))).await;
    // The text takes more than half of the available room.
    let text = "x".repeat(600_000);
    let messages = json!([{"role": "user", "content": text}]);
    for (path, body) in [
        ("/v1/messages", json!({"model": MODEL, "max_tokens": 1, "messages": messages})),
        ("/v1/responses", json!({"model": MODEL, "max_output_tokens": 1, "input": text})),
        ("/api/chat", json!({"model": MODEL, "stream": false, "messages": messages})),
    ] {
        let answer = fleet.edge().post(path, &body).await;
        assert!(answer.header("x-hostler-id").is_some(), "{path}: no engine was asked: {} {}", answer.status, answer.text());
    }
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_stalled_http2_stream_ends_without_its_neighbours() {
    let stall = Duration::from_millis(400);
    let fleet = Fleet::start(Setup::agents(1).engine("--sim-step-ms 10").router(|router| router.client_stall_timeout = stall)).await;
    let stream = TcpStream::connect(fleet.routers[0].edge).await.unwrap();
    let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    // Some events fit into this window, but no whole answer does.
    builder.initial_stream_window_size(1000);
    let (mut sender, connection) = builder.handshake(TokioIo::new(stream)).await.unwrap();
    let connection = tokio::spawn(connection);
    let mut ask = async |tokens: usize| {
        let body = Full::<Bytes>::from(chat_stream(tokens).to_string());
        let request = Request::post(format!("http://a{CHAT}")).header("content-type", "application/json").body(body).unwrap();
        sender.send_request(request).await.unwrap()
    };
    let untouched = ask(10_000).await;
    let neighbour = ask(300).await;
    assert_eq!((untouched.status(), neighbour.status()), (http::StatusCode::OK, http::StatusCode::OK));
    let whole = tokio::spawn(http_body_util::BodyExt::collect(neighbour.into_body()));
    // The remaining one is the neighbour, whose answer takes longer than the limit.
    fleet.until_in_flight("n0/0", 2).await;
    fleet.until_in_flight("n0/0", 1).await;
    assert!(!whole.is_finished(), "the neighbour outlives the stream that was reset");
    let whole = soon("the answer that is taken", whole).await.unwrap().unwrap().to_bytes();
    assert!(whole.ends_with(b"data: [DONE]\n\n"));
    let cut = soon("the end of the answer that was not taken", http_body_util::BodyExt::collect(untouched.into_body())).await;
    assert!(format!("{:?}", cut.unwrap_err()).contains("CANCEL"), "its stream was reset");
    let after = ask(1).await;
    assert_eq!(after.status(), http::StatusCode::OK, "the connection serves on");
    assert!(!connection.is_finished());
    drop((after, connection));
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_refusal_over_http2_comes_after_a_short_body_and_does_not_wait_for_a_long_one() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let stream = TcpStream::connect(fleet.routers[0].edge).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    for (pieces, whole) in [(3, true), (400, false)] {
        let sent = Arc::new(AtomicUsize::new(0));
        let counter = sent.clone();
        let body = futures_util::stream::unfold(0, move |number| {
            let counter = counter.clone();
            async move {
                tokio::time::sleep(Duration::from_millis(20)).await;
                counter.store(number + 1, Ordering::Relaxed);
                (number < pieces).then(|| (Ok::<_, std::io::Error>(Frame::data(Bytes::from_static(b"piece"))), number + 1))
            }
        });
        let request = Request::post("http://a/nowhere").body(StreamBody::new(Box::pin(body))).unwrap();
        let answer = soon("a refusal", sender.send_request(request)).await.unwrap();
        assert_eq!(answer.status(), http::StatusCode::NOT_FOUND);
        assert_eq!(sent.load(Ordering::Relaxed) > pieces, whole, "of {pieces} pieces");
    }
}

#[tokio::test(start_paused = true)]
async fn a_bare_line_feed_is_refused_and_ends_the_connection() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let mut stream = TcpStream::connect(fleet.routers[0].edge).await.unwrap();
    let hidden = "GET /health HTTP/1.1\r\nHost: a\r\n\r\n";
    stream.write_all(format!("GET /health HTTP/1.1\r\nHost: a\nX: y\r\n\r\n{hidden}").as_bytes()).await.unwrap();
    let mut answer = String::new();
    let _ = soon("the end", stream.read_to_string(&mut answer)).await;
    assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("carriage return and line feed"), "{answer}");
    assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
}

#[tokio::test(start_paused = true)]
async fn a_chat_with_several_large_images_passes() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let image = json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{}", "A".repeat(6 << 20))}});
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": [image, image, image]}], "max_tokens": 1});
    let answer = fleet.edge().post(CHAT, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    fleet.until_idle().await;
}

/// Resident size of a process, or its peak, in bytes.
fn memory(pid: u32, field: &str) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

/// Bodies of about this many bytes with the smallest possible values, for every route that reads
/// more of them than a few fields.
fn bodies_of_small_values(bytes: usize) -> Vec<(String, &'static str, String)> {
    let many = |item: &str| vec![item; bytes / (item.len() + 1)].join(",");
    let names: String = (0..bytes / 12).map(|at| format!(r#""{at:07}":0,"#)).collect();
    let shapes = [
        ("numbers", format!("[{}]", many("0"))),
        ("lists", format!("[{}]", many("[]"))),
        ("objects", format!("[{}]", many("{}"))),
        ("names", format!(r#"{{{names}"":0}}"#)),
        ("text", format!(r#""{}""#, "x".repeat(bytes))),
    ];
    let turn = r#"[{"role":"user","content":"x"}]"#;
    let fields = [
        (CHAT, "messages", ""),
        (CHAT, "tools", turn),
        ("/v1/completions", "prompt", ""),
        ("/v1/messages", "messages", ""),
        ("/v1/messages", "tools", turn),
        ("/v1/messages/count_tokens", "system", turn),
        ("/v1/responses", "input", ""),
        ("/v1/responses", "metadata", turn),
        ("/invocations", "prompt", ""),
        ("/tokenize", "messages", ""),
        ("/api/chat", "messages", ""),
        ("/api/chat", "tools", turn),
        ("/api/generate", "context", turn),
        ("/api/embed", "input", ""),
    ];
    let mut bodies = Vec::new();
    for (path, field, turn) in fields {
        let others = if turn.is_empty() { String::new() } else { format!(r#""messages":{turn},"input":"x","prompt":"x","#) };
        for (shape, value) in &shapes {
            let body = format!(r#"{{"model":"{MODEL}","max_tokens":1,{others}"{field}":{value}}}"#);
            bodies.push((format!("{path}: {field} of {shape}"), path, body));
        }
    }
    bodies
}

#[tokio::test]
async fn no_shape_of_a_body_takes_many_times_its_size() {
    const BODY_BYTES: usize = 2 << 20;
    // 32 MiB of a body's values are not counted, and the program has its own buffers.
    const FREE_BYTES: usize = 48 << 20;
    let place = Workplace::new();
    let up = place.up(1, &["--sim-rust-front-end"]);
    let address = up.address("edge").await;
    let edge = Endpoint::Tcp(address);
    until("an answer", async || {
        let answer = edge.post(CHAT, &chat(1)).await;
        if answer.status == 200 { Ok(()) } else { Err(answer.text()) }
    })
    .await;
    let before = || {
        // Forget the earlier peak.
        std::fs::write(format!("/proc/{}/clear_refs", up.pid()), "5").unwrap();
        memory(up.pid(), "VmRSS")
    };
    let check = |case: &str, bytes: usize, before: usize| {
        let grown = memory(up.pid(), "VmHWM").saturating_sub(before);
        assert!(grown < 3 * bytes + FREE_BYTES, "{case}: {} MiB for {} MiB", grown >> 20, bytes >> 20);
    };
    for (case, path, body) in bodies_of_small_values(BODY_BYTES) {
        let (bytes, before) = (body.len(), before());
        let request = Request::post(path).header("content-type", "application/json").body(Full::from(body)).unwrap();
        let answer = edge.request(request).await;
        assert!(answer.status.as_u16() < 500, "{case}: {} {}", answer.status, answer.text());
        check(&case, bytes, before);
    }
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap();
    let mut calls = InferenceClient::new(channel.connect().await.unwrap());
    let chat = Prompt::Chat(Chat { messages: vec![Message::default(); BODY_BYTES / 2], ..Chat::default() });
    let tokens = Prompt::Tokens(TokenIds { ids: vec![1; BODY_BYTES] });
    for (case, prompt) in [("messages", chat), ("token ids", tokens)] {
        let before = before();
        let request = GenerateRequest { model: MODEL.into(), prompt: Some(prompt), ..GenerateRequest::default() };
        let _ = calls.generate(request).await;
        check(&format!("gRPC: {case}"), BODY_BYTES, before);
    }
}
