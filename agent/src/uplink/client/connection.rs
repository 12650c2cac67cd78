//! One connection to an engine: the socket, and what has been read of it and not been taken.

use std::future::poll_fn;
use std::io::{ErrorKind, IoSlice};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker, ready};

use bytes::BytesMut;
use hostler_proto::agent::v1::ResponseHead;
use tokio::io::{AsyncReadExt, AsyncWrite};
use tokio::net::UnixStream;

use super::RequestError;
use super::head::{self, Body, Head};
use super::outgoing::Outgoing;

/// The least that is read at once: more than the events of a step.
const LEAST_READ: usize = 8 * 1024;

/// The most. A large answer is read in steps that double up to this.
const MOST_READ: usize = 64 * 1024;

/// One connection, for one request at a time. Dropped, it is closed.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    /// It holds no memory while nothing is there.
    pub(super) read: BytesMut,
    next_read: usize,
}

impl Connection {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self { stream, read: BytesMut::new(), next_read: LEAST_READ }
    }

    /// Sends a request, of which some may be left when the answer begins.
    pub(super) async fn ask(&mut self, outgoing: &mut Outgoing, sent: &mut impl FnMut()) -> Result<(ResponseHead, Body), RequestError> {
        poll_fn(|context| {
            let sending = outgoing.poll_send(self, context);
            if matches!(sending, Poll::Ready(Ok(()))) {
                sent();
            }
            let broken = match sending {
                // What the router broke off is no request.
                Poll::Ready(Err(error @ RequestError::Request(_))) => return Poll::Ready(Err(error)),
                // An engine that closes while we write may have answered before: either that or the end is there to be read.
                Poll::Ready(Err(error)) => Some(error),
                _ => None,
            };
            let head = ready!(self.poll_head(context, outgoing.is_head())).map_err(|error| broken.unwrap_or(error))?;
            sent();
            Poll::Ready(Ok((head.head, head.body)))
        })
        .await
    }

    fn poll_head(&mut self, context: &mut Context<'_>, is_head: bool) -> Poll<Result<Head, RequestError>> {
        loop {
            if let Some(head) = head::take(&mut self.read, is_head)? {
                return Poll::Ready(Ok(head));
            }
            if !ready!(self.poll_read(context))? {
                return Poll::Ready(Err(RequestError::Closed));
            }
        }
    }

    /// Reads what has come; `false` when the engine has closed the connection.
    pub(super) fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<Result<bool, RequestError>> {
        self.release();
        // Memory is there only for what is too: allocating 8 KiB that was freed a moment ago costs next to nothing.
        ready!(self.stream.poll_read_ready(context))?;
        self.read.reserve(self.next_read);
        let room = self.read.capacity() - self.read.len();
        let Poll::Ready(read) = pin!(self.stream.read_buf(&mut self.read)).poll(context) else {
            self.release();
            return Poll::Pending;
        };
        let read = read?;
        self.next_read = if read == room { MOST_READ.min(2 * room) } else { LEAST_READ };
        Poll::Ready(Ok(read > 0))
    }

    pub(super) fn poll_write(&mut self, context: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<Result<usize, RequestError>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(context, slices))?;
        Poll::Ready(if written == 0 { Err(RequestError::Closed) } else { Ok(written) })
    }

    /// Whether nothing has come, not even an end. The task that used the connection is woken by it no more.
    pub(super) fn is_quiet(&mut self) -> bool {
        // Its answer does not count: it says nothing when this task has done much already.
        let _ = self.stream.poll_read_ready(&mut Context::from_waker(Waker::noop()));
        self.read.is_empty() && matches!(self.stream.try_read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock)
    }

    /// Gives back the memory for what is read, if nothing is there.
    pub(super) fn release(&mut self) {
        if self.read.is_empty() {
            self.read = BytesMut::new();
        }
    }
}
