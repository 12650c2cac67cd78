//! Agents that fall silent while their requests are unanswered, like one whose host is gone: their
//! connection stands, and nothing comes over it.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use hostler_proto::agent::v1::attach_request::Message;
use hostler_proto::agent::v1::attach_response::Message as ToAgent;
use hostler_proto::agent::v1::frame::Kind;
use hostler_proto::agent::v1::{AttachRequest, AttachResponse, Frame, FrameBatch, Header, Hello, Model};
use hostler_proto::agent::v1::{Phase, ReplicaReport, ReplicaState, Report, ResponseHead};
use hostler_proto::{PROTOCOL, TICKET_KEY, wire};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataValue;
use tonic::{Request, Streaming};

use crate::harness::{Answer, CHAT, Fleet, MODEL, Setup, attach, chat, chat_stream, link, soon, until};

/// Lease of the tests.
///
/// It is short to keep them fast, and far below the connection's keepalive, which these agents
/// answer.
const LEASE: Duration = Duration::from_millis(500);

/// An agent that takes requests and falls silent when the test wants it; its replica is `still/0`.
struct Still {
    reports: mpsc::Sender<AttachRequest>,
    reported: u64,
    frames: mpsc::Sender<FrameBatch>,
    requests: Streaming<FrameBatch>,
    /// Outcome of each request: whether it was cancelled.
    taken: BTreeMap<u64, bool>,
    _told: Streaming<AttachResponse>,
}

impl Still {
    async fn attach(fleet: &Fleet) -> Self {
        let address = fleet.routers[0].agents;
        let hello = Hello { protocol: PROTOCOL, agent_version: "9.8.7".into(), node: "still".into(), life: 7, job: None };
        let (reports, mut messages) = attach(address, [Message::Hello(hello), report(0, true)]).await.unwrap();
        let welcome = soon("a welcome", messages.message()).await.unwrap().unwrap().message;
        let Some(ToAgent::Welcome(welcome)) = welcome else { panic!("no welcome: {welcome:?}") };
        let (frames, answers) = mpsc::channel(16);
        let mut request = Request::new(ReceiverStream::new(answers));
        request.metadata_mut().insert_bin(TICKET_KEY, MetadataValue::from_bytes(&welcome.ticket));
        let requests = soon("a lane", link(address).await.carry(request)).await.unwrap().into_inner();
        Self { reports, reported: 0, frames, requests, taken: BTreeMap::new(), _told: messages }
    }

    async fn report(&mut self) {
        self.reported += 1;
        self.reports.send(AttachRequest { message: Some(report(self.reported, false)) }).await.unwrap();
    }

    /// Waits until the router's frames meet this condition.
    async fn until(&mut self, what: &str, is: impl Fn(&BTreeMap<u64, bool>) -> bool) {
        while !is(&self.taken) {
            for frame in soon(what, self.requests.message()).await.unwrap().expect("the lane stands").frames {
                match frame.kind {
                    Some(Kind::Request(_)) => assert_eq!(self.taken.insert(frame.id, false), None, "an id was used twice"),
                    Some(Kind::Cancel(_)) => assert_eq!(self.taken.insert(frame.id, true), Some(false), "nothing to cancel"),
                    _ => {}
                }
            }
        }
    }

    /// Answers a request with JSON.
    async fn answer(&self, id: u64, body: &str) {
        let header = Header { name: b"content-type".to_vec().into(), value: b"application/json".to_vec().into() };
        let head = Kind::Response(ResponseHead { status: 200, headers: vec![header] });
        let body = Kind::Body(body.as_bytes().to_vec().into());
        self.frames.send(FrameBatch { frames: vec![Frame::new(id, head), Frame::new(id, body), Frame::end(id, None)] }).await.unwrap();
    }
}

/// Model that only silent agents serve.
const OWN_MODEL: &str = "still";

fn report(sequence: u64, snapshot: bool) -> Message {
    let model = |id: &str| Model {
        id: id.into(),
        card: json!({"id": id, "object": "model"}).to_string().into_bytes().into(),
        alias_of: String::new(),
    };
    let state = ReplicaState { phase: Phase::Ready.into(), models: vec![model(MODEL), model(OWN_MODEL)], ..ReplicaState::default() };
    let replica = ReplicaReport { index: 0, epoch: 1, state: Some(state), ..ReplicaReport::default() };
    Message::Report(Report { sequence, snapshot, replicas: if snapshot { vec![replica] } else { Vec::new() }, job: None })
}

fn setup(agents: usize) -> Setup {
    Setup::agents(agents).router(|router| router.lease = LEASE)
}

fn assert_whole(answer: &Answer) {
    assert_eq!((answer.status.as_u16(), &answer.ended), (200, &Ok(())), "{}", answer.text());
    assert_eq!(answer.text().matches("\"finish_reason\":\"length\"").count(), 1, "{}", answer.text());
}

#[tokio::test(start_paused = true)]
async fn an_agent_whose_node_name_was_taken_is_refused() {
    // The lease is long enough for both to send reports until the end.
    let fleet = Fleet::start(Setup::agents(1).router(|router| router.lease = Duration::from_secs(20))).await;
    let hello = Hello { protocol: PROTOCOL, agent_version: "9.8.7".into(), node: "still".into(), life: 6, job: None };
    let (late, mut messages) = attach(fleet.routers[0].agents, [Message::Hello(hello)]).await.unwrap();
    soon("a welcome", messages.message()).await.unwrap().unwrap();
    let mut still = Still::attach(&fleet).await;
    fleet.until_replica("still/0", "attached", |replica| replica.is_ready()).await;
    late.send(AttachRequest { message: Some(report(0, true)) }).await.unwrap();
    let refusal = soon("its end", messages.message()).await.unwrap_err();
    assert!(refusal.message().contains("another agent is attached as node `still`"), "{refusal}");
    still.report().await;
    assert!(fleet.replica("still/0").await.is_ready());
}

#[tokio::test(start_paused = true)]
async fn unanswered_requests_leave_a_silent_agent_at_lease_end() {
    let fleet = Fleet::start(setup(1)).await;
    let mut still = Still::attach(&fleet).await;
    fleet.until_replica("still/0", "readiness", |replica| replica.phase == Phase::Ready).await;
    let mut requests = JoinSet::new();
    let begun = Instant::now();
    for number in 0..8 {
        let edge = fleet.edge();
        let body = if number % 2 == 0 { chat(10) } else { chat_stream(10) };
        requests.spawn(async move { edge.post(CHAT, &body).await });
        still.report().await;
    }
    while let Some(answer) = requests.join_next().await {
        assert_whole(&answer.unwrap());
    }
    assert!(begun.elapsed() < wire::KEEPALIVE_TIMEOUT, "{:?}", begun.elapsed());
    still.until("what came to it to be cancelled", |taken| !taken.is_empty() && taken.values().all(|cancelled| *cancelled)).await;
    let router = &fleet.routers[0];
    assert_eq!(router.metric("hostler_retries_total").await, still.taken.len() as f64);
    assert_eq!(router.metric("hostler_crash_suspects").await, 0.0, "no engine has crashed");

    // Later answers of the agent reach nobody.
    let unknown = router.metric("hostler_unknown_frames_total").await;
    let late = *still.taken.keys().next().unwrap();
    still.answer(late, "{}").await;
    until("its answer to be thrown away", async || {
        let now = router.metric("hostler_unknown_frames_total").await;
        if now == unknown + 3.0 { Ok(()) } else { Err(format!("{now} frames, {unknown} before")) }
    })
    .await;
    until("nothing in flight", async || {
        let own: u32 = fleet.admin().replicas().await.unwrap().iter().map(|replica| replica.local_in_flight).sum();
        if own == 0 { Ok(()) } else { Err(format!("{own} in flight")) }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_request_stays_with_a_silent_agent_without_another() {
    let mut fleet = Fleet::launch(setup(0)).await;
    let mut still = Still::attach(&fleet).await;
    fleet.until_replica("still/0", "readiness", |replica| replica.phase == Phase::Ready).await;
    let edge = fleet.edge();
    let request = tokio::spawn(async move { edge.post(CHAT, &chat(10)).await });
    still.until("a request", |taken| taken.len() == 1).await;
    fleet.until_replica("still/0", "silence", |replica| replica.suspect).await;
    // There is no other replica, for longer than the router needs to look for one.
    assert!(tokio::time::timeout(LEASE, still.until("no frame", |taken| taken.values().any(|cancelled| *cancelled))).await.is_err());
    assert!(!request.is_finished());

    fleet.add_agent(vec![fleet.routers[0].agents.to_string()]).await;
    assert_whole(&soon("an answer", request).await.unwrap());
    still.until("a cancel", |taken| taken.values().all(|cancelled| *cancelled)).await;
    assert_eq!(fleet.routers[0].metric("hostler_retries_total").await, 1.0);
}

#[tokio::test(start_paused = true)]
async fn a_request_passed_on_by_full_engines_leaves_silent_agents() {
    let mut fleet = Fleet::start(setup(2)).await;
    for replica in ["n0/0", "n1/0"] {
        fleet.fault(replica, "busy").await;
    }
    let mut still = Still::attach(&fleet).await;
    fleet.until_replica("still/0", "readiness", |replica| replica.phase == Phase::Ready).await;
    // The replica's work so far makes it the last one to which the request is sent.
    let mut own = JoinSet::new();
    for _ in 0..4 {
        let (edge, mut body) = (fleet.edge(), chat(10));
        body["model"] = OWN_MODEL.into();
        own.spawn(async move { edge.post(CHAT, &body).await });
    }
    still.until("its own requests", |taken| taken.len() == 4).await;
    still.report().await;
    let edge = fleet.edge();
    let request = tokio::spawn(async move { edge.post(CHAT, &chat(10)).await });
    still.until("the request", |taken| taken.len() == 5).await;
    assert_eq!(fleet.routers[0].metric("hostler_retries_total").await, 2.0, "both engines were full");
    fleet.add_agent(vec![fleet.routers[0].agents.to_string()]).await;
    assert_whole(&soon("an answer", request).await.unwrap());
    own.abort_all();
}

#[tokio::test(start_paused = true)]
async fn a_silent_agent_that_returns_answers_its_requests() {
    let fleet = Fleet::launch(setup(0)).await;
    let mut still = Still::attach(&fleet).await;
    fleet.until_replica("still/0", "readiness", |replica| replica.phase == Phase::Ready).await;
    let edge = fleet.edge();
    let request = tokio::spawn(async move { edge.post(CHAT, &chat(10)).await });
    still.until("a request", |taken| taken.len() == 1).await;
    fleet.until_replica("still/0", "silence", |replica| replica.suspect).await;
    still.answer(*still.taken.keys().next().unwrap(), r#"{"choices":[{"finish_reason":"length"}]}"#).await;
    assert_whole(&soon("an answer", request).await.unwrap());
    assert_eq!(fleet.routers[0].metric("hostler_retries_total").await, 0.0);
}

#[tokio::test(start_paused = true)]
async fn an_answer_slower_than_a_lease_is_waited_for() {
    // Long enough for a machine that stands still for a moment.
    let lease = 2 * LEASE;
    let fleet = Fleet::start(setup(2).engine("--sim-step-ms 20").router(|router| router.lease = lease)).await;
    let begun = Instant::now();
    // The answer is whole before its first byte comes.
    assert_whole(&fleet.edge().post(CHAT, &chat(150)).await);
    assert!(begun.elapsed() > 2 * lease);
    assert_eq!(fleet.routers[0].metric("hostler_retries_total").await, 0.0);
}
