//! One router's session: dialled, attached, reporting, serving lanes; and again when it ends, for as long as the agent lives.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use hostler_proto::agent::v1 as wire;
use hostler_proto::agent::v1::agent_link_client::AgentLinkClient;
use hostler_proto::agent::v1::attach_request::Message as ToRouter;
use hostler_proto::agent::v1::attach_response::Message as FromRouter;
use hostler_proto::agent::v1::directive::Order;
use hostler_proto::{PROTOCOL, TICKET_KEY};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};

use super::Uplink;
use super::bulk::Bulk;
use super::dial::{DialError, dial};
use super::orders;
use super::redial::{LONGEST_PAUSE, Redial};
use super::relay;
use super::report::Reporter;
use crate::join::{self, Identity, JoinError};
use crate::lane::Lane;
use crate::node::REPORT_INTERVAL;
use crate::traffic::RouterKey;

/// The pause after a refusal that will not change by itself soon.
const REFUSED_PAUSE: Duration = Duration::from_secs(10);

/// How long a router may take to welcome the agent.
const WELCOME_DEADLINE: Duration = Duration::from_secs(10);

/// Reports without news are not sent more often than this, whatever the router's lease.
const SHORTEST_HEARTBEAT: Duration = Duration::from_millis(100);

/// Reports and answers that may wait for the connection.
const QUEUE: usize = 16;

/// Places in the queue that bulk leaves free, so that a report waits for a few of its parts at most and never for a place.
const BULK_LEAVES_FREE: usize = 12;

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("cannot connect: {0}")]
    Unreachable(String),
    #[error("refused: {0}")]
    Refused(String),
    #[error("this router is served already, under another address")]
    Duplicate,
    #[error("the router left")]
    Left,
    #[error("connection lost: {0}")]
    Lost(String),
}

impl From<Status> for Ended {
    fn from(status: Status) -> Self {
        match status.code() {
            Code::FailedPrecondition | Code::InvalidArgument | Code::Unauthenticated | Code::PermissionDenied | Code::Unimplemented => {
                Self::Refused(status.message().to_owned())
            }
            _ => Self::Lost(status.message().to_owned()),
        }
    }
}

impl From<JoinError> for Ended {
    fn from(error: JoinError) -> Self {
        match error {
            JoinError::Unreachable(reason) => Self::Unreachable(reason),
            error => Self::Refused(error.to_string()),
        }
    }
}

/// Keeps a session with the router at `address` until `end`. A router that is away is dialled on and on, and mentioned once.
pub(super) async fn keep(uplink: Arc<Uplink>, address: SocketAddr, name: String, end: CancellationToken) {
    let mut redial = Redial::default();
    let mut mentioned = String::new();
    loop {
        let mut attached = false;
        let ended = tokio::select! {
            ended = session(&uplink, address, &mut attached) => ended,
            () = end.cancelled() => return,
        };
        if attached {
            (redial, mentioned) = (Redial::default(), String::new());
        }
        let reason = ended.to_string();
        // One line an outage, whatever its further symptoms are; but a refusal needs somebody to act.
        if mentioned.is_empty() || (matches!(ended, Ended::Refused(_)) && reason != mentioned) {
            match &ended {
                Ended::Duplicate => tracing::debug!(router = name, %address, reason),
                Ended::Left => tracing::info!(router = name, %address, reason, "not attached; dialling on"),
                Ended::Refused(_) => tracing::error!(router = name, %address, reason, "not attached"),
                Ended::Unreachable(_) | Ended::Lost(_) => tracing::warn!(router = name, %address, reason, "not attached; dialling on"),
            }
            mentioned = reason;
        }
        let longest = if matches!(ended, Ended::Refused(_) | Ended::Duplicate) { REFUSED_PAUSE } else { LONGEST_PAUSE };
        tokio::select! {
            () = sleep(redial.pause_up_to(longest)) => {}
            () = end.cancelled() => return,
        }
    }
}

async fn session(uplink: &Arc<Uplink>, address: SocketAddr, attached: &mut bool) -> Ended {
    match attach(uplink, address).await {
        Ok(session) => {
            *attached = true;
            tracing::info!(router = %address, "attached");
            session.follow().await
        }
        Err(ended) => ended,
    }
}

/// Frees the router's life for another address when the session ends.
struct Claim {
    uplink: Arc<Uplink>,
    router_life: u64,
}

impl Claim {
    fn stake(uplink: &Arc<Uplink>, router_life: u64) -> Result<Self, Ended> {
        let fresh = uplink.served.lock().insert(router_life);
        if fresh { Ok(Self { uplink: uplink.clone(), router_life }) } else { Err(Ended::Duplicate) }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.uplink.served.lock().remove(&self.router_life);
    }
}

/// An attachment that lives.
struct Session {
    claim: Claim,
    to_router: mpsc::Sender<wire::AttachRequest>,
    from_router: Streaming<wire::AttachResponse>,
    reporter: Reporter,
    bulk: Bulk,
    /// An empty report goes out this often.
    heartbeat: Duration,
    /// The end of one is the session's: a lane is only ever lost with its connection. Without a status the router closed it.
    lanes: Vec<AbortOnDropHandle<Option<Status>>>,
    /// Orders at work, to be answered when they are done.
    orders: FuturesUnordered<BoxFuture<'static, wire::Answer>>,
    /// Keeps the connection's certificate from expiring.
    _renewal: AbortOnDropHandle<()>,
}

/// A connection to the router, with the certificate that was shown on it.
async fn connect(uplink: &Arc<Uplink>, address: SocketAddr) -> Result<(Channel, Option<Arc<Identity>>), Ended> {
    let identity = uplink.access.identity(address).await?;
    let dialled = dial(address, join::config(identity.as_ref())).await;
    let channel = dialled.map_err(|error| match error {
        DialError::Unreachable(reason) => Ended::Unreachable(reason),
        DialError::Tls { reason, certificate } => {
            identity.iter().filter(|_| certificate).for_each(|identity| uplink.access.forget(identity));
            Ended::Refused(reason)
        }
    })?;
    Ok((channel, identity))
}

async fn attach(uplink: &Arc<Uplink>, address: SocketAddr) -> Result<Session, Ended> {
    let (channel, identity) = connect(uplink, address).await?;
    let (to_router, messages) = mpsc::channel(QUEUE);
    let hello =
        wire::Hello { protocol: PROTOCOL, agent_version: env!("CARGO_PKG_VERSION").into(), node: uplink.node.clone(), life: uplink.life };
    send(&to_router, ToRouter::Hello(hello)).await?;
    let mut client = AgentLinkClient::new(channel.clone());
    let welcomed = async {
        let mut from_router = client.attach(ReceiverStream::new(messages)).await?.into_inner();
        let first = from_router.message().await?;
        Ok::<_, Status>((from_router, first))
    };
    let welcomed = timeout(WELCOME_DEADLINE, welcomed).await.map_err(|_| Ended::Lost("no welcome within 10 s".into()))?;
    let (from_router, first) = welcomed.map_err(|status| {
        // With another certificate it could be welcome.
        if status.code() == Code::Unauthenticated {
            identity.iter().for_each(|identity| uplink.access.forget(identity));
        }
        match Ended::from(status) {
            Ended::Lost(reason) if identity.is_none() => {
                Ended::Lost(format!("{reason} (plain text; a router with router.tls_dir wants agent.join_token_file)"))
            }
            ended => ended,
        }
    })?;
    let Some(wire::AttachResponse { message: Some(FromRouter::Welcome(welcome)) }) = first else {
        return Err(Ended::Lost("the router did not begin with a welcome".into()));
    };
    let claim = Claim::stake(uplink, welcome.router_life)?;
    let router = RouterKey(welcome.router_life);
    let mut reporter = Reporter::new(router);
    send(&to_router, ToRouter::Report(reporter.snapshot(&uplink.state))).await?;
    let mut lanes = Vec::new();
    for _ in 0..uplink.lanes {
        lanes.push(open_lane(uplink, channel.clone(), &welcome.ticket, router).await?);
    }
    let heartbeat = (Duration::from_millis(u64::from(welcome.lease_ms)) / 3).max(SHORTEST_HEARTBEAT);
    let bulk = Bulk::new(uplink.state.replicas().iter().map(|replica| replica.engine.cache().clone()));
    let renewal = AbortOnDropHandle::new(tokio::spawn(uplink.access.clone().keep_renewed(channel, identity)));
    Ok(Session { claim, to_router, from_router, reporter, bulk, heartbeat, lanes, orders: FuturesUnordered::new(), _renewal: renewal })
}

async fn open_lane(
    uplink: &Arc<Uplink>,
    channel: Channel,
    ticket: &[u8],
    router: RouterKey,
) -> Result<AbortOnDropHandle<Option<Status>>, Ended> {
    let lane = Lane::new(uplink.metrics.unknown_frames.clone());
    let mut request = Request::new(lane.outbox().batches());
    request.metadata_mut().insert_bin(TICKET_KEY, MetadataValue::from_bytes(ticket));
    let mut client = AgentLinkClient::new(channel).max_decoding_message_size(hostler_proto::wire::MESSAGE_BYTES);
    let opened = timeout(WELCOME_DEADLINE, client.carry(request)).await;
    let mut batches = opened.map_err(|_| Ended::Lost("a lane was not opened within 10 s".into()))??.into_inner();
    let uplink = uplink.clone();
    let guard = LaneGuard(lane);
    Ok(AbortOnDropHandle::new(tokio::spawn(async move {
        loop {
            match batches.message().await {
                Ok(Some(batch)) => {
                    for incoming in guard.0.receive(batch) {
                        uplink.requests.spawn(relay::serve(incoming, uplink.state.clone(), router, uplink.metrics.clone()));
                    }
                }
                Ok(None) => return None,
                Err(status) => return Some(status),
            }
        }
    })))
}

/// Loses its lane when the task that reads it ends, however it ends.
struct LaneGuard(Arc<Lane>);

impl Drop for LaneGuard {
    fn drop(&mut self) {
        self.0.lose();
    }
}

impl Session {
    /// Reports and obeys until the connection ends.
    async fn follow(mut self) -> Ended {
        let uplink = self.claim.uplink.clone();
        let mut state = uplink.state.changed();
        let mut heartbeat = tokio::time::interval(self.heartbeat);
        let mut lanes: FuturesUnordered<_> = std::mem::take(&mut self.lanes).into_iter().collect();
        let mut next_report = Instant::now();
        loop {
            // What happens until the next report is due leaves together.
            let news = async {
                sleep_until(next_report).await;
                state.changed().await
            };
            let room = async {
                let room = self.to_router.reserve_many(BULK_LEAVES_FREE + 1).await;
                room.map(drop).map_err(|_| Ended::Lost("the router takes no messages".into()))
            };
            let sent = tokio::select! {
                message = self.from_router.message() => match message {
                    Ok(Some(wire::AttachResponse { message: Some(FromRouter::Directive(directive)) })) => self.obey(directive).await,
                    Ok(Some(_)) => Ok(()),
                    Ok(None) => return Ended::Left,
                    Err(status) => return status.into(),
                },
                _ = news => {
                    heartbeat.reset();
                    next_report = Instant::now() + REPORT_INTERVAL;
                    self.report().await
                }
                _ = heartbeat.tick() => self.report().await,
                // One part a turn, and only while the queue is nearly empty: nothing above ever waits for long.
                room = room, if self.bulk.is_due() => match (room, self.bulk.next(|index| self.reporter.told_epoch(index))) {
                    (Err(ended), _) => Err(ended),
                    (Ok(()), None) => Ok(()),
                    // Nobody else sends, so the room is still there.
                    (Ok(()), Some(part)) => send(&self.to_router, part).await,
                },
                Some(answer) = self.orders.next() => self.done(answer).await,
                Some(lane) = lanes.next() => {
                    return match lane {
                        Ok(None) => Ended::Left,
                        Ok(Some(status)) => status.into(),
                        Err(error) => Ended::Lost(error.to_string()),
                    };
                }
            };
            if let Err(ended) = sent {
                return ended;
            }
        }
    }

    async fn report(&mut self) -> Result<(), Ended> {
        let report = self.reporter.report(&self.claim.uplink.state);
        self.bulk.after_report();
        send(&self.to_router, ToRouter::Report(report)).await
    }

    /// An order is done or has failed. What it changed is told first.
    async fn done(&mut self, answer: wire::Answer) -> Result<(), Ended> {
        self.report().await?;
        send(&self.to_router, ToRouter::Answer(answer)).await
    }

    async fn obey(&mut self, directive: wire::Directive) -> Result<(), Ended> {
        let uplink = self.claim.uplink.clone();
        let mut answer = wire::Answer { id: directive.id, error: String::new(), log_lines: Vec::new() };
        match directive.order {
            Some(Order::Resync(_)) => {
                let snapshot = self.reporter.snapshot(&uplink.state);
                return send(&self.to_router, ToRouter::Report(snapshot)).await;
            }
            Some(Order::Drain(replicas)) => {
                tracing::info!(replicas = ?replicas.indices, "a router orders: drain");
                uplink.state.chosen(&replicas.indices).for_each(|replica| replica.engine.drain());
            }
            Some(Order::Restart(replicas)) => {
                tracing::info!(replicas = ?replicas.indices, "a router orders: restart");
                uplink.state.chosen(&replicas.indices).for_each(|replica| replica.engine.restart());
            }
            Some(Order::Logs(request)) => match uplink.state.replica(request.index) {
                Some(replica) => answer.log_lines = replica.engine.log_tail(request.lines as usize),
                None => answer.error = format!("this node has no replica {}", request.index),
            },
            Some(Order::ResyncCache(replicas)) => {
                self.bulk.resync(&replicas.indices);
                return Ok(());
            }
            Some(Order::FetchFiles(request)) => match uplink.state.bundle(&request.hash) {
                Some(bundle) => {
                    self.bulk.fetch(bundle);
                    return Ok(());
                }
                None => {
                    let error = "no replica of this node has these files".into();
                    let part = wire::FilePart { hash: request.hash, error, ..wire::FilePart::default() };
                    return send(&self.to_router, ToRouter::File(part)).await;
                }
            },
            Some(Order::Release(replicas)) => {
                tracing::info!(replicas = ?replicas.indices, "a router orders: release");
                answer.error = orders::release(&uplink, &replicas);
            }
            // These take seconds or minutes: they are answered when they are done, and the session goes on meanwhile.
            Some(order @ (Order::Sleep(_) | Order::Wake(_) | Order::Lora(_))) => {
                self.orders.push(Box::pin(orders::carry_out(uplink, answer.id, order)));
                return Ok(());
            }
            None => answer.error = format!("agent {} does not know this directive", env!("CARGO_PKG_VERSION")),
        }
        send(&self.to_router, ToRouter::Answer(answer)).await
    }
}

async fn send(to_router: &mpsc::Sender<wire::AttachRequest>, message: ToRouter) -> Result<(), Ended> {
    let sent = timeout(WELCOME_DEADLINE, to_router.send(wire::AttachRequest { message: Some(message) })).await;
    match sent {
        Ok(Ok(())) => Ok(()),
        _ => Err(Ended::Lost("the router takes no messages".into())),
    }
}

#[cfg(test)]
mod tests;
