//! One connection: the socket, and the bytes that were read but not yet taken.

use std::io::{self, ErrorKind, IoSlice};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker, ready};

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use crate::head::{self, BodyFraming};
use crate::{Framing, Header, HttpError};

/// Minimum size of a read in bytes: more than the events of one engine step.
const MIN_READ_BYTES: usize = 8 * 1024;

/// Maximum size of a read. Reads of a large answer double in size up to this.
const MAX_READ_BYTES: usize = 64 * 1024;

/// A socket of either kind.
#[derive(Debug)]
pub enum Stream {
    /// Socket to another host, or this one.
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// Runs the same expression for either kind of socket.
macro_rules! either {
    ($stream:expr, $socket:ident => $done:expr) => {
        match $stream {
            Stream::Tcp($socket) => $done,
            Stream::Unix($socket) => $done,
        }
    };
}

/// One connection, for one request at a time. Dropping it closes it.
#[derive(Debug)]
pub struct Connection {
    stream: Stream,
    /// Read buffer, which holds no memory while it is empty.
    buffer: BytesMut,
    next_read_bytes: usize,
    bytes_read: u64,
}

impl Connection {
    #[must_use]
    pub fn new(stream: Stream) -> Self {
        Self { stream, buffer: BytesMut::new(), next_read_bytes: MIN_READ_BYTES, bytes_read: 0 }
    }

    /// Polls for the head of the next answer, as `keep` keeps it, and the framing of its body.
    ///
    /// `is_head` means that the request was HEAD.
    ///
    /// # Errors
    ///
    /// When none will come.
    pub fn poll_head<H>(
        &mut self,
        context: &mut Context<'_>,
        is_head: bool,
        keep: impl Fn(u16, &[Header<'_>]) -> H,
    ) -> Poll<Result<(H, BodyFraming), HttpError>> {
        loop {
            if let Some(head) = head::parse_head(&mut self.buffer, is_head, &keep)? {
                return Poll::Ready(Ok(head));
            }
            if !ready!(self.poll_read(context))? {
                return Poll::Ready(Err(HttpError::Closed));
            }
        }
    }

    /// Polls for the next piece of a body, or of a chunk, at the beginning of the read buffer.
    ///
    /// `take` must take out exactly the given number of bytes. `None` after the last piece.
    ///
    /// # Errors
    ///
    /// When the rest of the body will not come.
    pub fn poll_piece<T>(
        &mut self,
        context: &mut Context<'_>,
        framing: &mut Framing,
        take: impl FnOnce(&mut BytesMut, usize) -> T,
    ) -> Poll<Result<Option<T>, HttpError>> {
        loop {
            if let Some(length) = framing.next_piece_bytes(&mut self.buffer)? {
                return Poll::Ready(Ok(Some(take(&mut self.buffer, length))));
            }
            if *framing == Framing::Complete {
                return Poll::Ready(Ok(None));
            }
            if !ready!(self.poll_read(context))? {
                framing.close()?;
            }
        }
    }

    /// Reads the available bytes; `false` if the other side has closed the connection.
    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<Result<bool, HttpError>> {
        self.release_buffer();
        // Allocate memory only when there is something to read: allocating 8 KiB that were just
        // freed costs next to nothing.
        ready!(either!(&self.stream, socket => socket.poll_read_ready(context)))?;
        self.buffer.reserve(self.next_read_bytes);
        let room = self.buffer.capacity() - self.buffer.len();
        let Poll::Ready(read) = either!(&mut self.stream, socket => pin!(socket.read_buf(&mut self.buffer)).poll(context)) else {
            self.release_buffer();
            return Poll::Pending;
        };
        let read = read?;
        self.bytes_read += read as u64;
        self.next_read_bytes = if read == room { MAX_READ_BYTES.min(2 * room) } else { MIN_READ_BYTES };
        Poll::Ready(Ok(read > 0))
    }

    /// Writes as much as the socket takes now, and returns the number of bytes.
    ///
    /// # Errors
    ///
    /// When the connection has ended.
    pub fn poll_write(&mut self, context: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<Result<usize, HttpError>> {
        let written = ready!(either!(&mut self.stream, socket => Pin::new(socket).poll_write_vectored(context, slices)))?;
        Poll::Ready(if written == 0 { Err(HttpError::Closed) } else { Ok(written) })
    }

    /// Whether the connection has no unread bytes and has not ended.
    ///
    /// It will no longer wake the task that used it.
    pub fn is_idle(&mut self) -> bool {
        // The result does not count: tokio's budget makes it pending if this task has done much
        // already.
        let _ = either!(&self.stream, socket => socket.poll_read_ready(&mut Context::from_waker(Waker::noop())));
        self.is_buffer_empty() && matches!(self.try_read(), Err(error) if error.kind() == ErrorKind::WouldBlock)
    }

    fn try_read(&mut self) -> io::Result<usize> {
        either!(&self.stream, socket => socket.try_read(&mut [0]))
    }

    /// Bytes read since the connection was opened.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read
    }

    #[must_use]
    pub fn is_buffer_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Frees the read buffer if it is empty.
    pub fn release_buffer(&mut self) {
        if self.buffer.is_empty() {
            self.buffer = BytesMut::new();
        }
    }
}
