//! Counts of events at the agents of a fleet.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use tonic::Status;

#[derive(Debug, Default)]
pub struct Tally {
    attached: Arc<AtomicU32>,
    pub(crate) attempts: AtomicU64,
    traffic: Arc<Traffic>,
}

#[derive(Debug, Default)]
pub struct Traffic {
    pub up: AtomicU64,
    pub down: AtomicU64,
}

impl Tally {
    /// Agents that are attached, with all their lanes.
    #[must_use]
    pub fn attached_now(&self) -> u32 {
        self.attached.load(Ordering::Relaxed)
    }

    #[must_use]
    pub fn attempts(&self) -> u64 {
        self.attempts.load(Ordering::Relaxed)
    }

    /// Bytes to the router and from it.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.traffic.up.load(Ordering::Relaxed), self.traffic.down.load(Ordering::Relaxed))
    }

    pub(crate) fn traffic(&self) -> Arc<Traffic> {
        self.traffic.clone()
    }

    /// Counts an attachment until the guard is dropped.
    pub(crate) fn attached(&self) -> AttachmentGuard {
        self.attached.fetch_add(1, Ordering::Relaxed);
        AttachmentGuard(self.attached.clone())
    }

    /// Records that an attachment has ended, or failed to begin.
    pub(crate) fn note(&self, node: &str, ended: &Status) {
        tracing::debug!(node, %ended, "not attached");
    }
}

/// Guard of [`Tally::attached`].
pub(crate) struct AttachmentGuard(Arc<AtomicU32>);

impl Drop for AttachmentGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection whose bytes are counted.
#[derive(Debug)]
pub(crate) struct CountedStream {
    pub(crate) stream: TcpStream,
    pub(crate) traffic: Arc<Traffic>,
}

impl CountedStream {
    fn sent(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(bytes)) = written {
            self.traffic.up.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        written
    }
}

impl AsyncRead for CountedStream {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.traffic.down.fetch_add((buffer.filled().len() - before) as u64, Ordering::Relaxed);
        read
    }
}

impl AsyncWrite for CountedStream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.sent(written)
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, context: &mut Context<'_>, slices: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.sent(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
