//! The gRPC service that agents dial: `Attach` goes to a fleet session, and each `Carry` call
//! becomes a lane.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{AbortHandle, Abortable};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, Stream, StreamExt};
use hostler_boot::peer_user::peer_user;
use hostler_proto::agent::v1::agent_link_server::{AgentLink, AgentLinkServer};
use hostler_proto::agent::v1::{AttachRequest, FrameBatch};
use hostler_proto::join::v1::join_server::JoinServer;
use hostler_proto::{TICKET_KEY, wire};
use hostler_tls::Stream as Tunnel;
use rustix::process::geteuid;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::transport::server::Connected;
use tonic::{Request, Response, Status, Streaming};

use crate::fleet::{SessionDeps, attach};
use crate::join::{Connection, JoinEndpoint, Peer};
use crate::lanes::{Lane, Lanes};
use crate::member::NewestCertificates;
use crate::metrics::RouterMetrics;
use crate::succession::Succession;
use crate::tls::FleetAuthority;

const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(10);

/// Most connections that are silent, or at their handshake, at once. One more ends the oldest: an
/// agent speaks at once.
const MAX_SILENT_CONNECTIONS: usize = 256;

/// Most simultaneous connections of agents that have no certificate yet and ask for one, and of
/// other users in plain text. Agents that find no place try again.
const MAX_UNAUTHENTICATED_CONNECTIONS: usize = 64;

/// Serves agents on `listener` until `end`, over TLS if there is an authority to admit them.
///
/// # Errors
/// If the listener fails.
pub(crate) async fn serve(
    listener: TcpListener,
    admitting: Option<FleetAuthority>,
    sessions: Arc<SessionDeps>,
    metrics: Arc<RouterMetrics>,
    end: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let fence = admitting.as_ref().map(|admitting| admitting.newest.clone()).unwrap_or_default();
    let succession = sessions.succession.clone();
    let only_own_user = sessions.only_own_user;
    let connections = accept_connections((listener, only_own_user), succession, admitting.clone(), fence);
    let join = admitting.map(|admitting| JoinEndpoint::into_server(sessions.fleet.clone(), admitting));
    serve_connections(connections, join, sessions, metrics, end).await
}

/// Serves the agents at the other ends of these connections; without `join` every agent may attach.
pub(crate) async fn serve_connections<C>(
    connections: impl Stream<Item = io::Result<C>>,
    join: Option<JoinServer<JoinEndpoint>>,
    sessions: Arc<SessionDeps>,
    metrics: Arc<RouterMetrics>,
    end: CancellationToken,
) -> Result<(), tonic::transport::Error>
where
    C: AsyncRead + AsyncWrite + Connected<ConnectInfo = Peer> + Unpin + Send + 'static,
{
    let is_open = join.is_none();
    let link = AgentLinkServer::new(AgentEndpoint { sessions, metrics, is_anonymous_allowed: is_open, end: end.clone() })
        .max_decoding_message_size(wire::MAX_MESSAGE_BYTES);
    Server::builder()
        .initial_stream_window_size(wire::HTTP2_WINDOW_BYTES)
        .initial_connection_window_size(wire::HTTP2_WINDOW_BYTES)
        .max_frame_size(wire::MAX_HTTP2_FRAME_BYTES)
        .http2_keepalive_interval(Some(wire::KEEPALIVE_TIMEOUT))
        .http2_keepalive_timeout(Some(wire::KEEPALIVE_TIMEOUT))
        .add_service(link)
        .add_optional_service(join)
        .serve_with_incoming_shutdown(connections, end.cancelled_owned())
        .await
}

/// Yields connections whose first byte has come. HTTP/2 has no deadline for it, so a port scanner
/// would hold its place for ever.
fn accept_connections(
    (listener, only_own_user): (TcpListener, bool),
    succession: Succession,
    admitting: Option<FleetAuthority>,
    fence: Arc<NewestCertificates>,
) -> impl Stream<Item = io::Result<Connection>> {
    let accepted = futures_util::stream::unfold((Some(listener), succession), |(mut listener, succession)| async {
        Some((succession.accept_agent(&mut listener).await, (listener, succession)))
    });
    let unauthenticated = Arc::new(Semaphore::new(MAX_UNAUTHENTICATED_CONNECTIONS));
    let spoken = accepted.map(move |stream| {
        let (handshake, fence, unauthenticated) =
            (admitting.as_ref().map(|admitting| admitting.tls.handshake()), fence.clone(), unauthenticated.clone());
        async move {
            hostler_boot::configure_stream(&stream, wire::TCP_USER_TIMEOUT).ok()?;
            let is_trusted = !only_own_user || is_of_own_user(&stream).await;
            timeout(FIRST_BYTE_TIMEOUT, stream.readable()).await.ok()?.ok()?;
            let stream = match handshake {
                None => Tunnel::Plain(stream),
                Some(handshake) => {
                    let peer = stream.peer_addr().ok();
                    let secured = hostler_tls::accept(stream, handshake, FIRST_BYTE_TIMEOUT).await;
                    secured.inspect_err(|error| log_failed_handshake(peer, error)).ok()?
                }
            };
            Connection::new(stream, is_trusted, &fence, &unauthenticated).map(Ok)
        }
    });
    run_newest(spoken, MAX_SILENT_CONNECTIONS).filter_map(std::future::ready)
}

/// Runs each future that comes. One more than `limit` ends the oldest, so that no number of peers
/// that never finish keeps others out.
fn run_newest<F: Future>(coming: impl Stream<Item = F>, limit: usize) -> impl Stream<Item = F::Output> {
    let running = (FuturesUnordered::new(), BTreeMap::<u64, AbortHandle>::new());
    futures_util::stream::unfold((Box::pin(coming), running, 0), move |(mut coming, (mut running, mut handles), mut number)| async move {
        loop {
            tokio::select! {
                biased;
                Some((number_of_ended, ended)) = running.next() => {
                    handles.remove(&number_of_ended);
                    if let Ok(output) = ended {
                        return Some((output, (coming, (running, handles), number)));
                    }
                }
                Some(future) = coming.next() => {
                    if handles.len() >= limit && let Some((_, oldest)) = handles.pop_first() {
                        oldest.abort();
                    }
                    let (handle, registration) = AbortHandle::new_pair();
                    number += 1;
                    handles.insert(number, handle);
                    running.push(Abortable::new(future, registration).map(move |ended| (number, ended)));
                }
                else => return None,
            }
        }
    })
}

/// Whether the program at the other end belongs to this router's user, or to root.
async fn is_of_own_user(stream: &TcpStream) -> bool {
    let peer = Peer { address: stream.peer_addr().ok(), local_address: stream.local_addr().ok(), member: None };
    check_user(&peer).await.is_ok()
}

/// Logs a failed handshake. Warns if somebody can act on it; port scanners that leave are only
/// logged at debug level.
fn log_failed_handshake(peer: Option<std::net::SocketAddr>, error: &io::Error) {
    match hostler_tls::describe_for_router(error) {
        Some(reason) => tracing::warn!(event = "agent_refused", ?peer, reason, "an agent's connection was refused"),
        None => tracing::debug!(?peer, %error, "an agent's handshake failed"),
    }
}

/// Ends a lane's requests when its stream ends, however that happens.
struct LaneGuard {
    lane: Arc<Lane>,
    lanes: Arc<Lanes>,
}

impl Drop for LaneGuard {
    fn drop(&mut self) {
        self.lane.mark_lost(&self.lanes.loss());
        self.lanes.remove_lost();
    }
}

#[derive(Debug)]
struct AgentEndpoint {
    sessions: Arc<SessionDeps>,
    metrics: Arc<RouterMetrics>,
    /// Whether agents need no certificate.
    is_anonymous_allowed: bool,
    /// Ends the agents' streams, which never end by themselves: the server would wait for them.
    end: CancellationToken,
}

const NO_CERTIFICATE: &str = "this router serves nodes that have a certificate and are attached: join with a token (agent.join_token_file)";

/// Admits an agent of the router's own user, or of root. Every user of the host reaches loopback,
/// and would otherwise get the prompts of this user's fleet.
async fn check_user(peer: &Peer) -> Result<(), Status> {
    let (Some(address), Some(local)) = (peer.address, peer.local_address) else {
        return Err(Status::unavailable("the connection has gone"));
    };
    let found = tokio::task::spawn_blocking(move || peer_user(address, local)).await;
    judge_user(found.map_err(|error| Status::internal(error.to_string()))?, geteuid().as_raw())
}

/// Decides whether an agent of the user that was `found` may enter. An agent whose user is unknown
/// to the kernel could be anybody's.
fn judge_user(found: io::Result<Option<u32>>, own: u32) -> Result<(), Status> {
    let whose = match found {
        Ok(Some(user)) if user == own || user == 0 => return Ok(()),
        Ok(Some(user)) => format!("the agent user {user}'s"),
        Ok(None) => "the agent of nobody that the kernel knows".to_owned(),
        Err(error) => format!("this host does not tell whose the agent is (/proc/net/tcp: {error})"),
    };
    Err(Status::failed_precondition(format!(
        "this router is user {own}'s and {whose}: in plain text it takes agents of its own user only. Name a router of yours \
         (agent.router), or let the router speak TLS (router.tls_dir) or trust everybody on its network (router.allow_plain_text)"
    )))
}

type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl AgentLink for AgentEndpoint {
    type AttachStream = ResponseStream<hostler_proto::agent::v1::AttachResponse>;
    type CarryStream = ResponseStream<FrameBatch>;

    async fn attach(&self, request: Request<Streaming<AttachRequest>>) -> Result<Response<Self::AttachStream>, Status> {
        let peer = Peer::of(&request);
        if peer.member.is_none() && !self.is_anonymous_allowed {
            return Err(Status::unauthenticated(NO_CERTIFICATE));
        }
        if self.sessions.only_own_user {
            check_user(&peer).await.inspect_err(|status| {
                tracing::warn!(event = "agent_refused", peer = ?peer.address, reason = status.message(), "agent refused");
            })?;
        }
        let Peer { address, member, .. } = peer;
        let messages = attach(self.sessions.clone(), request.into_inner(), member).await.inspect_err(|status| {
            tracing::warn!(event = "agent_refused", peer = ?address, reason = status.message(), "agent refused");
        })?;
        Ok(Response::new(Box::pin(messages.take_until(self.end.clone().cancelled_owned()))))
    }

    async fn carry(&self, request: Request<Streaming<FrameBatch>>) -> Result<Response<Self::CarryStream>, Status> {
        if !self.is_anonymous_allowed && !Peer::of(&request).member.is_some_and(|member| member.is_attached()) {
            return Err(Status::unauthenticated(NO_CERTIFICATE));
        }
        let ticket = request.metadata().get_bin(TICKET_KEY).and_then(|ticket| ticket.to_bytes().ok());
        let lanes = ticket
            .and_then(|ticket| self.sessions.tickets.redeem(&ticket))
            .ok_or_else(|| Status::unauthenticated("a lane needs the ticket of a live attachment"))?;
        let lane = Lane::new(self.metrics.unknown_frames.clone());
        lanes.add(&lane);
        let batches = lane.outbox().batches().map(Ok);
        let mut frames = request.into_inner();
        let open = LaneGuard { lane, lanes };
        self.sessions.tasks.spawn(async move {
            while let Ok(Some(batch)) = frames.message().await {
                open.lane.receive(batch);
            }
        });
        Ok(Response::new(Box::pin(batches)))
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use futures_util::future::Either;
    use futures_util::stream;

    use super::*;

    #[tokio::test]
    async fn silent_peers_keep_nobody_out() {
        let peers = stream::iter(0..1000).map(|peer| if peer == 999 { Either::Left(ready(peer)) } else { Either::Right(pending()) });
        assert_eq!(Box::pin(run_newest(peers, 4)).next().await, Some(999));
    }

    #[test]
    fn an_agent_enters_only_as_the_routers_user_or_root() {
        for found in [Ok(Some(1000)), Ok(Some(0))] {
            assert!(judge_user(found, 1000).is_ok());
        }
        for (found, whose) in [
            (Ok(Some(1001)), "the agent user 1001's"),
            (Ok(None), "the agent of nobody that the kernel knows"),
            (Err(io::Error::from(io::ErrorKind::PermissionDenied)), "does not tell whose the agent is (/proc/net/tcp: permission denied)"),
            (Err(io::Error::from(io::ErrorKind::NotFound)), "does not tell whose the agent is"),
        ] {
            let refused = judge_user(found, 1000).unwrap_err();
            assert!(refused.message().contains(whose) && refused.message().contains("router.allow_plain_text"), "{refused}");
        }
    }
}
