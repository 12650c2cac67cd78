//! The body of an answer on its way from the engine, on its connection.

use std::convert::Infallible;
use std::future::poll_fn;
use std::task::{Context, Poll, ready};

use bytes::Bytes;

use super::connection::Connection;
use super::framing::Framing;
use super::head::Body;
use super::outgoing::Outgoing;
use super::{EngineClient, RequestError};

/// The body of an answer. Dropped before its end, it closes the connection.
#[derive(Debug)]
pub(in super::super) struct Answer<'a> {
    client: &'a EngineClient,
    connection: Connection,
    body: Body,
    /// The rest of the request, where the engine answers before it has all of it.
    rest: Option<Box<Outgoing>>,
    /// What the router broke off of the request.
    broken: Option<RequestError>,
}

impl<'a> Answer<'a> {
    pub(super) fn new(client: &'a EngineClient, connection: Connection, outgoing: Outgoing, body: Body) -> Self {
        let rest = (!outgoing.is_sent()).then(|| Box::new(outgoing));
        Self { client, connection, body, rest, broken: None }
    }

    /// The next piece, a chunk where the answer has chunks; nothing after the last.
    pub(in super::super) async fn piece(&mut self) -> Option<Result<Bytes, RequestError>> {
        poll_fn(|context| self.poll_piece(context).map(Result::transpose)).await
    }

    fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, RequestError>> {
        self.send(context);
        // The engine would wait for the rest of it, and nobody would end its answer.
        if let Some(broken) = self.broken.take() {
            return Poll::Ready(Err(broken));
        }
        loop {
            if let Some(piece) = self.body.framing.take(&mut self.connection.read)? {
                return Poll::Ready(Ok(Some(piece)));
            }
            if self.is_complete() {
                return Poll::Ready(Ok(None));
            }
            if !ready!(self.connection.poll_read(context))? {
                self.body.framing.close()?;
            }
        }
    }

    /// Whether the last piece was there, as far as is known without reading on.
    pub(in super::super) fn is_complete(&self) -> bool {
        self.body.framing == Framing::Complete
    }

    /// Goes on sending the request while nobody takes the answer.
    pub(in super::super) async fn keep_sending(&mut self) -> Infallible {
        poll_fn(|context| {
            self.send(context);
            Poll::Pending
        })
        .await
    }

    /// All of it was read: the connection may be used again.
    pub(in super::super) fn end(self) {
        if self.body.keeps_alive && self.rest.is_none() {
            self.client.keep(self.connection);
        }
    }

    fn send(&mut self, context: &mut Context<'_>) {
        let Some(rest) = &mut self.rest else { return };
        if let Poll::Ready(sent) = rest.poll_send(&mut self.connection, context) {
            // An engine that does not want the rest may say so and close: its answer is what counts.
            self.body.keeps_alive &= sent.is_ok();
            self.rest = None;
            self.broken = sent.err().filter(|error| matches!(error, RequestError::Request(_)));
        }
    }
}
