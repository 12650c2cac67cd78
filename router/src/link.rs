//! The gRPC service that agents dial: `Attach` goes to a fleet session, each `Carry` call becomes a lane.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use hostler_proto::agent::v1::agent_link_server::{AgentLink, AgentLinkServer};
use hostler_proto::agent::v1::{AttachRequest, FrameBatch};
use hostler_proto::{TICKET_KEY, wire};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

use crate::carry::Lane;
use crate::fleet::{Sessions, attach};
use crate::metrics::RouterMetrics;

/// How long a connection may be silent before its first byte.
const FIRST_BYTE_DEADLINE: Duration = Duration::from_secs(10);

/// Connections that may be silent at once; further ones wait to be accepted.
const SILENT_CONNECTIONS: usize = 256;

/// Serves agents on `listener` until `end`.
///
/// # Errors
/// When the listener fails.
pub(crate) async fn serve(
    listener: TcpListener,
    sessions: Arc<Sessions>,
    metrics: Arc<RouterMetrics>,
    end: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let link = AgentLinkServer::new(Link { sessions, metrics, end: end.clone() }).max_decoding_message_size(wire::MESSAGE_BYTES);
    Server::builder()
        .initial_stream_window_size(wire::WINDOW_BYTES)
        .initial_connection_window_size(wire::WINDOW_BYTES)
        .max_frame_size(wire::FRAME_BYTES)
        .http2_keepalive_interval(Some(wire::KEEPALIVE))
        .http2_keepalive_timeout(Some(wire::KEEPALIVE))
        .add_service(link)
        .serve_with_incoming_shutdown(connections(listener), end.cancelled_owned())
        .await
}

/// Connections that have begun to speak: HTTP/2 has no deadline for its first words, so a port scanner would stay for ever.
fn connections(listener: TcpListener) -> impl Stream<Item = io::Result<TcpStream>> {
    let accepted = futures_util::stream::unfold(listener, |listener| async { Some((hostler_boot::accept(&listener).await, listener)) });
    let spoken = accepted.map(|stream| async {
        hostler_boot::tune(&stream, wire::TCP_USER_TIMEOUT).ok()?;
        timeout(FIRST_BYTE_DEADLINE, stream.readable()).await.ok()?.ok()?;
        Some(Ok(stream))
    });
    spoken.buffer_unordered(SILENT_CONNECTIONS).filter_map(std::future::ready)
}

#[derive(Debug)]
struct Link {
    sessions: Arc<Sessions>,
    metrics: Arc<RouterMetrics>,
    /// The streams of agents never end by themselves; without this the server would wait for them.
    end: CancellationToken,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl AgentLink for Link {
    type AttachStream = Answers<hostler_proto::agent::v1::AttachResponse>;
    type CarryStream = Answers<FrameBatch>;

    async fn attach(&self, request: Request<Streaming<AttachRequest>>) -> Result<Response<Self::AttachStream>, Status> {
        let peer = request.remote_addr();
        let messages = attach(self.sessions.clone(), request.into_inner()).await.inspect_err(|status| {
            tracing::warn!(?peer, reason = status.message(), "agent refused");
        })?;
        Ok(Response::new(Box::pin(messages.take_until(self.end.clone().cancelled_owned()))))
    }

    async fn carry(&self, request: Request<Streaming<FrameBatch>>) -> Result<Response<Self::CarryStream>, Status> {
        let ticket = request.metadata().get_bin(TICKET_KEY).and_then(|ticket| ticket.to_bytes().ok());
        let lanes = ticket
            .and_then(|ticket| self.sessions.tickets.redeem(&ticket))
            .ok_or_else(|| Status::unauthenticated("a lane needs the ticket of a live attachment"))?;
        let lane = Lane::new(self.metrics.unknown_frames.clone());
        lanes.add(&lane);
        let batches = lane.outbox().batches().map(Ok);
        let mut frames = request.into_inner();
        let end = self.end.clone();
        tokio::spawn(async move {
            let read = async {
                while let Ok(Some(batch)) = frames.message().await {
                    lane.receive(batch);
                }
            };
            tokio::select! {
                () = read => {}
                () = end.cancelled() => {}
            }
            lane.lose();
            lanes.remove_lost();
        });
        Ok(Response::new(Box::pin(batches)))
    }
}
