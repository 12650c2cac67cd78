//! The body of an answer on its way from the engine, on its connection.

use std::convert::Infallible;
use std::future::poll_fn;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use hostler_http1::{BodyFraming, Connection, Framing};

use super::outgoing::OutgoingRequest;
use super::{EngineClient, RequestError};

/// Pieces up to this size, such as events, are copied out of the read buffer.
///
/// Otherwise a piece would hold the whole buffer until it has left, and each event of a step would
/// need its own buffer. Getting those buffers from the operating system cost a fifth of the agent's
/// work for an event.
const MAX_COPIED_BYTES: usize = 2048;

/// The body of an answer. Dropped before its end, it closes the connection.
#[derive(Debug)]
pub(crate) struct EngineResponse<'a> {
    client: &'a EngineClient,
    connection: Connection,
    body: BodyFraming,
    /// Rest of the request, if the engine answers before it has all of it.
    unsent_request: Option<Box<OutgoingRequest>>,
    /// Why the router broke off the request.
    request_error: Option<RequestError>,
}

impl<'a> EngineResponse<'a> {
    pub(super) fn new(client: &'a EngineClient, connection: Connection, outgoing: OutgoingRequest, body: BodyFraming) -> Self {
        let rest = (!outgoing.is_sent()).then(|| Box::new(outgoing));
        Self { client, connection, body, unsent_request: rest, request_error: None }
    }

    /// Next piece, which is a chunk if the answer has chunks; `None` after the last.
    pub(crate) async fn next_chunk(&mut self) -> Option<Result<Bytes, RequestError>> {
        poll_fn(|context| self.poll_chunk(context).map(Result::transpose)).await
    }

    fn poll_chunk(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, RequestError>> {
        self.send(context);
        // Otherwise the engine would wait for the rest of the request and never end its answer.
        if let Some(broken) = self.request_error.take() {
            return Poll::Ready(Err(broken));
        }
        Poll::Ready(Ok(ready!(self.connection.poll_piece(context, &mut self.body.framing, copy_out))?))
    }

    /// Whether the last piece has arrived, as far as is known without reading on.
    pub(crate) fn is_complete(&self) -> bool {
        self.body.framing == Framing::Complete
    }

    /// Continues to send the request while nobody takes the answer.
    pub(crate) async fn keep_sending(&mut self) -> Infallible {
        poll_fn(|context| {
            self.send(context);
            Poll::Pending
        })
        .await
    }

    /// Returns the connection for reuse, after the whole answer was read.
    pub(crate) fn recycle(self) {
        if self.body.keeps_alive && self.unsent_request.is_none() {
            self.client.put_back(self.connection);
        }
    }

    fn send(&mut self, context: &mut Context<'_>) {
        let Some(rest) = &mut self.unsent_request else { return };
        if let Poll::Ready(sent) = rest.poll_send(&mut self.connection, context) {
            // An engine that does not want the rest may answer and close; its answer counts.
            self.body.keeps_alive &= sent.is_ok();
            self.unsent_request = None;
            self.request_error = sent.err().filter(|error| matches!(error, RequestError::Request(_)));
        }
    }
}

/// Copies this many of the bytes read, to hold little more memory than that.
fn copy_out(read: &mut BytesMut, length: usize) -> Bytes {
    if length > MAX_COPIED_BYTES {
        return read.split_to(length).freeze();
    }
    let piece = Bytes::copy_from_slice(&read[..length]);
    read.advance(length);
    piece
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_small_pieces_are_copied_out_of_the_buffer() {
        for (length, is_copied) in [(MAX_COPIED_BYTES, true), (MAX_COPIED_BYTES + 1, false)] {
            let mut read = BytesMut::from(&vec![b'x'; length][..]);
            let begin = read.as_ptr();
            let piece = copy_out(&mut read, length);
            assert_eq!(piece.as_ptr() != begin, is_copied, "{length}");
        }
    }
}
