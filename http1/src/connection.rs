//! One connection: the socket, and what has been read of it and not been taken.

use std::io::{self, ErrorKind, IoSlice};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker, ready};

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use crate::head::{self, BodyFraming};
use crate::{Framing, Header, HttpError};

/// The least that is read at once: more than the events of a step.
const MIN_READ_BYTES: usize = 8 * 1024;

/// The most. A large answer is read in steps that double up to this.
const MAX_READ_BYTES: usize = 64 * 1024;

/// A socket of either kind.
#[derive(Debug)]
pub enum Stream {
    /// To another host, or this one.
    Tcp(TcpStream),
    /// To this host.
    Unix(UnixStream),
}

/// The same to do with a socket of either kind.
macro_rules! either {
    ($stream:expr, $socket:ident => $done:expr) => {
        match $stream {
            Stream::Tcp($socket) => $done,
            Stream::Unix($socket) => $done,
        }
    };
}

/// One connection, for one request at a time. Dropped, it is closed.
#[derive(Debug)]
pub struct Connection {
    stream: Stream,
    /// It holds no memory while nothing is there.
    buffer: BytesMut,
    next_read_bytes: usize,
    bytes_read: u64,
}

impl Connection {
    /// One on which nothing has been sent.
    #[must_use]
    pub fn new(stream: Stream) -> Self {
        Self { stream, buffer: BytesMut::new(), next_read_bytes: MIN_READ_BYTES, bytes_read: 0 }
    }

    /// The head of the next answer, of which `keep` keeps what is wanted, and what it says about the body. `is_head`: only a head was asked for.
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

    /// The next piece of a body, a chunk where it has chunks, handed over at the beginning of what was read: `take` takes exactly so many bytes out.
    /// Nothing after the last piece.
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

    /// Reads what has come; `false` when the other side has closed the connection.
    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<Result<bool, HttpError>> {
        self.release_buffer();
        // Memory is there only for what is too: allocating 8 KiB that was freed a moment ago costs next to nothing.
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

    /// Writes what goes at once, and says how many bytes that was.
    ///
    /// # Errors
    ///
    /// When the connection has ended.
    pub fn poll_write(&mut self, context: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<Result<usize, HttpError>> {
        let written = ready!(either!(&mut self.stream, socket => Pin::new(socket).poll_write_vectored(context, slices)))?;
        Poll::Ready(if written == 0 { Err(HttpError::Closed) } else { Ok(written) })
    }

    /// Whether nothing has come that was not taken, not even an end. The task that used the connection is woken by it no more.
    pub fn is_idle(&mut self) -> bool {
        // Its answer does not count: it says nothing when this task has done much already.
        let _ = either!(&self.stream, socket => socket.poll_read_ready(&mut Context::from_waker(Waker::noop())));
        self.is_buffer_empty() && matches!(self.try_read(), Err(error) if error.kind() == ErrorKind::WouldBlock)
    }

    fn try_read(&mut self) -> io::Result<usize> {
        either!(&self.stream, socket => socket.try_read(&mut [0]))
    }

    /// All that was ever read.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read
    }

    /// Whether all that was read has been taken.
    #[must_use]
    pub fn is_buffer_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Gives back the memory for what is read, if nothing is there.
    pub fn release_buffer(&mut self) {
        if self.buffer.is_empty() {
            self.buffer = BytesMut::new();
        }
    }
}
