//! When a prompt counts as computed, and what a request leaves behind of its wait, its fingerprint
//! and its end.
//!
//! The system's tests relay whole requests.

use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use futures_util::poll;
use hostler_proto::agent::v1::frame::Kind;
use hostler_proto::agent::v1::{Frame, FrameBatch};
use hostler_proto::lane::WINDOW_BYTES;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

use super::*;
use crate::lane::Lane;
use crate::traffic::Traffic;

#[tokio::test(start_paused = true)]
async fn a_silent_prompt_counts_as_prefilled_after_its_estimate() {
    let traffic = Traffic::new();
    let in_flight = traffic.enter_with(RouterKey(1), PromptEstimate { tokens: 9, uncached: 5 });
    let pending = || traffic.subscribe().borrow().totals().pending_tokens;
    let mut prefilled = pin!(assume_prefilled_after(Some(&in_flight), Duration::from_millis(50)));
    assert!(timeout(Duration::from_millis(49), prefilled.as_mut()).await.is_err());
    assert_eq!(pending(), 5);
    assert!(timeout(Duration::from_millis(2), prefilled.as_mut()).await.is_err(), "it never ends the request");
    assert_eq!((pending(), traffic.in_flight()), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn only_the_answer_counts_as_progress_without_a_prefill_estimate() {
    let traffic = Traffic::new();
    let in_flight = traffic.enter_with(RouterKey(1), PromptEstimate { tokens: 9, uncached: 5 });
    assert!(timeout(Duration::from_secs(3600), assume_prefilled_after(Some(&in_flight), Duration::ZERO)).await.is_err());
    assert_eq!(traffic.subscribe().borrow().totals().pending_tokens, 5);
}

#[test]
fn an_engine_is_lost_only_if_not_told_to_stop() {
    for (phase, expected) in [
        (Phase::Ready, Fault::EngineLost),
        (Phase::Failed, Fault::EngineLost),
        (Phase::Starting, Fault::EngineLost),
        (Phase::Draining, Fault::EngineStopped),
        (Phase::Stopped, Fault::EngineStopped),
        (Phase::Quarantined, Fault::EngineStopped),
        (Phase::Sleeping, Fault::EngineStopped),
    ] {
        assert_eq!(classify_break(3, phase, None, true, "connection reset").fault, expected, "{phase:?}");
        // A request that never reached an engine is not lost with one.
        let unsent = if expected == Fault::EngineLost { Fault::NotReady } else { expected };
        assert_eq!(classify_break(3, phase, None, false, "connection refused").fault, unsent, "{phase:?}");
    }
    let words = |failure: Option<&Diagnosis>| classify_break(3, Phase::Failed, failure, true, "connection reset").message;
    assert_eq!(words(None), "the engine of replica 3 broke off (connection reset)");
    let failure = |kind| Diagnosis { kind, cause: "no token for 10.0 s".to_owned(), remedy: String::new() };
    assert_eq!(words(Some(&failure(FailureKind::Hang))), "the engine of replica 3 hung: no token for 10.0 s");
    // Output of an engine before it died may hold anything.
    assert_eq!(words(Some(&failure(FailureKind::Unknown))), "the engine of replica 3 broke off (connection reset)");
}

#[test]
fn only_requests_that_the_core_computes_wait_for_it() {
    let computes =
        |method: &str, path: &str| needs_engine_core(&RequestHead { method: method.into(), path: path.into(), ..RequestHead::default() });
    for path in ["/v1/completions", "/v1/chat/completions?x=1", "/v1/embeddings", "/v2/rerank", "/invocations", "/v1/responses"] {
        assert!(computes("POST", path), "{path}");
    }
    for path in ["/tokenize", "/detokenize?x=1", "/v1/messages/count_tokens", "/v1/responses/r1/cancel", "/v1/completions/render"] {
        assert!(!computes("POST", path), "{path}");
    }
    assert!(!computes("GET", "/v1/responses/r1"));
}

const LIFE: u64 = 7;

/// One request on its way to an engine that the test plays.
struct Fixture {
    traffic: Arc<Traffic>,
    lane: Arc<Lane>,
    engine: UnixStream,
    relay: tokio::task::JoinHandle<Result<(), String>>,
    _directory: tempfile::TempDir,
}

impl Fixture {
    /// A request of four bytes, of which the router has sent these.
    async fn start(body: &'static [u8]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let (traffic, lane) = (Traffic::new(), Lane::new(Counter::default()));
        let head = RequestHead { method: "POST".into(), path: "/v1/completions".into(), body_bytes: 4, ..RequestHead::default() };
        let frames = vec![Frame::new(1, Kind::Request(head.into())), Frame::new(1, Kind::Body(body.into()))];
        let IncomingRequest { head, stream: serving } = lane.receive(FrameBatch { frames }).pop().unwrap();
        let in_flight = traffic.enter(RouterKey(1));
        let relay = tokio::spawn(async move {
            let (client, wait) = (EngineClient::new(socket), Some(in_flight.track_wait()));
            let request = OutgoingRequest::new(head, serving.body()).unwrap();
            let fingerprint = Some((LIFE, RequestFingerprint(5)));
            let mut exchange =
                Exchange { client: &client, serving: &serving, in_flight: Some(&in_flight), wait, fingerprint, is_sent: false };
            let outcome = exchange.run(request).await.map_err(|error| root_cause(&error));
            drop(exchange);
            serving.end(&Ok(()));
            outcome
        });
        let (engine, _) = timeout(Duration::from_secs(20), listener.accept()).await.unwrap().unwrap();
        Self { traffic, lane, engine, relay, _directory: directory }
    }

    fn router_sends(&self, body: &'static [u8]) {
        self.lane.receive(FrameBatch { frames: vec![Frame::new(1, Kind::Body(body.into()))] });
    }

    /// The engine reads until this end appears.
    async fn engine_reads(&mut self, end: &[u8]) {
        let mut read = Vec::new();
        while !read.ends_with(end) {
            let more = timeout(Duration::from_secs(20), self.engine.read_buf(&mut read)).await.unwrap().unwrap();
            assert!(more > 0, "closed after {:?}", String::from_utf8_lossy(&read));
        }
    }

    async fn engine_writes(&mut self, bytes: &[u8]) {
        self.engine.write_all(bytes).await.unwrap();
    }

    async fn begins(&mut self, status: &str) {
        self.engine_writes(format!("HTTP/1.1 {status}\r\ntransfer-encoding: chunked\r\n\r\n").as_bytes()).await;
    }

    async fn chunk(&mut self, text: &str) {
        self.engine_writes(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes()).await;
    }

    async fn until(&self, condition: impl Fn(&Traffic) -> bool) {
        let waiting = async {
            while !condition(&self.traffic) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(Duration::from_secs(20), waiting).await.expect("it did not come about");
    }

    async fn outcome(&mut self) -> Result<(), String> {
        timeout(Duration::from_secs(20), &mut self.relay).await.unwrap().unwrap()
    }

    fn is_casualty(&self) -> bool {
        !self.traffic.crash_suspects(LIFE).is_empty()
    }
}

#[tokio::test]
async fn a_request_waits_from_its_last_byte_to_its_answers() {
    let mut fixture = Fixture::start(b"ab").await;
    fixture.engine_reads(b"ab").await;
    assert_eq!(fixture.traffic.flow().waiting(), 0, "half of its body is on the way");
    fixture.router_sends(b"cd");
    fixture.until(|traffic| traffic.flow().waiting() == 1).await;
    fixture.engine_reads(b"cd").await;
    fixture.begins("200 OK").await;
    fixture.chunk(": keep-alive\n\n").await;
    fixture.chunk("data: {\"a\":1}\n\n").await;
    fixture.until(|traffic| traffic.flow().last_progress() > 0).await;
    assert_eq!((fixture.traffic.flow().waiting(), fixture.is_casualty()), (1, true));
    fixture.engine_writes(b"0\r\n\r\n").await;
    assert_eq!(fixture.outcome().await, Ok(()));
    assert_eq!((fixture.traffic.flow().waiting(), fixture.is_casualty()), (0, false));
}

#[tokio::test]
async fn comments_and_refusals_are_no_progress() {
    for (status, text) in [("200 OK", ": keep-alive\n\n"), ("400 Bad Request", "{}")] {
        let mut fixture = Fixture::start(b"abcd").await;
        fixture.engine_reads(b"abcd").await;
        fixture.begins(status).await;
        fixture.chunk(text).await;
        fixture.engine_writes(b"0\r\n\r\n").await;
        assert_eq!(fixture.outcome().await, Ok(()));
        assert_eq!(fixture.traffic.flow().last_progress(), 0, "{status}");
    }
}

#[tokio::test]
async fn a_request_with_a_blocked_client_does_not_wait() {
    let mut fixture = Fixture::start(b"abcd").await;
    fixture.engine_reads(b"abcd").await;
    fixture.begins("200 OK").await;
    let chunk = "x".repeat(WINDOW_BYTES / 2);
    for _ in 0..3 {
        fixture.chunk(&chunk).await;
    }
    fixture.until(|traffic| traffic.flow().waiting() == 0).await;
    fixture.lane.receive(FrameBatch { frames: vec![Frame::new(1, Kind::Credit(u32::try_from(WINDOW_BYTES).unwrap()))] });
    fixture.until(|traffic| traffic.flow().waiting() == 1).await;
    fixture.relay.abort();
    fixture.until(|traffic| traffic.flow().waiting() == 0 && traffic.in_flight() == 0).await;
}

#[tokio::test]
async fn a_request_that_a_dying_engine_fails_is_a_suspect() {
    for (status, text) in
        [("200 OK", "data: {\"error\":{\"code\":500}}\n\n"), ("500 Internal Server Error", "{}"), ("200 OK", "data: {\"a\":1}\n\n")]
    {
        let mut fixture = Fixture::start(b"abcd").await;
        fixture.engine_reads(b"abcd").await;
        fixture.begins(status).await;
        fixture.chunk("data: {\"a\":1}\n\n").await;
        fixture.chunk(text).await;
        fixture.engine_writes(b"0\r\n\r\n").await;
        assert_eq!(fixture.outcome().await, Ok(()));
        assert_eq!(fixture.is_casualty(), text != "data: {\"a\":1}\n\n", "{status} {text}");
    }
}

#[tokio::test]
async fn a_request_is_a_suspect_once_fully_sent() {
    let mut fixture = Fixture::start(b"ab").await;
    fixture.engine_reads(b"ab").await;
    assert!(!fixture.is_casualty(), "no engine computes half a request");
    fixture.router_sends(b"cd");
    fixture.engine_reads(b"cd").await;
    fixture.until(|traffic| !traffic.crash_suspects(LIFE).is_empty()).await;
}

#[tokio::test]
async fn a_request_refused_by_a_dead_engine_is_no_suspect() {
    let directory = tempfile::tempdir().unwrap();
    let (client, lane, traffic) = (EngineClient::new(directory.path().join("s")), Lane::new(Counter::default()), Traffic::new());
    let head = RequestHead { method: "POST".into(), path: "/v1/completions".into(), ..RequestHead::default() };
    let IncomingRequest { head, stream } =
        lane.receive(FrameBatch { frames: vec![Frame::new(1, Kind::Request(head.into()))] }).pop().unwrap();
    let in_flight = traffic.enter(RouterKey(1));
    let fingerprint = Some((LIFE, RequestFingerprint(5)));
    let mut exchange = Exchange { client: &client, serving: &stream, in_flight: Some(&in_flight), wait: None, fingerprint, is_sent: false };
    let outcome = exchange.run(OutgoingRequest::new(head, stream.body()).unwrap()).await;
    assert!(matches!(&outcome, Err(RequestError::Connect(_))) && !exchange.is_sent);
    drop((outcome, exchange));
    in_flight.mark_failed();
    assert!(traffic.crash_suspects(LIFE).is_empty());
    drop(in_flight);
    assert!(traffic.crash_suspects(LIFE).is_empty(), "nor afterwards");
}

#[tokio::test]
async fn an_unblocked_write_costs_no_wait() {
    let traffic = Traffic::new();
    let in_flight = traffic.enter(RouterKey(1));
    let mut wait = in_flight.track_wait();
    wait.begin();
    let mut passing = pin!(wait.pause_during(async { 3 }));
    assert_eq!(poll!(passing.as_mut()), Poll::Ready(3));
    assert_eq!(traffic.flow().waiting(), 1);
}
