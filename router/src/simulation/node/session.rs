//! The session of a node's agent with a router.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join_all, select_all};
use hostler_agent::lane::Lane;
use hostler_agent::uplink::LANES;
use hostler_proto::agent::v1 as wire;
use hostler_proto::agent::v1::agent_link_client::AgentLinkClient;
use hostler_proto::agent::v1::attach_request::Message as ToRouter;
use hostler_proto::agent::v1::attach_response::Message as FromRouter;
use hostler_proto::agent::v1::directive::Order;
use hostler_proto::{PROTOCOL, TICKET_KEY};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use super::{FAREWELL_TIME, Incarnation, WELCOME_TIMEOUT};
use crate::simulation::engine::SimulatedEngine;
use crate::simulation::link::{Link, LinkEnd};

/// Time between two reports of changes.
const REPORT_INTERVAL: Duration = Duration::from_millis(10);

/// How long a restarting engine is away.
const RESTART_TIME: Duration = Duration::from_secs(2);

pub(super) struct Session {
    agent: Arc<Incarnation>,
    router: u64,
    to_router: mpsc::Sender<wire::AttachRequest>,
    from_router: tonic::Streaming<wire::AttachResponse>,
    lanes: Vec<AbortOnDropHandle<Status>>,
    /// Orders that are answered when they are done.
    orders: JoinSet<()>,
    heartbeat: Duration,
    sequence: u64,
    reported: Vec<Option<wire::ReplicaReport>>,
    reported_crashes: Vec<usize>,
}

async fn connect(wire: LinkEnd) -> Result<Channel, Status> {
    let wire = Arc::new(Mutex::new(Some(TokioIo::new(wire))));
    let connector = tower::service_fn(move |_| {
        let wire = wire.lock().take();
        async move { wire.ok_or(std::io::Error::from(std::io::ErrorKind::NotConnected)) }
    });
    // The settings of the agent's `dial`.
    let connected = Endpoint::from_static("http://router")
        .initial_stream_window_size(hostler_proto::wire::HTTP2_WINDOW_BYTES)
        .initial_connection_window_size(hostler_proto::wire::HTTP2_WINDOW_BYTES)
        .max_frame_size(hostler_proto::wire::MAX_HTTP2_FRAME_BYTES)
        .http2_keep_alive_interval(hostler_proto::wire::KEEPALIVE_TIMEOUT)
        .keep_alive_timeout(hostler_proto::wire::KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .connect_with_connector(connector)
        .await;
    connected.map_err(|error| Status::unavailable(error.to_string()))
}

impl Session {
    pub(super) async fn attach(agent: Arc<Incarnation>, link: Link, wire: LinkEnd) -> Result<Self, Status> {
        let channel = connect(wire).await?;
        let (to_router, messages) = mpsc::channel(16);
        let hello =
            wire::Hello { protocol: PROTOCOL, agent_version: "simulated".into(), node: agent.node.clone(), life: agent.life, job: None };
        let send = |message| wire::AttachRequest { message: Some(message) };
        let _ = to_router.send(send(ToRouter::Hello(hello))).await;
        let mut client = AgentLinkClient::new(channel.clone());
        let mut from_router = client.attach(ReceiverStream::new(messages)).await?.into_inner();
        let Some(wire::AttachResponse { message: Some(FromRouter::Welcome(welcome)) }) = from_router.message().await? else {
            return Err(Status::internal("the router did not begin with a welcome"));
        };
        let mut session = Self {
            router: welcome.router_life,
            to_router,
            from_router,
            lanes: Vec::new(),
            orders: JoinSet::new(),
            heartbeat: Duration::from_millis(u64::from(welcome.lease_ms)) / 3,
            sequence: 0,
            reported: Vec::new(),
            reported_crashes: Vec::new(),
            agent,
        };
        session.send_snapshot().await?;
        for _ in 0..LANES {
            let lane = session.open_lane(channel.clone(), &welcome.ticket, link.clone()).await?;
            session.lanes.push(lane);
        }
        session.agent.world.trace.note(format_args!("{} life {} is attached", session.agent.node, session.agent.life));
        Ok(session)
    }

    async fn open_lane(&self, channel: Channel, ticket: &[u8], link: Link) -> Result<AbortOnDropHandle<Status>, Status> {
        let lane = Lane::new(Counter::default());
        let mut request = Request::new(lane.outbox().batches());
        request.metadata_mut().insert_bin(TICKET_KEY, MetadataValue::from_bytes(ticket));
        let mut batches = AgentLinkClient::new(channel).carry(request).await?.into_inner();
        let (agent, router, guard) = (self.agent.clone(), self.router, LaneGuard(lane));
        Ok(AbortOnDropHandle::new(tokio::spawn(async move {
            loop {
                match batches.message().await {
                    Ok(Some(batch)) => {
                        for incoming in guard.0.receive(batch) {
                            tokio::spawn(agent.clone().serve(incoming, router, link.clone()));
                        }
                    }
                    Ok(None) => return Status::ok("the router left"),
                    Err(status) => return status,
                }
            }
        })))
    }

    /// Serves the session until it ends. Returns why it did.
    pub(super) async fn run(&mut self) -> Status {
        let agent = self.agent.clone();
        let engines = &agent.engines;
        let mut seen = vec![0; engines.len()];
        let mut heartbeat = tokio::time::interval(self.heartbeat);
        let mut next_report = Instant::now();
        let lanes = std::mem::take(&mut self.lanes);
        let mut lanes = pin!(select_all(lanes));
        loop {
            let changes = select_all(engines.iter().zip(&seen).map(|(engine, seen)| Box::pin(engine.wait_for_change(*seen))));
            let sent = tokio::select! {
                biased;
                (ended, ..) = &mut lanes => return ended.unwrap_or_else(|error| Status::internal(error.to_string())),
                message = self.from_router.message() => match message {
                    Ok(Some(wire::AttachResponse { message: Some(FromRouter::Directive(directive)) })) => self.execute(directive).await,
                    Ok(Some(_)) => Ok(()),
                    Ok(None) => return Status::ok("the router left"),
                    Err(status) => return status,
                },
                (count, index, _) = changes => {
                    seen[index] = count;
                    tokio::time::sleep_until(next_report).await;
                    next_report = Instant::now() + REPORT_INTERVAL;
                    heartbeat.reset();
                    self.send_changes().await
                }
                () = agent.farewell.cancelled() => {
                    let _ = timeout(FAREWELL_TIME, self.bid_farewell()).await;
                    return Status::ok("it leaves");
                }
                _ = heartbeat.tick() => self.send_changes().await,
            };
            if let Err(status) = sent {
                return status;
            }
        }
    }

    /// Sends a last report. The router ends its side when it has read everything.
    async fn bid_farewell(&mut self) {
        let _ = self.send_changes().await;
        self.to_router = mpsc::channel(1).0;
        while let Ok(Some(_)) = self.from_router.message().await {}
    }

    async fn execute(&mut self, directive: wire::Directive) -> Result<(), Status> {
        let of = |replicas: &wire::Replicas| {
            let indices = replicas.indices.clone();
            let engines = self.agent.engines.clone().into_iter().enumerate();
            engines.filter(move |(index, _)| indices.iter().any(|requested| *requested as usize == *index)).map(|(_, engine)| engine)
        };
        match &directive.order {
            Some(Order::Resync(_)) => return self.send_snapshot().await,
            Some(Order::Successor(_)) => {
                self.agent.successor.notify_one();
                return Ok(());
            }
            Some(Order::Restart(replicas)) => {
                of(replicas).for_each(|engine| drop(tokio::spawn(async move { engine.restart(RESTART_TIME).await })));
            }
            Some(Order::Drain(replicas)) => {
                of(replicas).for_each(|engine| drop(tokio::spawn(async move { engine.drain().await })));
            }
            Some(Order::Release(replicas) | Order::Wake(replicas)) => of(replicas).for_each(|engine| engine.bring_back()),
            Some(Order::Sleep(order)) => {
                let asleep = order.replicas.iter().flat_map(of).map(|engine| tokio::spawn(async move { engine.fall_asleep().await }));
                let (asleep, to_router) = (join_all(asleep), self.to_router.clone());
                let answer = ToRouter::Answer(wire::Answer { id: directive.id, ..wire::Answer::default() });
                self.orders.spawn(async move {
                    asleep.await;
                    let _ = to_router.send(wire::AttachRequest { message: Some(answer) }).await;
                });
                return Ok(());
            }
            _ => {}
        }
        let answer = wire::Answer { id: directive.id, ..wire::Answer::default() };
        self.send(ToRouter::Answer(answer)).await
    }

    async fn send_snapshot(&mut self) -> Result<(), Status> {
        self.sequence = 0;
        self.reported = vec![None; self.agent.engines.len()];
        self.reported_crashes = vec![0; self.agent.engines.len()];
        self.send_report(true).await
    }

    async fn send_changes(&mut self) -> Result<(), Status> {
        self.send_report(false).await
    }

    async fn send_report(&mut self, snapshot: bool) -> Result<(), Status> {
        let mut replicas = Vec::new();
        for (index, engine) in self.agent.engines.iter().enumerate() {
            let whole = report(index, engine, self.router);
            let before = self.reported[index].replace(whole.clone());
            let crashes = engine.crashes().split_off(self.reported_crashes[index]);
            self.reported_crashes[index] += crashes.len();
            let crashes: Vec<wire::EngineCrash> = crashes
                .into_iter()
                .map(|crash| wire::EngineCrash {
                    epoch: crash.epoch,
                    age_ms: u64::try_from(crash.at.elapsed().as_millis()).unwrap_or(u64::MAX),
                    requests: crash.requests.into_iter().map(wire::Fingerprint::from).collect(),
                })
                .collect();
            if before.as_ref() != Some(&whole) || !crashes.is_empty() {
                let state = whole.state.filter(|state| before.as_ref().and_then(|before| before.state.as_ref()) != Some(state));
                replicas.push(wire::ReplicaReport { crashes, state, ..whole });
            }
        }
        let report = wire::Report { sequence: self.sequence, snapshot, replicas, job: None };
        self.sequence += 1;
        self.send(ToRouter::Report(report)).await
    }

    async fn send(&self, message: ToRouter) -> Result<(), Status> {
        let sent = timeout(WELCOME_TIMEOUT, self.to_router.send(wire::AttachRequest { message: Some(message) })).await;
        sent.map_err(|_| Status::unavailable("the router takes nothing"))?.map_err(|_| Status::unavailable("the connection is lost"))
    }
}

/// Closes the lane when the task that reads it ends.
struct LaneGuard(Arc<Lane>);

impl Drop for LaneGuard {
    fn drop(&mut self) {
        self.0.close();
    }
}

fn report(index: usize, engine: &SimulatedEngine, router: u64) -> wire::ReplicaReport {
    let life = engine.life();
    let (in_flight, in_flight_yours) = engine.in_flight(router);
    let card = bytes::Bytes::from_static(br#"{"id":"tiny","object":"model"}"#);
    let state = wire::ReplicaState {
        phase: life.phase.into(),
        models: vec![wire::Model { id: "tiny".into(), card, alias_of: String::new() }],
        launch: Some(wire::Launch { front_end: "python".into(), max_model_len: 4096, ..wire::Launch::default() }),
        // Failed engines start again within a few seconds.
        returns_in_seconds: if life.phase == wire::Phase::Failed { 5 } else { 0 },
        ..wire::ReplicaState::default()
    };
    wire::ReplicaReport {
        index: u32::try_from(index).unwrap_or(u32::MAX),
        epoch: life.epoch,
        state: Some(state),
        load: Some(wire::Load { in_flight, in_flight_yours, ..wire::Load::default() }),
        ..wire::ReplicaReport::default()
    }
}
