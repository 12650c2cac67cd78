//! A keeper's end of the connection to an agent.
//!
//! Output that the agent does not read in time is dropped, because the engine must not wait for
//! anybody.

use std::future::pending;
use std::io;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::timeout;

use super::wire::{self, KeeperNotice, KeeperRequest};

/// Bytes that may wait for the agent, beyond which output is dropped.
const MAX_UNSENT_BYTES: usize = 1024 * 1024;

#[derive(Debug)]
pub(super) struct AgentConnection {
    reader: OwnedReadHalf,
    input: BytesMut,
    writer: OwnedWriteHalf,
    out: BytesMut,
    /// Bytes of output that were dropped and not yet reported.
    lost_bytes: usize,
}

pub(super) struct AgentReader<'a>(&'a mut OwnedReadHalf, &'a mut BytesMut);

pub(super) struct AgentWriter<'a>(&'a mut OwnedWriteHalf, &'a mut BytesMut);

impl AgentConnection {
    pub(super) fn new(stream: std::os::unix::net::UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self::of(UnixStream::from_std(stream)?))
    }

    pub(super) fn of(stream: UnixStream) -> Self {
        let (reader, writer) = stream.into_split();
        Self { reader, input: BytesMut::new(), writer, out: BytesMut::new(), lost_bytes: 0 }
    }

    /// Both halves, to wait for at the same time.
    pub(super) fn split(&mut self) -> (AgentReader<'_>, AgentWriter<'_>) {
        (AgentReader(&mut self.reader, &mut self.input), AgentWriter(&mut self.writer, &mut self.out))
    }

    /// Queues a notice. Notices are few and short.
    pub(super) fn queue_notice(&mut self, notice: &KeeperNotice) {
        wire::write_message(notice, &mut self.out);
    }

    /// Queues output, unless too much waits already.
    pub(super) fn queue_output(&mut self, piece: &[u8]) {
        if self.out.len() + piece.len() > MAX_UNSENT_BYTES {
            self.lost_bytes += piece.len();
            return;
        }
        if self.lost_bytes > 0 {
            let lost = std::mem::take(&mut self.lost_bytes);
            self.queue_notice(&KeeperNotice::Lost(lost));
        }
        wire::write_output(piece, &mut self.out);
    }

    /// Sends the queued bytes, if the agent reads them within the limit.
    pub(super) async fn flush(&mut self, limit: Duration) {
        // An agent that is gone needs nothing any more.
        let _ = timeout(limit, self.writer.write_all_buf(&mut self.out)).await;
    }
}

impl AgentWriter<'_> {
    pub(super) fn has_work(&self) -> bool {
        !self.1.is_empty()
    }
}

/// Reads the agent's next request; `None` once the agent is gone.
///
/// Never resolves without an agent. Loses nothing when dropped.
pub(super) async fn read_request(reader: Option<AgentReader<'_>>) -> io::Result<Option<KeeperRequest>> {
    let Some(AgentReader(reader, input)) = reader else { return pending().await };
    loop {
        if let Some(request) = wire::parse_request(input)? {
            return Ok(Some(request));
        }
        if reader.read_buf(input).await? == 0 {
            return Ok(None);
        }
    }
}

/// Sends some of the queued bytes. Loses nothing when dropped.
pub(super) async fn write_queued(writer: Option<AgentWriter<'_>>) -> io::Result<()> {
    let Some(AgentWriter(writer, out)) = writer else { return pending().await };
    writer.write_buf(out).await.map(|_| ())
}
