//! Takeover of a router's place by another one, as programs: no client is refused, no stream
//! breaks, and a failed start changes nothing.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::task::AbortOnDropHandle;

use crate::harness::{
    Admin, Answer, Answering, CHAT, Endpoint, MODEL, Program, Workplace, chat, chat_stream, json_request, signal, soon, until,
};

/// Routers and agents of one user, all of them programs.
struct Site {
    workplace: Workplace,
    router_flags: Vec<String>,
    agents: Vec<Program>,
}

/// A router, and the flags with which another one has the same place.
struct Place {
    router: Program,
    edge: Endpoint,
    admin: Admin,
    flags: Vec<String>,
}

impl Site {
    fn new(router_flags: &[&str]) -> Self {
        // Idle connections keep a replaced router alive for this long.
        let flags = ["--keep-alive", "2s"].into_iter().chain(router_flags.iter().copied());
        Self { workplace: Workplace::new(), router_flags: flags.map(str::to_owned).collect(), agents: Vec::new() }
    }

    fn start_router(&self, name: &str, flags: &[String]) -> Program {
        let flags: Vec<&str> = ["router"].into_iter().chain(flags.iter().map(String::as_str)).collect();
        self.workplace.start(name, &flags)
    }

    /// Starts the first router, with its addresses fixed for its successors.
    async fn place(&self) -> Place {
        let any = ["--listen", "--agents-listen", "--admin-listen"].map(|flag| [flag.to_owned(), "127.0.0.1:0".to_owned()]);
        let router = self.start_router("first", &[self.router_flags.clone(), any.concat()].concat());
        let mut flags = self.router_flags.clone();
        for (flag, line) in [("--listen", "edge"), ("--agents-listen", "agents"), ("--admin-listen", "admin")] {
            flags.extend([flag.to_owned(), router.address(line).await.to_string()]);
        }
        Place { edge: Endpoint::Tcp(router.address("edge").await), admin: router.admin().await, router, flags }
    }

    fn start_agent(&mut self, place: &Place, replicas: u32, engine: &[&str]) {
        let (name, replicas) = (format!("n{}", self.agents.len()), replicas.to_string());
        let router = place.flag("--agents-listen");
        let role = ["agent", "--router", router, "--node", &name, "--engine", "simulated", "--replicas", &replicas];
        let flags = [&role[..], &["--", "--sim-start-ms", "50"], engine].concat();
        self.agents.push(self.workplace.start(&name, &flags));
    }
}

impl Place {
    fn flag(&self, name: &str) -> &str {
        let at = self.flags.iter().position(|flag| flag == name).unwrap();
        &self.flags[at + 1]
    }

    async fn until_ready(&self, replicas: usize) {
        until("ready replicas", async || {
            let seen = self.admin.replicas().await.map_err(|status| status.to_string())?;
            let ready = seen.iter().filter(|replica| replica.is_ready()).count();
            if ready == replicas { Ok(()) } else { Err(format!("{seen:#?}\n{}", self.router.stderr())) }
        })
        .await;
    }

    /// Starts a router that should take this one's place.
    fn start_successor(&self, site: &Site, name: &str) -> Program {
        site.start_router(name, &[self.flags.clone(), vec!["--takeover".to_owned()]].concat())
    }

    /// Starts a router that takes this one's place, and returns once it has.
    async fn take_over(&self, site: &Site, name: &str) -> Program {
        let next = self.start_successor(site, name);
        until("a taken place", async || {
            let log = self.router.stderr();
            if log.contains("has taken this one's place") { Ok(()) } else { Err(format!("{log}\n{}", next.stderr())) }
        })
        .await;
        next
    }

    fn takeover_socket(&self) -> PathBuf {
        format!("{}.takeover", self.admin.socket()).into()
    }

    async fn assert_ended(&mut self) {
        let ended = self.router.ended().await;
        assert!(ended.success(), "{ended}: {}", self.router.stderr());
    }
}

/// Short requests, one after another, until told to stop. Each must be answered.
struct Asking {
    stop: Arc<AtomicBool>,
    tasks: JoinSet<usize>,
}

impl Asking {
    /// Starts this many clients of each kind: with a connection for each request, one that is kept,
    /// and HTTP/2.
    fn start(edge: &Endpoint, each: usize, pause: Duration) -> Self {
        let Endpoint::Tcp(address) = *edge else { unreachable!("the edge is TCP") };
        let mut asking = Self { stop: Arc::default(), tasks: JoinSet::new() };
        for _ in 0..each {
            let (stop, edge) = (asking.stop.clone(), edge.clone());
            asking.tasks.spawn(async move {
                let mut answered = 0;
                while !stop.load(Ordering::Relaxed) {
                    let answer = edge.post(CHAT, &chat(2)).await;
                    assert_eq!(answer.status, 200, "{}", answer.text());
                    answered += 1;
                    tokio::time::sleep(pause).await;
                }
                answered
            });
            asking.spawn_kept(move || connect_http1(address), pause);
            asking.spawn_kept(move || connect_http2(address), pause);
        }
        asking
    }

    fn spawn_kept<F: Future<Output = Kept> + Send>(&mut self, connect: impl Fn() -> F + Send + 'static, pause: Duration) {
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            let (mut answered, mut kept) = (0, connect().await);
            while !stop.load(Ordering::Relaxed) {
                let mut request = json_request(CHAT, &chat(2));
                request.headers_mut().insert("host", "localhost".parse().unwrap());
                *request.uri_mut() = format!("http://localhost{CHAT}").parse().unwrap();
                while !kept.ask(&request).await {
                    kept = connect().await;
                }
                answered += 1;
                tokio::time::sleep(pause).await;
            }
            answered
        });
    }

    async fn stop(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        soon("the last answers", self.tasks.join_all()).await.into_iter().sum()
    }
}

/// A connection that is kept for further requests.
struct Kept {
    sender: Sender,
    _connection: AbortOnDropHandle<()>,
}

enum Sender {
    Http1(http1::SendRequest<Full<Bytes>>),
    Http2(http2::SendRequest<Full<Bytes>>),
}

async fn connect_http1(address: std::net::SocketAddr) -> Kept {
    let stream = TokioIo::new(TcpStream::connect(address).await.unwrap());
    let (sender, connection) = http1::handshake(stream).await.unwrap();
    Kept { sender: Sender::Http1(sender), _connection: AbortOnDropHandle::new(tokio::spawn(async { drop(connection.await) })) }
}

async fn connect_http2(address: std::net::SocketAddr) -> Kept {
    let stream = TokioIo::new(TcpStream::connect(address).await.unwrap());
    let (sender, connection) = http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    Kept { sender: Sender::Http2(sender), _connection: AbortOnDropHandle::new(tokio::spawn(async { drop(connection.await) })) }
}

impl Kept {
    /// Sends a request and reads the whole answer.
    ///
    /// `false` if the router has not begun with it, so that it may be sent again, as every pool of
    /// connections does.
    async fn ask(&mut self, request: &Request<Full<Bytes>>) -> bool {
        let request = request.clone();
        let sent = match &mut self.sender {
            Sender::Http1(sender) => match sender.ready().await {
                Ok(()) => sender.try_send_request(request).await,
                Err(_) => return false,
            },
            Sender::Http2(sender) => match sender.ready().await {
                Ok(()) => sender.try_send_request(request).await,
                Err(_) => return false,
            },
        };
        match sent {
            Ok(answer) => {
                let status = answer.status();
                let body = answer.into_body().collect().await.expect("a whole answer").to_bytes();
                assert_eq!(status, StatusCode::OK, "{}", String::from_utf8_lossy(&body));
                true
            }
            Err(mut error) => {
                let was_sent = error.take_message().is_none();
                let error = error.into_error();
                assert!(!was_sent || is_unprocessed(&error), "a request was lost: {error:?}");
                false
            }
        }
    }
}

/// Whether the server has said that it did not begin with the request: it is above the last stream
/// of a GOAWAY, or was refused (RFC 9113, 8.7).
///
/// These are the rules of reqwest.
fn is_unprocessed(error: &hyper::Error) -> bool {
    let Some(error) = error.source().and_then(|cause| cause.downcast_ref::<h2::Error>()) else { return false };
    let says = |reason| error.is_remote() && error.reason() == Some(reason);
    (error.is_go_away() && says(h2::Reason::NO_ERROR)) || (error.is_reset() && says(h2::Reason::REFUSED_STREAM))
}

async fn open_streams(edge: &Endpoint, count: usize, tokens: usize) -> Vec<JoinHandle<Answer>> {
    let opened = (0..count).map(|_| {
        let edge = edge.clone();
        async move { edge.open(CHAT, &chat_stream(tokens)).await }
    });
    let mut opened: Vec<Answering> = futures_util::future::join_all(opened).await;
    for stream in &mut opened {
        stream.events(1).await;
    }
    opened.into_iter().map(|stream| tokio::spawn(stream.finish())).collect()
}

/// Concurrent streams that outlast a takeover.
const STREAMS: usize = 100;

/// Makes a takeover under these streams and this many clients of each kind, and returns the
/// answered requests per second.
async fn take_over_under_load(clients: usize, pause: Duration) -> f64 {
    let mut site = Site::new(&[]);
    let mut place = site.place().await;
    for _ in 0..2 {
        site.start_agent(&place, 2, &["--sim-step-ms", "50"]);
    }
    place.until_ready(4).await;
    let streams = open_streams(&place.edge, STREAMS, 150).await;
    let mut long = place.edge.open(CHAT, &chat_stream(10_000)).await;
    long.events(2).await;
    let (began, asking) = (Instant::now(), Asking::start(&place.edge, clients, pause));
    let (old, life) = (place.router.pid(), place.admin.replicas().await.unwrap());

    let next = place.take_over(&site, "second").await;
    let nodes = place.admin.nodes().await.unwrap();
    assert!(nodes.len() == 2 && nodes.iter().all(|node| node.attached), "operators see the new one's fleet: {nodes:?}");
    let had = String::from_utf8_lossy(&long.read).matches("\n\n").count();
    long.events(had + 20).await;
    assert!(crate::harness::is_alive(old), "the old one goes on with its streams");
    drop(long);
    for stream in streams {
        stream.await.unwrap().assert_whole_stream();
    }
    place.assert_ended().await;
    let answered = asking.stop().await;
    let rate = answered as f64 / began.elapsed().as_secs_f64();
    assert_eq!(place.edge.post(CHAT, &chat(2)).await.status, 200);
    let after = place.admin.replicas().await.unwrap();
    // Repeated requests had not been begun: agents count each request once, including the streams,
    // the long one and the last one.
    until("each request counted once", async || {
        let served: u64 = place.admin.replicas().await.unwrap().iter().map(|replica| replica.served).sum();
        let expected = (answered + STREAMS + 2) as u64;
        if served == expected { Ok(()) } else { Err(format!("{served} of {expected}")) }
    })
    .await;
    let pids = |replicas: &[crate::harness::Seen]| replicas.iter().map(|replica| replica.pid).collect::<Vec<_>>();
    assert_eq!(pids(&life), pids(&after), "no engine was touched");
    assert!(!next.stderr().contains("ERROR"), "{}", next.stderr());
    rate
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_takes_over_without_a_client_noticing() {
    let rate = take_over_under_load(2, Duration::from_millis(100)).await;
    assert!(rate > 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "500 requests a second need more than two busy cores in a debug build"]
async fn a_router_takes_over_under_500_requests_a_second() {
    let rate = take_over_under_load(50, Duration::from_millis(110)).await;
    assert!(rate >= 500.0, "{rate} requests a second");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn successive_takeovers_work_while_old_routers_have_streams() {
    let mut site = Site::new(&[]);
    let mut place = site.place().await;
    site.start_agent(&place, 1, &["--sim-step-ms", "100"]);
    place.until_ready(1).await;
    let mut streams = open_streams(&place.edge, 1, 60).await;
    let second = place.take_over(&site, "second").await;
    streams.extend(open_streams(&place.edge, 1, 60).await);
    let mut again = Place { router: second, edge: place.edge.clone(), admin: place.admin, flags: place.flags.clone() };
    let _third = again.take_over(&site, "third").await;
    streams.extend(open_streams(&place.edge, 1, 10).await);
    for stream in streams {
        stream.await.unwrap().assert_whole_stream();
    }
    place.assert_ended().await;
    again.assert_ended().await;
    assert_eq!(place.edge.post(CHAT, &chat(2)).await.status, 200);
    assert!(place.takeover_socket().exists(), "the third one's");
}

/// A request for the models as a frame of HTTP/2.
fn models_frame(stream: u8) -> Vec<u8> {
    // HPACK: GET, http, a path and an authority.
    let head = [&[0x82, 0x86, 0x04, 10][..], b"/v1/models", &[0x01, 9], b"localhost"].concat();
    let length = u8::try_from(head.len()).unwrap();
    // HEADERS that end the head and the request.
    [&[0, 0, length, 1, 0x5, 0, 0, 0, stream][..], &head].concat()
}

/// Reads frames of HTTP/2 up to one of this type on this stream.
async fn read_until_frame(client: &mut TcpStream, kind: u8, stream: u8) -> Vec<u8> {
    soon("a frame", async {
        loop {
            let mut head = [0; 9];
            client.read_exact(&mut head).await.expect("the router hung up");
            let mut payload = vec![0; usize::from(u16::from_be_bytes([head[1], head[2]]))];
            client.read_exact(&mut payload).await.unwrap();
            if (head[3], head[8]) == (kind, stream) {
                return payload;
            }
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_crossing_an_idle_http2_close_is_answered() {
    let site = Site::new(&[]);
    let place = site.place().await;
    let Endpoint::Tcp(address) = place.edge else { unreachable!("the edge is TCP") };
    let mut client = TcpStream::connect(address).await.unwrap();
    let (settings, acknowledged) = ([0, 0, 0, 4, 0, 0, 0, 0, 0], [0, 0, 0, 4, 1, 0, 0, 0, 0]);
    let hello = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &settings[..], &acknowledged, &models_frame(1)].concat();
    client.write_all(&hello).await.unwrap();
    read_until_frame(&mut client, 1, 1).await;
    // Read the GOAWAY. The client has not acknowledged it yet.
    read_until_frame(&mut client, 7, 0).await;
    client.write_all(&models_frame(3)).await.unwrap();
    let answer = read_until_frame(&mut client, 1, 3).await;
    assert_eq!(answer[0], 0x88, "status 200");
}

/// Sends a message as a successor would.
async fn say(stream: &mut UnixStream, message: &Value) {
    let text = message.to_string();
    stream.write_all(&u32::try_from(text.len()).unwrap().to_be_bytes()).await.unwrap();
    stream.write_all(text.as_bytes()).await.unwrap();
}

async fn hear(stream: &mut UnixStream) -> Value {
    soon("a message of the router", async {
        let mut length = [0; 4];
        stream.read_exact(&mut length).await.unwrap();
        let mut text = vec![0; u32::from_be_bytes(length) as usize];
        stream.read_exact(&mut text).await.unwrap();
        serde_json::from_slice(&text).unwrap()
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_takeover_leaves_the_predecessor_serving() {
    let mut site = Site::new(&[]);
    let mut place = site.place().await;
    site.start_agent(&place, 1, &["--sim-step-ms", "50"]);
    place.until_ready(1).await;
    let streams = open_streams(&place.edge, 2, 150).await;
    // Without the flag it is a mistake. (A program that is dropped ends its workplace's engines.)
    let mut second = site.start_router("mistaken", &place.flags);
    assert!(!second.ended().await.success());
    assert!(second.stderr().contains("`hostler router --takeover`"), "{}", second.stderr());
    // The third router's own settings are wrong.
    let wrong = [place.flags.clone(), ["--takeover", "--keys-file", "/nowhere/keys.toml"].map(str::to_owned).to_vec()].concat();
    let mut third = site.start_router("wrong", &wrong);
    assert!(!third.ended().await.success());
    // This successor is of another version.
    let mut other = UnixStream::connect(place.takeover_socket()).await.unwrap();
    say(&mut other, &json!({"Hello": {"protocol": 99, "version": "9.8.7"}})).await;
    let refused = hear(&mut other).await;
    assert!(refused["Refused"].as_str().unwrap().contains("router 9.8.7"), "{refused}");
    // This successor dies once it has the agents, who dial and find nobody.
    let mut dying = UnixStream::connect(place.takeover_socket()).await.unwrap();
    say(&mut dying, &json!({"Hello": {"protocol": 1, "version": "0.1.0"}})).await;
    let offer = hear(&mut dying).await;
    assert_eq!(offer["Offer"]["fleet"]["ready_replicas"][0]["id"], "n0/0", "{offer}");
    dying.read_u8().await.unwrap();
    say(&mut dying, &json!("ReadyForAgents")).await;
    assert_eq!(hear(&mut dying).await, json!("AgentsAreYours"));
    drop(dying);
    until("the failure to be told", async || {
        let log = place.router.stderr();
        if log.matches("this one serves on").count() == 2 { Ok(()) } else { Err(log) }
    })
    .await;

    assert_eq!(place.edge.post(CHAT, &chat(2)).await.status, 200);
    site.start_agent(&place, 1, &[]);
    place.until_ready(2).await;
    let _next = place.take_over(&site, "second").await;
    assert_eq!(place.edge.post(CHAT, &chat(2)).await.status, 200);
    for stream in streams {
        stream.await.unwrap().assert_whole_stream();
    }
    place.assert_ended().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_whose_predecessor_is_killed_serves_on() {
    let mut site = Site::new(&[]);
    let mut place = site.place().await;
    site.start_agent(&place, 1, &["--sim-step-ms", "50"]);
    place.until_ready(1).await;
    let mut next = place.take_over(&site, "second").await;
    let stream = open_streams(&place.edge, 1, 40).await.remove(0);
    signal(place.router.pid(), Signal::KILL);
    place.router.ended().await;
    stream.await.unwrap().assert_whole_stream();
    assert_eq!(place.edge.post(CHAT, &chat(2)).await.status, 200);
    // If there is no router, the flag starts one.
    signal(next.pid(), Signal::TERM);
    next.ended().await;
    let alone = place.start_successor(&site, "third");
    alone.line("edge").await;
    until("an answer of the third", async || match place.edge.try_send(json_request(CHAT, &chat(2))).await {
        Ok(answer) if answer.status == 200 => Ok(()),
        other => Err(format!("{other:?}\n{}", alone.stderr())),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_predecessor_that_only_hangs_up_keeps_its_place() {
    let site = Site::new(&[]);
    let mut place = site.place().await;
    signal(place.router.pid(), Signal::TERM);
    place.assert_ended().await;
    // This process lives, but gives nothing.
    let running = UnixListener::bind(place.takeover_socket()).unwrap();
    let mut next = place.start_successor(&site, "second");
    let (mut stream, _) = soon("the second one's call", running.accept()).await.unwrap();
    assert_eq!(hear(&mut stream).await["Hello"]["protocol"], 1);
    say(&mut stream, &json!({"Offer": {"version": "0.1.0", "fleet": {"nodes": [], "ready_replicas": []}}})).await;
    drop(stream);
    assert!(!next.ended().await.success());
    assert!(next.stderr().contains("it serves on"), "{}", next.stderr());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draining_router_refuses_new_clients_and_finishes_streams() {
    let mut site = Site::new(&[]);
    let mut place = site.place().await;
    site.start_agent(&place, 1, &["--sim-step-ms", "50"]);
    place.until_ready(1).await;
    let stream = open_streams(&place.edge, 1, 150).await.remove(0);
    let Endpoint::Tcp(address) = place.edge else { unreachable!("the edge is TCP") };
    signal(place.router.pid(), Signal::TERM);
    until("a refused connection", async || match TcpStream::connect(address).await {
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
    assert!(!stream.is_finished(), "the router still has it");
    stream.await.unwrap().assert_whole_stream();
    place.assert_ended().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn budgets_and_stored_responses_outlast_a_takeover_over_tls() {
    let mut site = Site::new(&[]);
    let (fleet, keys) = (site.workplace.path().join("fleet"), site.workplace.path().join("keys.toml"));
    let (fleet, keys) = (fleet.to_str().unwrap().to_owned(), keys.to_str().unwrap().to_owned());
    let token = site.workplace.path().join("token").to_str().unwrap().to_owned();
    let run = async |arguments: &[&str]| {
        let ended = site.workplace.run(arguments).await;
        assert!(ended.success, "{arguments:?}: {}", ended.stderr);
        ended.stdout.trim().to_owned()
    };
    run(&["init", "--dir", &fleet, "--out", &token]).await;
    let ours = run(&["keys", "create", "--name", "ours", "--file", &keys, "--output-per-day", "200"]).await;
    let theirs = run(&["keys", "create", "--name", "theirs", "--file", &keys]).await;
    site.router_flags.extend(["--tls-dir", &fleet, "--keys-file", &keys].map(str::to_owned));
    site.workplace.environment.push(("HOSTLER_AGENT_JOIN_TOKEN_FILE", token.leak()));
    let mut place = site.place().await;
    site.start_agent(&place, 1, &["--sim-step-ms", "50", "--sim-store-responses"]);
    place.until_ready(1).await;
    let edge = place.edge.clone();
    let ask = async |path: &str, body: &Value, key: &str| {
        let mut request = if body.is_null() { Request::get(path).body(Full::default()).unwrap() } else { json_request(path, body) };
        request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
        edge.send(request).await
    };
    let store = json!({"model": MODEL, "input": "Hello", "max_output_tokens": 4});
    let response = |made: &Answer| made.json()["id"].as_str().unwrap().to_owned();
    let before = response(&ask("/v1/responses", &store, &ours).await.finish().await);
    let mut limited = chat_stream(150);
    limited["max_tokens"] = 150.into();
    let running = tokio::spawn(ask(CHAT, &limited, &ours).await.finish());

    let _next = place.take_over(&site, "second").await;
    let refused = ask(CHAT, &chat(60), &ours).await.finish().await;
    assert_eq!(refused.status, 429, "what runs at the old one is reserved of 200: {}", refused.text());
    for (key, status) in [(&ours, 200), (&theirs, 404)] {
        let found = ask(&format!("/v1/responses/{before}"), &Value::Null, key).await.finish().await;
        assert_eq!(found.status, status, "{}", found.text());
    }
    running.await.unwrap().assert_whole_stream();
    place.assert_ended().await;
    let refused = ask(CHAT, &chat(60), &ours).await.finish().await;
    assert_eq!(refused.status, 429, "it was used: {}", refused.text());
    let small = ask(CHAT, &chat(10), &ours).await.finish().await;
    assert_eq!(small.status, 200, "{}", small.text());
}
