//! A keeper's end of the connection to an agent. What the agent does not read in time is dropped, if it is output: the engine must not wait for anybody.

use std::future::pending;
use std::io;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::timeout;

use super::wire::{self, Notice, Order, Request};

/// Bytes waiting for the agent, beyond which output is dropped.
const OUT_CAP: usize = 1024 * 1024;

/// One agent.
#[derive(Debug)]
pub(super) struct Peer {
    reader: OwnedReadHalf,
    input: BytesMut,
    writer: OwnedWriteHalf,
    out: BytesMut,
    /// Bytes of output that were dropped and not yet told.
    lost: usize,
}

/// The reading half.
pub(super) struct Reader<'a>(&'a mut OwnedReadHalf, &'a mut BytesMut);

/// The writing half.
pub(super) struct Writer<'a>(&'a mut OwnedWriteHalf, &'a mut BytesMut);

impl Peer {
    /// The agent at the other end of a connected stream.
    pub(super) fn new(stream: std::os::unix::net::UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self::of(UnixStream::from_std(stream)?))
    }

    /// The agent at the other end of a stream.
    pub(super) fn of(stream: UnixStream) -> Self {
        let (reader, writer) = stream.into_split();
        Self { reader, input: BytesMut::new(), writer, out: BytesMut::new(), lost: 0 }
    }

    /// Both halves, to be waited for at the same time.
    pub(super) fn halves(&mut self) -> (Reader<'_>, Writer<'_>) {
        (Reader(&mut self.reader, &mut self.input), Writer(&mut self.writer, &mut self.out))
    }

    /// Queues words. They are few and short.
    pub(super) fn say(&mut self, notice: &Notice) {
        wire::put(notice, &mut self.out);
    }

    /// Queues output, unless too much waits already.
    pub(super) fn print(&mut self, piece: &[u8]) {
        if self.out.len() + piece.len() > OUT_CAP {
            self.lost += piece.len();
            return;
        }
        if self.lost > 0 {
            let lost = std::mem::take(&mut self.lost);
            self.say(&Notice::Lost(lost));
        }
        wire::put_output(piece, &mut self.out);
    }

    /// Waits for the order that begins everything.
    pub(super) async fn order(&mut self) -> io::Result<Order> {
        let (reader, _) = self.halves();
        match requested(Some(reader)).await? {
            Some(Request::Start(order)) => Ok(*order),
            other => Err(io::Error::new(io::ErrorKind::InvalidData, format!("{other:?} is no order"))),
        }
    }

    /// Sends what is queued, if the agent reads it within the limit.
    pub(super) async fn flush(&mut self, limit: Duration) {
        // An agent that has gone needs nothing any more.
        let _ = timeout(limit, self.writer.write_all_buf(&mut self.out)).await;
    }
}

impl Writer<'_> {
    /// Whether anything is queued.
    pub(super) fn has_work(&self) -> bool {
        !self.1.is_empty()
    }
}

/// The agent's next request; `None` when it has gone. Never without an agent. Loses nothing when it is dropped.
pub(super) async fn requested(reader: Option<Reader<'_>>) -> io::Result<Option<Request>> {
    let Some(Reader(reader, input)) = reader else { return pending().await };
    loop {
        if let Some(request) = wire::request(input)? {
            return Ok(Some(request));
        }
        if reader.read_buf(input).await? == 0 {
            return Ok(None);
        }
    }
}

/// Sends some of what is queued. Loses nothing when it is dropped.
pub(super) async fn sent(writer: Option<Writer<'_>>) -> io::Result<()> {
    let Some(Writer(writer, out)) = writer else { return pending().await };
    writer.write_buf(out).await.map(|_| ())
}
