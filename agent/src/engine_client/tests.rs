//! The client against engines that answer, close and hang in every order.

use std::sync::Arc;

use bytes::Bytes;
use hostler_proto::agent::v1::frame::Kind;
use hostler_proto::agent::v1::{Frame, FrameBatch};
use hostler_proto::lane::{Header, RequestHead};
use prometheus_client::metrics::counter::Counter;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;
use tokio::time::timeout;

use super::*;
use crate::lane::{IncomingRequest, Lane, RequestStream};

const LONG: Duration = Duration::from_secs(20);

struct Fixture {
    client: Arc<EngineClient>,
    listener: UnixListener,
    lane: Arc<Lane>,
    /// Requests begun, which the router has not cancelled.
    requests: Vec<RequestStream>,
    _directory: tempfile::TempDir,
}

/// Outcome of a request: its status and its whole body.
type Outcome = tokio::task::JoinHandle<Result<(u16, Vec<u8>), String>>;

impl Fixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let client = Arc::new(EngineClient::new(socket));
        Self { client, listener, lane: Lane::new(Counter::default()), requests: Vec::new(), _directory: directory }
    }

    /// A request that announces this length, of which the router has sent these bytes.
    fn outgoing(&mut self, method: &str, announced: u64, body: &'static [u8]) -> OutgoingRequest {
        let id = self.requests.len() as u64 + 1;
        let headers = vec![Header { name: "x-a".into(), value: "1".into() }, Header { name: "Content-Length".into(), value: "77".into() }];
        let head =
            RequestHead { method: method.into(), path: "/v1/x?y=1".into(), body_bytes: announced, headers, ..RequestHead::default() };
        let frames = vec![Frame::new(id, Kind::Request(head.into())), Frame::new(id, Kind::Body(body.into()))];
        let IncomingRequest { head, stream: serving } = self.lane.receive(FrameBatch { frames }).pop().unwrap();
        self.requests.push(serving);
        OutgoingRequest::new(head, self.requests[self.requests.len() - 1].body()).unwrap()
    }

    fn ask(&mut self, method: &str, announced: u64, body: &'static [u8]) -> Outcome {
        let (client, outgoing) = (self.client.clone(), self.outgoing(method, announced, body));
        tokio::spawn(async move {
            let failed = |error: RequestError| error.to_string();
            let (head, mut answer) = client.request(outgoing, || {}).await.map_err(failed)?;
            let mut body = Vec::new();
            while let Some(piece) = answer.next_chunk().await {
                body.extend_from_slice(&piece.map_err(failed)?);
            }
            answer.recycle();
            Ok((head.status, body))
        })
    }

    /// A request whose bytes sent so far the engine has read.
    async fn taken(&mut self, announced: u64, body: &'static str) -> (Outcome, UnixStream) {
        let outcome = self.ask("POST", announced, body.as_bytes());
        let mut engine = self.accept().await;
        read_to(&mut engine, body).await;
        (outcome, engine)
    }

    async fn accept(&self) -> UnixStream {
        timeout(LONG, self.listener.accept()).await.unwrap().unwrap().0
    }

    fn kept(&self) -> usize {
        self.client.idle.lock().len()
    }
}

/// The engine reads until this end appears.
async fn read_to(engine: &mut UnixStream, end: &str) -> String {
    let mut read = Vec::new();
    while !read.ends_with(end.as_bytes()) {
        let more = timeout(LONG, engine.read_buf(&mut read)).await.unwrap().unwrap();
        assert!(more > 0, "closed after {:?}", String::from_utf8_lossy(&read));
    }
    String::from_utf8(read).unwrap()
}

async fn write(engine: &mut UnixStream, text: &str) {
    engine.write_all(text.as_bytes()).await.unwrap();
}

async fn end(outcome: Outcome) -> Result<(u16, String), String> {
    let (status, body) = timeout(LONG, outcome).await.unwrap().unwrap()?;
    Ok((status, String::from_utf8(body).unwrap()))
}

const ANSWER: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n";

fn answered() -> Result<(u16, String), String> {
    Ok((200, "ab".into()))
}

#[tokio::test]
async fn requests_reuse_one_connection() {
    let mut fixture = Fixture::new();
    let first = fixture.ask("POST", 4, b"body");
    let mut engine = fixture.accept().await;
    let read = read_to(&mut engine, "body").await;
    assert_eq!(read, "POST /v1/x?y=1 HTTP/1.1\r\nhost: engine\r\nx-a: 1\r\ncontent-length: 4\r\n\r\nbody");
    write(&mut engine, ANSWER).await;
    assert_eq!(end(first).await, answered());
    for _ in 0..2 {
        assert_eq!(fixture.kept(), 1);
        let next = fixture.ask("GET", 0, b"");
        assert_eq!(read_to(&mut engine, "\r\n\r\n").await, "GET /v1/x?y=1 HTTP/1.1\r\nhost: engine\r\nx-a: 1\r\n\r\n");
        write(&mut engine, "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab").await;
        assert_eq!(end(next).await, answered());
    }
}

#[tokio::test]
async fn a_connection_closed_by_the_engine_costs_no_request() {
    let mut fixture = Fixture::new();
    let first = fixture.ask("POST", 4, b"body");
    let mut engine = fixture.accept().await;
    write(&mut engine, ANSWER).await;
    assert_eq!(end(first).await, answered());
    assert_eq!(fixture.kept(), 1);
    drop(engine);
    let (second, mut engine) = fixture.taken(4, "body").await;
    write(&mut engine, ANSWER).await;
    assert_eq!(end(second).await, answered());
}

#[tokio::test]
async fn a_connection_that_cannot_be_reused_is_closed() {
    for answer in [
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nab",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nabHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nxy",
    ] {
        let mut fixture = Fixture::new();
        let (outcome, mut engine) = fixture.taken(4, "body").await;
        write(&mut engine, answer).await;
        assert_eq!(end(outcome).await, answered());
        assert_eq!(fixture.kept(), 0);
        assert_eq!(timeout(LONG, engine.read(&mut [0])).await.unwrap().unwrap_or(0), 0);
    }
}

#[tokio::test]
async fn an_answer_without_a_length_ends_with_the_connection() {
    let mut fixture = Fixture::new();
    let outcome = fixture.ask("GET", 0, b"");
    let mut engine = fixture.accept().await;
    read_to(&mut engine, "\r\n\r\n").await;
    write(&mut engine, "HTTP/1.1 200 OK\r\n\r\nab").await;
    drop(engine);
    assert_eq!((end(outcome).await, fixture.kept()), (answered(), 0));
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_an_error() {
    for begun in ["", "HTTP/1.1 200", "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab", ANSWER.strip_suffix("\r\n").unwrap()] {
        let mut fixture = Fixture::new();
        let (outcome, mut engine) = fixture.taken(4, "body").await;
        write(&mut engine, begun).await;
        drop(engine);
        assert_eq!(end(outcome).await.unwrap_err(), hostler_http1::HttpError::Closed.to_string(), "{begun}");
    }
}

#[tokio::test]
async fn an_answer_may_precede_the_end_of_its_request() {
    let mut fixture = Fixture::new();
    let (outcome, mut engine) = fixture.taken(4, "bo").await;
    write(&mut engine, ANSWER).await;
    assert_eq!(end(outcome).await, answered());
    // The engine would take the next request for the rest of this one.
    assert_eq!(fixture.kept(), 0);
}

#[tokio::test]
async fn an_engine_may_refuse_a_request_without_reading_it() {
    let mut fixture = Fixture::new();
    let outcome = fixture.ask("POST", 9_000_000, &[b'x'; 200_000]);
    let mut engine = fixture.accept().await;
    write(&mut engine, "HTTP/1.1 413 Large\r\ncontent-length: 2\r\n\r\nno").await;
    drop(engine);
    assert_eq!(end(outcome).await, Ok((413, "no".into())));
}

#[tokio::test]
async fn a_request_body_is_sent_while_its_answer_waits() {
    let mut fixture = Fixture::new();
    let (client, outgoing) = (fixture.client.clone(), fixture.outgoing("POST", 4, b"bo"));
    let mut engine_side = None;
    let (_, mut answer) = {
        let request = client.request(outgoing, || {});
        let engine = async {
            let mut engine = fixture.accept().await;
            read_to(&mut engine, "bo").await;
            write(&mut engine, ANSWER).await;
            engine_side = Some(engine);
        };
        let (answer, ()) = tokio::join!(request, engine);
        answer.unwrap()
    };
    fixture.lane.receive(FrameBatch { frames: vec![Frame::new(1, Kind::Body(Bytes::from_static(b"dy")))] });
    let mut engine = engine_side.unwrap();
    tokio::select! {
        never = answer.keep_sending() => match never {},
        read = read_to(&mut engine, "dy") => assert_eq!(read, "dy"),
    }
    while answer.next_chunk().await.is_some() {}
    answer.recycle();
    assert_eq!(fixture.kept(), 1);
}

#[tokio::test]
async fn a_body_of_another_length_than_announced_breaks_its_request() {
    for (announced, sent) in [(1, &b"body"[..]), (9, b"body")] {
        let mut fixture = Fixture::new();
        let outcome = fixture.ask("POST", announced, sent);
        fixture.lane.receive(FrameBatch { frames: vec![Frame::end(1, None)] });
        let error = end(outcome).await.unwrap_err();
        assert!(error.contains("than it announced"), "{error}");
    }
}

#[tokio::test]
async fn a_dropped_answer_closes_its_connection() {
    let mut fixture = Fixture::new();
    let (outcome, mut engine) = fixture.taken(4, "body").await;
    write(&mut engine, "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n").await;
    outcome.abort();
    assert_eq!(timeout(LONG, engine.read(&mut [0])).await.unwrap().unwrap_or(0), 0);
    assert_eq!(fixture.kept(), 0);
}

#[tokio::test]
async fn kept_connections_expire_or_end_when_the_engine_closes_them() {
    let mut fixture = Fixture::new();
    let mut engines = Vec::new();
    let mut outcomes = Vec::new();
    for _ in 0..2 {
        outcomes.push(fixture.ask("POST", 4, b"body"));
        engines.push(fixture.accept().await);
    }
    for (outcome, engine) in outcomes.into_iter().zip(&mut engines) {
        write(engine, ANSWER).await;
        assert_eq!(end(outcome).await, answered());
    }
    tokio::time::pause();
    let client = fixture.client.clone();
    let tending = tokio::spawn(async move { client.prune_idle().await });
    assert_eq!(fixture.kept(), 2);
    engines.pop();
    sleep(PRUNE_INTERVAL + CONNECT_RETRY_DELAY).await;
    assert_eq!(fixture.kept(), 1);
    sleep(MAX_IDLE_TIME + PRUNE_INTERVAL).await;
    assert_eq!(fixture.kept(), 0);
    tending.abort();
}
