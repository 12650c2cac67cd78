//! Messages between a router and its successor: JSON with its length before it. Both are this
//! user's programs, but of two versions.

use std::io;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::admission::{UsageChange, UsageLedger};
use crate::response_affinity::ResponseRecord;

/// Version of this protocol. A router gives its place only to one with the same version.
pub(super) const PROTOCOL: u32 = 1;

/// How long the other side may take for immediate steps.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Largest message. The owners of 65,536 responses are about 10 MB.
const MAX_BYTES: u32 = 64 * 1024 * 1024;

/// Messages of a successor, in this order.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromSuccessor {
    Hello {
        protocol: u32,
        version: String,
    },
    /// The successor can accept agents.
    ReadyForAgents,
    /// The successor has the agents.
    ReadyForClients,
    /// The successor accepts clients and has the sockets' names.
    Serving,
}

/// Messages of a predecessor.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromPredecessor {
    Refused(String),
    /// The answer to `Hello`; the listening sockets follow.
    Offer {
        version: String,
        fleet: FleetSummary,
    },
    /// Agents are not accepted here any more, and are told to dial again.
    AgentsAreYours,
    /// The knowledge of this router that agents cannot supply.
    Memory(Memory),
    /// A change of that knowledge, until the predecessor leaves.
    Change(MemoryChange),
}

/// The attached agents, and the models that they serve.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct FleetSummary {
    pub(super) nodes: Vec<String>,
    pub(super) ready_replicas: Vec<ReadyReplica>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ReadyReplica {
    pub(super) id: String,
    pub(super) models: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Memory {
    pub(super) usage: UsageLedger,
    pub(super) responses: Vec<ResponseRecord>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum MemoryChange {
    Usage(UsageChange),
    Response(ResponseRecord),
}

/// Sends a message within [`ANSWER_TIMEOUT`].
pub(super) async fn send(stream: &mut UnixStream, message: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let length = u32::try_from(text.len()).ok().filter(|length| *length <= MAX_BYTES).ok_or(io::ErrorKind::InvalidInput)?;
    let sent = timeout(ANSWER_TIMEOUT, async {
        stream.write_all(&length.to_be_bytes()).await?;
        stream.write_all(&text).await
    });
    sent.await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

/// The other side's next message. A cancelled call must not be repeated.
pub(super) async fn receive<T: DeserializeOwned>(stream: &mut UnixStream) -> io::Result<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).await?;
    let length = u32::from_be_bytes(length);
    if length > MAX_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    // The buffer grows as bytes come, so a length alone costs nothing.
    let mut text = Vec::new();
    stream.take(length.into()).read_to_end(&mut text).await?;
    if text.len() < length as usize {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    serde_json::from_slice(&text).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, format!("of another version: {error}")))
}

/// As `receive`, with a deadline.
pub(super) async fn receive_within<T: DeserializeOwned>(limit: Duration, stream: &mut UnixStream) -> io::Result<T> {
    timeout(limit, receive(stream)).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_truncated_message_is_a_hang_up() {
        let (mut here, mut there) = UnixStream::pair().unwrap();
        there.write_all(&[0, 0, 0, 20]).await.unwrap();
        there.write_all(b"{\"Refused\":").await.unwrap();
        drop(there);
        let error = receive::<FromPredecessor>(&mut here).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{error}");
    }
}
