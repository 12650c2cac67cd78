//! One router's session: dialled, attached, reporting, serving lanes, until it ends.
//!
//! `redial` begins the next one.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use hostler_proto::agent::v1 as wire;
use hostler_proto::agent::v1::agent_link_client::AgentLinkClient;
use hostler_proto::agent::v1::attach_request::Message as ToRouter;
use hostler_proto::agent::v1::attach_response::Message as FromRouter;
use hostler_proto::agent::v1::directive::Order;
use hostler_proto::{PROTOCOL, TICKET_KEY};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};

use super::orders;
use super::relay;
use super::report::{self, Reporter};
use super::transfers::TransferQueue;
use super::{LANES, Uplink};
use crate::dial::{DialError, dial};
use crate::join::{self, Identity, JoinError};
use crate::lane::Lane;
use crate::load_turns::{LoadWish, RouterWord, TurnLink};
use crate::node::REPORT_INTERVAL;
use crate::traffic::RouterKey;

const WELCOME_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit for the last report.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(1);

/// Shortest interval of empty reports, whatever the router's lease.
const MIN_HEARTBEAT: Duration = Duration::from_millis(100);

/// Reports and answers that may wait for the connection.
const QUEUE_CAPACITY: usize = 16;

/// Places in the queue that transfers leave free.
///
/// A report then waits for at most a few parts of a transfer, and never for a place.
const TRANSFER_RESERVE: usize = 12;

#[derive(Debug, thiserror::Error)]
pub(super) enum SessionEnd {
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

impl From<Status> for SessionEnd {
    fn from(status: Status) -> Self {
        match status.code() {
            Code::FailedPrecondition | Code::InvalidArgument | Code::Unauthenticated | Code::PermissionDenied | Code::Unimplemented => {
                Self::Refused(status.message().to_owned())
            }
            _ => Self::Lost(status.message().to_owned()),
        }
    }
}

impl From<JoinError> for SessionEnd {
    fn from(error: JoinError) -> Self {
        match error {
            JoinError::Unreachable(reason) => Self::Unreachable(reason),
            error => Self::Refused(error.to_string()),
        }
    }
}

/// Frees the router's life for another address when the session ends.
struct RouterClaim {
    uplink: Arc<Uplink>,
    router_life: u64,
}

impl RouterClaim {
    fn take(uplink: &Arc<Uplink>, router_life: u64) -> Result<Self, SessionEnd> {
        let fresh = uplink.attached_routers.send_if_modified(|attached| attached.insert(router_life));
        if fresh { Ok(Self { uplink: uplink.clone(), router_life }) } else { Err(SessionEnd::Duplicate) }
    }
}

impl Drop for RouterClaim {
    fn drop(&mut self) {
        self.uplink.attached_routers.send_if_modified(|attached| attached.remove(&self.router_life));
    }
}

pub(super) struct Session {
    claim: RouterClaim,
    to_router: mpsc::Sender<wire::AttachRequest>,
    from_router: Streaming<wire::AttachResponse>,
    reporter: Reporter,
    transfers: TransferQueue,
    turns: TurnLink,
    /// Interval of empty reports.
    heartbeat: Duration,
    /// Lane tasks.
    ///
    /// The end of one lane ends the session, because a lane is lost only with its connection.
    /// Without a status the router closed it.
    lanes: Vec<AbortOnDropHandle<Option<Status>>>,
    /// Orders being executed, to be answered when they are done.
    orders: FuturesUnordered<BoxFuture<'static, wire::Answer>>,
    /// Notified when another router takes this one's place.
    successor: Arc<Notify>,
    /// Keeps the connection's certificate from expiring.
    _renewal: AbortOnDropHandle<()>,
}

/// Connects to the router, and returns the certificate that was shown.
async fn connect(uplink: &Arc<Uplink>, address: SocketAddr) -> Result<(Channel, Option<Arc<Identity>>), SessionEnd> {
    let identity = uplink.access.identity(address).await?;
    let dialled = dial(address, join::tls_config(identity.as_ref())).await;
    let channel = dialled.map_err(|error| match error {
        DialError::Unreachable(reason) => SessionEnd::Unreachable(reason),
        DialError::Tls { reason, certificate } => {
            identity.iter().filter(|_| certificate).for_each(|identity| uplink.access.discard(identity));
            SessionEnd::Refused(reason)
        }
    })?;
    Ok((channel, identity))
}

/// Dials the router and attaches.
///
/// Afterwards its welcome has arrived, the first report is sent, and the lanes are open.
pub(super) async fn attach(uplink: &Arc<Uplink>, address: SocketAddr, successor: Arc<Notify>) -> Result<Session, SessionEnd> {
    let (channel, identity) = connect(uplink, address).await?;
    let (to_router, messages) = mpsc::channel(QUEUE_CAPACITY);
    let hello = wire::Hello {
        protocol: PROTOCOL,
        agent_version: env!("CARGO_PKG_VERSION").into(),
        node: uplink.node.clone(),
        life: uplink.life,
        job: uplink.state.job().map(report::job),
    };
    send(&to_router, ToRouter::Hello(hello)).await?;
    let mut client = AgentLinkClient::new(channel.clone());
    let welcomed = async {
        let mut from_router = client.attach(ReceiverStream::new(messages)).await?.into_inner();
        let first = from_router.message().await?;
        Ok::<_, Status>((from_router, first))
    };
    let welcomed = timeout(WELCOME_TIMEOUT, welcomed)
        .await
        .map_err(|_| SessionEnd::Lost(format!("no welcome within {} s", WELCOME_TIMEOUT.as_secs())))?;
    let (from_router, first) = welcomed.map_err(|status| {
        // Another certificate could be accepted.
        if status.code() == Code::Unauthenticated {
            identity.iter().for_each(|identity| uplink.access.discard(identity));
        }
        match SessionEnd::from(status) {
            SessionEnd::Lost(reason) if identity.is_none() => {
                SessionEnd::Lost(format!("{reason} (plain text; a router with router.tls_dir wants agent.join_token_file)"))
            }
            ended => ended,
        }
    })?;
    let Some(wire::AttachResponse { message: Some(FromRouter::Welcome(welcome)) }) = first else {
        return Err(SessionEnd::Lost("the router did not begin with a welcome".into()));
    };
    let claim = RouterClaim::take(uplink, welcome.router_life)?;
    let router = RouterKey(welcome.router_life);
    let mut reporter = Reporter::new(router);
    send(&to_router, ToRouter::Report(reporter.snapshot(&uplink.state))).await?;
    let mut lanes = Vec::new();
    for _ in 0..LANES {
        lanes.push(open_lane(uplink, channel.clone(), &welcome.ticket, router).await?);
    }
    let heartbeat = (Duration::from_millis(u64::from(welcome.lease_ms)) / 3).max(MIN_HEARTBEAT);
    let logs = uplink.state.replicas().iter().map(|replica| replica.engine.cache().clone());
    let transfers = TransferQueue::new(logs, uplink.state.file_log(), welcome.cache_tiers);
    let turns = uplink.load_turns.attach(welcome.router_life, welcome.max_loads);
    let renewal = AbortOnDropHandle::new(tokio::spawn(uplink.access.clone().keep_renewed(channel, identity)));
    let orders = FuturesUnordered::new();
    Ok(Session { claim, to_router, from_router, reporter, transfers, turns, heartbeat, lanes, orders, successor, _renewal: renewal })
}

async fn open_lane(
    uplink: &Arc<Uplink>,
    channel: Channel,
    ticket: &[u8],
    router: RouterKey,
) -> Result<AbortOnDropHandle<Option<Status>>, SessionEnd> {
    let lane = Lane::new(uplink.metrics.unknown_frames.clone());
    let mut request = Request::new(lane.outbox().batches());
    request.metadata_mut().insert_bin(TICKET_KEY, MetadataValue::from_bytes(ticket));
    let mut client = AgentLinkClient::new(channel).max_decoding_message_size(hostler_proto::wire::MAX_MESSAGE_BYTES);
    let opened = timeout(WELCOME_TIMEOUT, client.carry(request)).await;
    let mut batches =
        opened.map_err(|_| SessionEnd::Lost(format!("a lane was not opened within {} s", WELCOME_TIMEOUT.as_secs())))??.into_inner();
    let uplink = uplink.clone();
    let guard = LaneGuard(lane);
    Ok(AbortOnDropHandle::new(tokio::spawn(async move {
        let mut cut_off = pin!(uplink.state.wait_cut_off().fuse());
        loop {
            let batch = tokio::select! {
                batch = batches.message() => batch,
                () = &mut cut_off => {
                    guard.0.interrupt();
                    continue;
                }
            };
            match batch {
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

/// Closes its lane when the task that reads it ends, however it ends.
struct LaneGuard(Arc<Lane>);

impl Drop for LaneGuard {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Session {
    /// Runs until the session is lost.
    ///
    /// `None` if it was told to end, and the router has the last report.
    pub(super) async fn run(mut self, end: &CancellationToken) -> Option<SessionEnd> {
        let uplink = self.claim.uplink.clone();
        let mut state = uplink.state.changed();
        let mut heartbeat = tokio::time::interval(self.heartbeat);
        let mut lanes: FuturesUnordered<_> = std::mem::take(&mut self.lanes).into_iter().collect();
        let mut next_report = Instant::now();
        loop {
            // Changes until the next report is due leave together.
            let changed = async {
                sleep_until(next_report).await;
                state.changed().await
            };
            let room = async {
                let room = self.to_router.reserve_many(TRANSFER_RESERVE + 1).await;
                room.map(drop).map_err(|_| SessionEnd::Lost("the router takes no messages".into()))
            };
            let sent = tokio::select! {
                message = self.from_router.message() => match message {
                    Ok(Some(wire::AttachResponse { message: Some(FromRouter::Directive(directive)) })) => self.execute_directive(directive).await,
                    Ok(Some(_)) => Ok(()),
                    Ok(None) => return Some(SessionEnd::Left),
                    Err(status) => return Some(status.into()),
                },
                () = end.cancelled() => {
                    self.bid_farewell().await;
                    return None;
                }
                _ = changed => {
                    heartbeat.reset();
                    next_report = Instant::now() + REPORT_INTERVAL;
                    self.report().await
                }
                _ = heartbeat.tick() => self.report().await,
                // Send one part per turn, and only while the queue is nearly empty, so that no
                // branch above waits for long.
                room = room, if self.transfers.is_due() => match (room, self.transfers.next(|index| self.reporter.reported_epoch(index))) {
                    (Err(ended), _) => Err(ended),
                    (Ok(()), None) => Ok(()),
                    // This is the only sender, so the room is still there.
                    (Ok(()), Some(part)) => send(&self.to_router, part).await,
                },
                wish = self.turns.next_wish() => send(&self.to_router, load_wish(wish)).await,
                Some(answer) = self.orders.next() => self.answer_order(answer).await,
                Some(lane) = lanes.next() => {
                    return Some(match lane {
                        Ok(None) => SessionEnd::Left,
                        Ok(Some(status)) => status.into(),
                        Err(error) => SessionEnd::Lost(error.to_string()),
                    });
                }
            };
            if let Err(ended) = sent {
                return Some(ended);
            }
        }
    }

    /// Sends the last changes.
    ///
    /// The router ends its side when it has read this one to the end, so no report is lost with the
    /// connection.
    async fn bid_farewell(mut self) {
        let farewell = async {
            let _ = self.report().await;
            drop(self.to_router);
            while let Ok(Some(_)) = self.from_router.message().await {}
        };
        if timeout(FAREWELL_TIMEOUT, farewell).await.is_err() {
            tracing::debug!("a router did not take the last report in time");
        }
    }

    async fn report(&mut self) -> Result<(), SessionEnd> {
        let report = self.reporter.report(&self.claim.uplink.state);
        self.transfers.mark_caches_due();
        send(&self.to_router, ToRouter::Report(report)).await
    }

    /// Answers an order that is done or has failed, after reporting its changes.
    async fn answer_order(&mut self, answer: wire::Answer) -> Result<(), SessionEnd> {
        self.report().await?;
        send(&self.to_router, ToRouter::Answer(answer)).await
    }

    async fn execute_directive(&mut self, directive: wire::Directive) -> Result<(), SessionEnd> {
        let uplink = self.claim.uplink.clone();
        let mut answer = wire::Answer { id: directive.id, error: String::new(), log_lines: Vec::new(), log_end: 0 };
        match directive.order {
            Some(Order::Resync(_)) => {
                let snapshot = self.reporter.snapshot(&uplink.state);
                return send(&self.to_router, ToRouter::Report(snapshot)).await;
            }
            Some(Order::Drain(replicas)) => {
                tracing::info!(event = "order_received", replicas = ?replicas.indices, "directive from router: drain");
                uplink.state.select(&replicas.indices).for_each(|replica| replica.engine.drain());
            }
            Some(Order::Restart(replicas)) => {
                tracing::info!(event = "order_received", replicas = ?replicas.indices, "directive from router: restart");
                uplink.state.select(&replicas.indices).for_each(|replica| replica.engine.restart());
            }
            Some(Order::Logs(request)) => match uplink.state.replica(request.index) {
                Some(replica) => {
                    let lines = request.lines as usize;
                    let whole = || Ok(replica.engine.log_tail(lines));
                    match request.member.map_or_else(whole, |member| replica.engine.member_log_tail(member, lines)) {
                        Ok(tail) => (answer.log_lines, answer.log_end) = tail,
                        Err(reason) => answer.error = reason,
                    }
                }
                None => answer.error = format!("this node has no replica {}", request.index),
            },
            Some(Order::ResyncCache(replicas)) => {
                self.transfers.resync(&replicas.indices);
                return Ok(());
            }
            Some(Order::FetchFiles(request)) => match uplink.state.bundle(&request.hash) {
                Some(bundle) => {
                    self.transfers.send_files(bundle);
                    return Ok(());
                }
                None => {
                    let error = "no replica of this node has these files".into();
                    let part = wire::FilePart { hash: request.hash, error, ..wire::FilePart::default() };
                    return send(&self.to_router, ToRouter::File(part)).await;
                }
            },
            Some(Order::Release(replicas)) => {
                tracing::info!(event = "order_received", replicas = ?replicas.indices, "directive from router: release");
                answer.error = orders::release(&uplink, &replicas);
            }
            Some(Order::LoadTurn(wire::LoadTurn { file_system, granted, ahead })) => {
                self.turns.hear(&file_system, if granted { RouterWord::Granted } else { RouterWord::Queued(ahead) });
                return Ok(());
            }
            Some(Order::Successor(_)) => {
                self.successor.notify_one();
                return Ok(());
            }
            // These orders take seconds or minutes. They are answered when they are done, and the
            // session continues meanwhile.
            Some(order @ (Order::Sleep(_) | Order::Wake(_) | Order::Lora(_))) => {
                self.orders.push(Box::pin(orders::execute(uplink, answer.id, order)));
                return Ok(());
            }
            None => answer.error = format!("agent {} does not know this directive", env!("CARGO_PKG_VERSION")),
        }
        send(&self.to_router, ToRouter::Answer(answer)).await
    }
}

fn load_wish(wish: Option<LoadWish>) -> ToRouter {
    let wish = wish.map(|LoadWish { file_system, holds }| wire::LoadWish { file_system: file_system.to_string(), holds });
    ToRouter::LoadWish(wish.unwrap_or_default())
}

async fn send(to_router: &mpsc::Sender<wire::AttachRequest>, message: ToRouter) -> Result<(), SessionEnd> {
    let sent = timeout(WELCOME_TIMEOUT, to_router.send(wire::AttachRequest { message: Some(message) })).await;
    match sent {
        Ok(Ok(())) => Ok(()),
        _ => Err(SessionEnd::Lost("the router takes no messages".into())),
    }
}

#[cfg(test)]
mod tests;
