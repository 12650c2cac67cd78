//! Sends KV event batches over ZeroMQ and answers requests to send old ones again.
//!
//! One task owns the PUB socket and the buffer; the replay socket's task asks it. The stepping task
//! never waits for either: batches that do not fit the queue are dropped and counted in the log,
//! and the gap in the sequence shows the loss.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::{Event, KvEventsConfig, encode};
use crate::error::Error;

/// How long to try to reach a subscriber before the engine starts without it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for one replay, because its reader may be gone.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(10);

/// The stepping task's end of the queue.
#[derive(Debug)]
pub struct Publisher {
    batches: mpsc::Sender<(f64, Vec<Event>)>,
}

/// A request for the batches kept from a sequence number on.
struct Replay {
    from: u64,
    reply: oneshot::Sender<Vec<(u64, Bytes)>>,
}

impl Publisher {
    /// Opens the sockets and starts the tasks, which end when `stop` is cancelled.
    ///
    /// # Errors
    /// When an address cannot be bound or reached.
    pub async fn start(config: KvEventsConfig, tasks: &TaskTracker, stop: &CancellationToken) -> Result<Self, Error> {
        let socket = open_publisher(&config).await?;
        let (batches, incoming) = mpsc::channel(config.max_queue_size.max(1));
        let (ask, requests) = mpsc::channel(16);
        if let Some(endpoint) = config.replay_endpoint.clone() {
            let replay = open_replay(&endpoint).await?;
            let topic = Bytes::from(config.topic.clone());
            tasks.spawn(stop.clone().run_until_cancelled_owned(answer_replays(replay, topic, ask)));
        }
        let log = Log { config, socket, next: 0, kept: VecDeque::new() };
        tasks.spawn(stop.clone().run_until_cancelled_owned(log.run(incoming, requests)));
        Ok(Self { batches })
    }

    /// Queues the events of one step; if the queue is full they are lost, as the log says.
    pub fn publish(&self, events: Vec<Event>) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        if self.batches.try_send((now.as_secs_f64(), events)).is_err() {
            warn!("KV event queue is full or closed; a batch is lost");
        }
    }
}

async fn open_publisher(config: &KvEventsConfig) -> Result<PubSocket, Error> {
    let mut socket = PubSocket::new();
    let endpoint = spelled_for_zeromq(&config.endpoint);
    let failed = |reason: String| Error::KvEvents { endpoint: config.endpoint.clone(), reason };
    if config.binds() {
        remove_stale_socket(&endpoint);
        socket.bind(&endpoint).await.map_err(|error| failed(error.to_string()))?;
    } else {
        let connecting = tokio::time::timeout(CONNECT_TIMEOUT, socket.connect(&endpoint)).await;
        connecting.map_err(|_| failed("nobody listens there".to_owned()))?.map_err(|error| failed(error.to_string()))?;
    }
    Ok(socket)
}

async fn open_replay(endpoint: &str) -> Result<RouterSocket, Error> {
    let mut socket = RouterSocket::new();
    let spelled = spelled_for_zeromq(endpoint);
    remove_stale_socket(&spelled);
    socket.bind(&spelled).await.map_err(|error| Error::KvEvents { endpoint: endpoint.to_owned(), reason: error.to_string() })?;
    Ok(socket)
}

/// Rewrites `*`, which the pure-Rust ZeroMQ does not know for "all addresses".
fn spelled_for_zeromq(endpoint: &str) -> String {
    endpoint.replace("tcp://*", "tcp://0.0.0.0")
}

/// Removes a socket file left by a dead process, as libzmq does.
fn remove_stale_socket(endpoint: &str) {
    if let Some(path) = endpoint.strip_prefix("ipc://") {
        // Usually there is nothing to remove, and any other failure shows in `bind`.
        let _ = std::fs::remove_file(path);
    }
}

/// The PUB socket and the batches kept for replay.
struct Log {
    config: KvEventsConfig,
    socket: PubSocket,
    next: u64,
    kept: VecDeque<(u64, Bytes)>,
}

impl Log {
    async fn run(mut self, mut incoming: mpsc::Receiver<(f64, Vec<Event>)>, mut requests: mpsc::Receiver<Replay>) {
        loop {
            tokio::select! {
                batch = incoming.recv() => match batch {
                    Some((timestamp, events)) => self.send(timestamp, &events).await,
                    None => return,
                },
                Some(Replay { from, reply }) = requests.recv() => {
                    let replayed = self.kept.iter().filter(|(sequence, _)| *sequence >= from);
                    // The replay task may have given up; then the answer is not needed.
                    let _ = reply.send(replayed.cloned().collect());
                }
            }
        }
    }

    async fn send(&mut self, timestamp: f64, events: &[Event]) {
        let payload = Bytes::from(encode(timestamp, events, 0));
        let sequence = self.next;
        self.next += 1;
        if self.kept.len() >= self.config.buffer_steps {
            self.kept.pop_front();
        }
        if self.config.buffer_steps > 0 {
            self.kept.push_back((sequence, payload.clone()));
        }
        let topic = Bytes::from(self.config.topic.clone());
        let frames = [topic, Bytes::copy_from_slice(&sequence.to_be_bytes()), payload];
        if let Err(error) = self.socket.send(message(frames)).await {
            debug!(%error, "cannot send KV events");
        }
    }
}

fn message<const N: usize>(frames: [Bytes; N]) -> ZmqMessage {
    ZmqMessage::try_from(Vec::from(frames)).expect("a message of some frames is not empty")
}

/// Serves `[identity, "", start]` with one message for each batch and an end marker,
/// framed as vLLM does since 0.26.
async fn answer_replays(mut socket: RouterSocket, topic: Bytes, ask: mpsc::Sender<Replay>) {
    loop {
        let request = match socket.recv().await {
            Ok(request) => request,
            Err(error) => {
                warn!(%error, "the KV event replay socket failed");
                return;
            }
        };
        let (Some(identity), Some(start)) = (request.get(0).cloned(), request.get(2)) else {
            continue;
        };
        let Ok(start) = <[u8; 8]>::try_from(start.as_ref()) else { continue };
        let (reply, answer) = oneshot::channel();
        let question = Replay { from: u64::from_be_bytes(start), reply };
        if ask.send(question).await.is_err() {
            return;
        }
        let Ok(batches) = answer.await else { return };
        let replaying = replay(&mut socket, &identity, &topic, batches);
        if tokio::time::timeout(REPLAY_TIMEOUT, replaying).await.is_err() {
            warn!("a KV event replay was not read in time");
        }
    }
}

async fn replay(socket: &mut RouterSocket, identity: &Bytes, topic: &Bytes, batches: Vec<(u64, Bytes)>) {
    let numbered = batches.into_iter().map(|(sequence, payload)| {
        let sequence = Bytes::copy_from_slice(&sequence.to_be_bytes());
        message([identity.clone(), Bytes::new(), topic.clone(), sequence, payload])
    });
    let sequence = Bytes::copy_from_slice(&(-1_i64).to_be_bytes());
    let end = message([identity.clone(), Bytes::new(), Bytes::new(), sequence, Bytes::new()]);
    for message in numbered.chain([end]) {
        if let Err(error) = socket.send(message).await {
            debug!(%error, "cannot replay KV events");
            return;
        }
    }
}
