//! A client's connection with two writers: the HTTP library, and, while that waits for more of an
//! answer, the task that has the next piece.
//!
//! An event of a stream has about 250 bytes. Waking the connection's task for each event, which
//! polls down through the library to the socket, costs as much as the kernel's work to send it. So
//! the task that reads an agent's lane writes the event itself, as a chunk of HTTP/1.1, if nothing
//! is ahead of it. Clients that do not keep up, TLS and HTTP/2 take the long way.
//! docs/decisions/0010 has the figures.
//!
//! The library's own bytes and these never mix. An outlet is free only after the library has
//! flushed all that it had, and no longer once the relay gives the library something.

use std::io::{self, ErrorKind, IoSlice, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use hostler_tls::Stream;
use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

/// Largest chunk that is copied together with its frame, which is cheaper than a vectored write of
/// three parts.
const MAX_COPIED_BYTES: usize = 1024;

/// Most bytes of a chunk's head: the length in hexadecimal, and the line end.
const MAX_CHUNK_HEAD_BYTES: usize = 18;

/// The write side of a plain-text connection.
#[derive(Debug)]
pub(crate) struct DirectWriter {
    socket: OwnedWriteHalf,
    state: Mutex<DirectWriterState>,
}

#[derive(Debug, Default)]
struct DirectWriterState {
    /// The HTTP library has nothing left to write.
    is_idle: bool,
    /// The part of a chunk that the socket did not take, sent before everything that follows.
    unsent: Bytes,
}

impl DirectWriter {
    /// Splits a connection into its two sides. Direct writing begins after the first flush.
    pub(crate) fn split(socket: TcpStream) -> (OwnedReadHalf, Arc<Self>) {
        let (read, socket) = socket.into_split();
        (read, Arc::new(Self { socket, state: Mutex::default() }))
    }

    /// Ready once all earlier bytes are written and the HTTP library has nothing left to write.
    pub(crate) fn poll_flush(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_unsent(context))?.is_idle = true;
        Poll::Ready(Ok(()))
    }

    /// Records that the HTTP library is about to get something to write.
    pub(crate) fn mark_busy(&self) {
        self.state.lock().is_idle = false;
    }

    /// The right to write a chunk now; `None` while something else goes first.
    pub(crate) fn try_acquire(&self) -> Option<DirectWriteGuard<'_>> {
        let state = self.state.lock();
        state.is_idle.then_some(DirectWriteGuard { socket: &self.socket, state })
    }

    /// Writes the rest of a chunk. Nothing comes between until the guard is dropped.
    fn poll_unsent(&self, context: &mut Context<'_>) -> Poll<io::Result<MutexGuard<'_, DirectWriterState>>> {
        let mut state = self.state.lock();
        while !state.unsent.is_empty() {
            let written = ready!(self.poll_write_with(context, || self.socket.try_write(&state.unsent)))?;
            if written == 0 {
                return Poll::Ready(Err(ErrorKind::WriteZero.into()));
            }
            state.unsent.advance(written);
        }
        Poll::Ready(Ok(state))
    }

    /// Repeats `attempt` whenever the socket becomes writable.
    fn poll_write_with(&self, context: &mut Context<'_>, attempt: impl Fn() -> io::Result<usize>) -> Poll<io::Result<usize>> {
        loop {
            match attempt() {
                Err(error) if error.kind() == ErrorKind::WouldBlock => ready!(self.socket.as_ref().poll_write_ready(context))?,
                done => return Poll::Ready(done),
            }
        }
    }
}

pub(crate) struct DirectWriteGuard<'a> {
    socket: &'a OwnedWriteHalf,
    state: MutexGuard<'a, DirectWriterState>,
}

impl DirectWriteGuard<'_> {
    /// Writes `bytes` and `end`, which must not both be empty, as one chunk of HTTP/1.1.
    ///
    /// `false` if the socket does not take all of it: the connection's task must then be woken to
    /// write the rest.
    pub(crate) fn write_chunk(mut self, bytes: &[u8], end: &[u8]) -> bool {
        let mut head = [0; MAX_CHUNK_HEAD_BYTES];
        let mut free = &mut head[..];
        // The buffer has room for any length.
        let _ = write!(free, "{:X}\r\n", bytes.len() + end.len());
        let unused = free.len();
        let head = &head[..MAX_CHUNK_HEAD_BYTES - unused];
        let length = head.len() + bytes.len() + end.len() + 2;
        let written = if length <= MAX_COPIED_BYTES {
            let mut copied = [0; MAX_COPIED_BYTES];
            copied[..head.len()].copy_from_slice(head);
            let end_at = head.len() + bytes.len();
            copied[head.len()..end_at].copy_from_slice(bytes);
            copied[end_at..length - 2].copy_from_slice(end);
            copied[length - 2..length].copy_from_slice(b"\r\n");
            self.socket.try_write(&copied[..length])
        } else {
            self.socket.try_write_vectored(&[IoSlice::new(head), IoSlice::new(bytes), IoSlice::new(end), IoSlice::new(b"\r\n")])
        };
        // The connection's task will meet the same socket error.
        let written = written.unwrap_or(0);
        if written == length {
            return true;
        }
        self.state.unsent = [head, bytes, end, b"\r\n"].concat().into();
        self.state.unsent.advance(written);
        self.state.is_idle = false;
        false
    }
}

/// A client's connection, as the HTTP library reads and writes it.
#[derive(Debug)]
pub(crate) enum ClientStream {
    Plain(OwnedReadHalf, Arc<DirectWriter>),
    /// Only the HTTP library may write.
    Tls(Box<Stream>),
}

impl ClientStream {
    pub(crate) fn new(stream: Stream) -> Self {
        match stream {
            Stream::Plain(socket) => {
                let (read, outlet) = DirectWriter::split(socket);
                Self::Plain(read, outlet)
            }
            tls @ Stream::Tls(_) => Self::Tls(Box::new(tls)),
        }
    }

    /// `None` with TLS.
    pub(crate) fn direct_writer(&self) -> Option<Arc<DirectWriter>> {
        match self {
            Self::Plain(_, outlet) => Some(outlet.clone()),
            Self::Tls(_) => None,
        }
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(read, _) => Pin::new(read).poll_read(context, buffer),
            Self::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(_, outlet) => {
                ready!(outlet.poll_unsent(context))?.is_idle = false;
                outlet.poll_write_with(context, || outlet.socket.try_write(bytes))
            }
            Self::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(self: Pin<&mut Self>, context: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(_, outlet) => {
                ready!(outlet.poll_unsent(context))?.is_idle = false;
                outlet.poll_write_with(context, || outlet.socket.try_write_vectored(slices))
            }
            Self::Tls(stream) => Pin::new(stream).poll_write_vectored(context, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(..) => true,
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    /// The library calls this when it has nothing left to write.
    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(_, outlet) => outlet.poll_flush(context),
            Self::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(_, outlet) => {
                ready!(outlet.poll_unsent(context))?.is_idle = false;
                Poll::Ready(match shutdown(outlet.socket.as_ref(), Shutdown::Write) {
                    // The client is gone already.
                    Ok(()) | Err(Errno::NOTCONN) => Ok(()),
                    Err(error) => Err(error.into()),
                })
            }
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
mod tests;
