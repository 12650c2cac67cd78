//! Protocol between the agents of one replica: frames of JSON on a connection that members open to
//! their head.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use hostler_tls::Stream;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{ReadHalf, WriteHalf};
use tokio::time::timeout;
use tokio_util::codec::{FramedRead, FramedWrite, LengthDelimitedCodec};

use super::setup::PartSetup;

/// Version of the protocol. Agents of one replica are of one build, so it only tells others off.
pub(crate) const PROTOCOL: u32 = 1;

/// Time for the kernel to take a message.
pub(super) const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest frame, in bytes. A setup with all its arguments has some kilobytes.
const MAX_FRAME_BYTES: usize = 256 * 1024;

/// Most characters of a text that is logged or shown.
const MAX_TEXT: usize = 500;

/// Most GPUs of a node that are named.
const MAX_GPUS: usize = 64;

/// Most of an engine's output in one message, in bytes.
pub(crate) const MAX_OUTPUT_BYTES: usize = 64 * 1024;

/// Message of a member to its head.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum MemberMessage {
    /// First of all.
    Hello(Hello),
    /// The member can start its part of this epoch, or cannot for the reason in `refusal`.
    Prepared { epoch: u64, setup: Box<PartSetup>, refusal: Option<String> },
    /// Lines that the member's part has printed.
    Output { epoch: u64, lines: String },
    /// The member's part has ended although nobody had asked it to.
    Ended { epoch: u64, end: PartEnd },
    /// No process of any part is left on the member's node.
    Empty,
    /// Said every second.
    Beat(PartActivity),
    /// The member has to go, for this reason. It keeps its part until the head lets it go.
    Leaving(String),
}

/// Who a member is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) protocol: u32,
    /// Version of the agent program.
    pub(crate) version: String,
    pub(crate) node: String,
    pub(crate) host: String,
    /// Number of the node in the replica, from 1.
    pub(crate) number: u32,
    /// Random number of this life of the agent.
    pub(crate) life: u64,
    /// Names of the GPUs that the member's part has.
    pub(crate) gpus: Vec<String>,
    /// Epoch whose part has processes there.
    pub(crate) epoch: Option<u64>,
}

/// Cause of the end of a member's part, as the agent there has found out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PartEnd {
    /// Kind of the failure, see `FailureKind::as_str`.
    pub(crate) kind: String,
    pub(crate) cause: String,
    pub(crate) remedy: String,
    /// Somebody else has killed it, so no request is to blame.
    pub(crate) is_outside_kill: bool,
}

/// Activity of the processes of a member's part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum PartActivity {
    /// There is none.
    Absent,
    /// This process was stopped.
    Stopped(String),
    Computing,
    Idle,
}

/// Message of the head to a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum HeadMessage {
    /// Answer to `Hello`.
    Welcome {
        lease_ms: u64,
    },
    /// The member is not taken in, for this reason.
    Refused(String),
    Prepare {
        epoch: u64,
    },
    /// Start the part of this epoch; the engine's processes meet there.
    Start {
        epoch: u64,
        address: String,
        port: u16,
    },
    /// The engine of this epoch serves.
    Served {
        epoch: u64,
    },
    /// Kill whatever runs.
    Kill,
    /// Said every second.
    Beat,
    /// The replica has ended for good.
    Leave(String),
}

impl Hello {
    /// The same with texts that fit a log.
    pub(crate) fn bounded(self) -> Self {
        let gpus = self.gpus.iter().take(MAX_GPUS).map(|name| bounded(name)).collect();
        Self { version: bounded(&self.version), node: bounded(&self.node), host: bounded(&self.host), gpus, ..self }
    }
}

impl PartEnd {
    /// The same with texts that fit a log.
    pub(crate) fn bounded(self) -> Self {
        Self { kind: bounded(&self.kind), cause: bounded(&self.cause), remedy: bounded(&self.remedy), ..self }
    }
}

/// A text of another node in one line of a log: cut, and without control characters.
pub(crate) fn bounded(text: &str) -> String {
    text.chars().take(MAX_TEXT).map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

/// The end of a connection that reads.
pub(crate) struct MessageReader(FramedRead<ReadHalf<Stream>, LengthDelimitedCodec>);

/// The end of a connection that writes.
pub(crate) struct MessageWriter(FramedWrite<WriteHalf<Stream>, LengthDelimitedCodec>);

/// Divides a connection into its two ends.
pub(crate) fn split(stream: Stream) -> (MessageReader, MessageWriter) {
    let codec = LengthDelimitedCodec::builder().max_frame_length(MAX_FRAME_BYTES).new_codec();
    let (reader, writer) = tokio::io::split(stream);
    (MessageReader(FramedRead::new(reader, codec.clone())), MessageWriter(FramedWrite::new(writer, codec)))
}

impl MessageReader {
    /// Next message; `None` once the peer has closed the connection.
    pub(crate) async fn next<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let Some(frame) = self.0.next().await.transpose()? else { return Ok(None) };
        Ok(Some(serde_json::from_slice(&frame)?))
    }
}

impl MessageWriter {
    /// Sends a message.
    ///
    /// # Errors
    /// When the connection has ended, or has taken nothing for 10 s.
    pub(crate) async fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        let sent = timeout(SEND_TIMEOUT, self.0.send(Bytes::from(serde_json::to_vec(message)?))).await;
        sent.map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "it takes no message"))?
    }
}
