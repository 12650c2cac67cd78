//! One attachment to a router, with its lanes: the agent's side of `Attach` and `Carry`, controlled
//! by its holder.

use std::net::SocketAddr;
use std::sync::Arc;

use hostler_agent::lane::{IncomingRequest, Lane};
use hostler_proto::agent::v1 as wire;
use hostler_proto::agent::v1::agent_link_client::AgentLinkClient;
use hostler_proto::agent::v1::attach_request::Message as ToRouter;
use hostler_proto::agent::v1::attach_response::Message as FromRouter;
use hostler_proto::wire::{HTTP2_WINDOW_BYTES, KEEPALIVE_TIMEOUT, MAX_HTTP2_FRAME_BYTES, MAX_MESSAGE_BYTES, TCP_USER_TIMEOUT};
use hostler_proto::{PROTOCOL, TICKET_KEY};
use hyper_util::rt::TokioIo;
use prometheus_client::metrics::counter::Counter;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};

use super::tally::{CountedStream, Traffic};

/// Reports that may wait for the connection, as at a real agent.
const QUEUE: usize = 16;

/// A living attachment. Dropping it closes its connection.
#[derive(Debug)]
pub struct Attachment {
    to_router: mpsc::Sender<wire::AttachRequest>,
    from_router: Streaming<wire::AttachResponse>,
    sequence: u64,
    lease_ms: u32,
    /// Lanes; one that ends takes the attachment with it.
    lanes: Vec<AbortOnDropHandle<()>>,
}

#[derive(Debug)]
pub struct AttachRequest {
    /// Name and life of the node; the versions are filled in.
    pub hello: wire::Hello,
    /// All replicas of the node.
    pub replicas: Vec<wire::ReplicaReport>,
    pub lanes: u32,
}

/// Attaches a node.
///
/// Its requests go to `taken`, and the bytes of its connection are counted in `traffic`.
///
/// # Errors
/// When the router cannot be reached, or refuses.
pub async fn attach(
    router: SocketAddr,
    node: AttachRequest,
    taken: &mpsc::UnboundedSender<IncomingRequest>,
    traffic: Arc<Traffic>,
) -> Result<Attachment, Status> {
    let AttachRequest { hello, replicas, lanes } = node;
    let channel = dial(router, traffic).await?;
    let (to_router, messages) = mpsc::channel(QUEUE);
    let send = async |message| to_router.send(wire::AttachRequest { message: Some(message) }).await.map_err(|_| lost("Attach"));
    send(ToRouter::Hello(wire::Hello { protocol: PROTOCOL, agent_version: env!("CARGO_PKG_VERSION").into(), ..hello })).await?;
    let mut from_router = AgentLinkClient::new(channel.clone()).attach(ReceiverStream::new(messages)).await?.into_inner();
    let Some(wire::AttachResponse { message: Some(FromRouter::Welcome(welcome)) }) = from_router.message().await? else {
        return Err(Status::internal("the router did not begin with a welcome"));
    };
    send(ToRouter::Report(wire::Report { sequence: 0, snapshot: true, replicas, job: None })).await?;
    let mut attached = Attachment { to_router, from_router, sequence: 1, lease_ms: welcome.lease_ms, lanes: Vec::new() };
    for _ in 0..lanes {
        attached.lanes.push(open_lane(channel.clone(), &welcome.ticket, taken.clone()).await?);
    }
    Ok(attached)
}

async fn dial(router: SocketAddr, traffic: Arc<Traffic>) -> Result<Channel, Status> {
    let connector = tower::service_fn(move |_| {
        let traffic = traffic.clone();
        async move {
            let stream = TcpStream::connect(router).await?;
            hostler_boot::configure_stream(&stream, TCP_USER_TIMEOUT)?;
            Ok::<_, std::io::Error>(TokioIo::new(CountedStream { stream, traffic }))
        }
    });
    let endpoint = Endpoint::from_shared(format!("http://{router}")).map_err(|error| Status::internal(error.to_string()))?;
    let dialled = endpoint
        .initial_stream_window_size(HTTP2_WINDOW_BYTES)
        .initial_connection_window_size(HTTP2_WINDOW_BYTES)
        .max_frame_size(MAX_HTTP2_FRAME_BYTES)
        .http2_keep_alive_interval(KEEPALIVE_TIMEOUT)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .connect_with_connector(connector)
        .await;
    dialled.map_err(|error| Status::unavailable(hostler_boot::root_cause(&error)))
}

async fn open_lane(
    channel: Channel,
    ticket: &[u8],
    taken: mpsc::UnboundedSender<IncomingRequest>,
) -> Result<AbortOnDropHandle<()>, Status> {
    let lane = Lane::new(Counter::default());
    let mut request = Request::new(lane.outbox().batches());
    request.metadata_mut().insert_bin(TICKET_KEY, MetadataValue::from_bytes(ticket));
    let mut batches = AgentLinkClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES).carry(request).await?.into_inner();
    Ok(AbortOnDropHandle::new(tokio::spawn(async move {
        let lane = LaneGuard(lane);
        while let Ok(Some(batch)) = batches.message().await {
            for incoming in lane.0.receive(batch) {
                // An unwanted receiver is dropped; then the router learns that the requests are
                // given up.
                let _ = taken.send(incoming);
            }
        }
    })))
}

/// Loses its lane when the task that reads it ends.
struct LaneGuard(Arc<Lane>);

impl Drop for LaneGuard {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Attachment {
    /// Time within which a report is due, even an empty one.
    #[must_use]
    pub fn lease_ms(&self) -> u32 {
        self.lease_ms
    }

    /// Reports the changes to the router, which may be none.
    ///
    /// # Errors
    /// When the connection has ended.
    pub async fn report(&mut self, replicas: Vec<wire::ReplicaReport>) -> Result<(), Status> {
        let report = wire::Report { sequence: self.sequence, snapshot: false, replicas, job: None };
        self.sequence += 1;
        self.send(ToRouter::Report(report)).await
    }

    /// Reports to the router which blocks of a replica are cached.
    ///
    /// # Errors
    /// When the connection has ended.
    pub async fn report_cache(&mut self, report: wire::CacheReport) -> Result<(), Status> {
        self.send(ToRouter::Cache(report)).await
    }

    async fn send(&self, message: ToRouter) -> Result<(), Status> {
        let sent = self.to_router.send(wire::AttachRequest { message: Some(message) }).await;
        sent.map_err(|_| lost("Attach"))
    }

    /// Resolves with the next directive, or why there will be none.
    pub async fn directive(&mut self) -> Result<wire::Directive, Status> {
        loop {
            match self.from_router.message().await? {
                Some(wire::AttachResponse { message: Some(FromRouter::Directive(directive)) }) => return Ok(directive),
                Some(_) => {}
                None => return Err(lost("Attach")),
            }
        }
    }
}

fn lost(what: &str) -> Status {
    Status::unavailable(format!("the router closed {what}"))
}
