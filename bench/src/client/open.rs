//! A connection to a target with its request: the unsent part, and the end of its answer.
//!
//! The task that waits for the answer sends and reads by itself, so an event costs one wake, and
//! events are examined where they were read.

use std::future::poll_fn;
use std::io::IoSlice;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use hostler_http1::{BodyFraming, Connection, Framing, Header, HttpError, Stream};
use http::StatusCode;

/// An open connection. Dropping it closes it, and the target stops answering.
pub(super) struct Open {
    connection: Connection,
    /// Unsent parts of the request's head and body.
    unsent: [Bytes; 2],
    /// Framing of the rest of the answer, and whether another may follow.
    body: BodyFraming,
    /// Number of bytes read before the request began.
    heard_before: u64,
}

impl Open {
    pub(super) fn new(stream: Stream) -> Self {
        let body = BodyFraming { framing: Framing::Complete, keeps_alive: true };
        Self { connection: Connection::new(stream), unsent: Default::default(), body, heard_before: 0 }
    }

    /// Whether another request may use this connection: the previous answer was read to its end,
    /// and the target has not closed it since.
    pub(super) fn is_free(&mut self) -> bool {
        self.body.keeps_alive && self.body.framing == Framing::Complete && self.is_sent() && self.connection.is_idle()
    }

    /// Whether the target has sent nothing for the request, not even a part of a head.
    pub(super) fn is_silent(&self) -> bool {
        self.connection.bytes_read() == self.heard_before
    }

    /// Sends a request; its answer may begin before all of it has been sent.
    ///
    /// `keep` selects the headers to keep of the answer.
    pub(super) async fn ask<H>(
        &mut self,
        head: Bytes,
        body: Bytes,
        keep: impl Fn(&[Header<'_>]) -> H,
    ) -> Result<(StatusCode, H), HttpError> {
        self.unsent = [head, body];
        self.heard_before = self.connection.bytes_read();
        let ((status, kept), body) = poll_fn(|context| {
            self.send(context);
            self.connection.poll_head(context, false, |status, headers| (status, keep(headers)))
        })
        .await?;
        // A target that answered before it had the whole request may or may not close the
        // connection.
        self.body = BodyFraming { keeps_alive: self.body.keeps_alive && body.keeps_alive, ..body };
        let status = StatusCode::from_u16(status).map_err(|_| HttpError::Malformed("its status is none"))?;
        Ok((status, kept))
    }

    /// Waits for the next piece of the answer and calls `look` with it; `None` after the last.
    pub(super) async fn piece<T>(&mut self, mut look: impl FnMut(&[u8]) -> T) -> Result<Option<T>, HttpError> {
        poll_fn(|context| {
            self.send(context);
            self.connection.poll_piece(context, &mut self.body.framing, |read, length| {
                let seen = look(&read[..length]);
                read.advance(length);
                seen
            })
        })
        .await
    }

    fn is_sent(&self) -> bool {
        self.unsent.iter().all(Bytes::is_empty)
    }

    fn send(&mut self, context: &mut Context<'_>) {
        if let Poll::Ready(Err(_)) = self.poll_send(context) {
            // A target that does not want the rest may answer and close. Its answer, or the lack of
            // one, can still be read.
            self.unsent = Default::default();
            self.body.keeps_alive = false;
        }
    }

    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<Result<(), HttpError>> {
        while !self.is_sent() {
            let slices = self.unsent.each_ref().map(|part| IoSlice::new(part));
            let mut written = ready!(self.connection.poll_write(context, &slices))?;
            for part in &mut self.unsent {
                let taken = written.min(part.len());
                part.advance(taken);
                written -= taken;
            }
        }
        Poll::Ready(Ok(()))
    }
}
