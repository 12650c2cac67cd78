//! A request on its way from the lane to the engine: its head as bytes, and its body with the
//! length that the router announced.

use std::future::poll_fn;
use std::io::IoSlice;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use hostler_http1::{self as http1, BodyFraming, Connection};
use hostler_proto::lane::{Header, RequestHead, ResponseHead, StreamFault};
use http::uri::PathAndQuery;
use http::{Method, header};

use super::RequestError;
use crate::lane::RequestBody;

#[derive(Debug)]
pub(crate) struct OutgoingRequest {
    head: Bytes,
    piece: Bytes,
    /// Source of the rest of the body; `None` for a request that was whole from the start.
    body: Option<RequestBody>,
    /// Bytes of the body that have not come from the router.
    remaining_bytes: u64,
    is_head: bool,
    is_untouched: bool,
    /// The whole request for a page.
    ///
    /// Such a request changes nothing at the engine, so the engine may see it twice.
    page: Option<Bytes>,
}

impl OutgoingRequest {
    /// Creates the request of this head; `None` if HTTP does not allow it.
    pub(crate) fn new(head: RequestHead, body: RequestBody) -> Option<Self> {
        let method = Method::from_bytes(head.method.as_bytes()).ok()?;
        let path = PathAndQuery::try_from(head.path).ok()?;
        let mut text = Vec::with_capacity(512);
        for part in [method.as_str(), " ", path.as_str(), " HTTP/1.1\r\nhost: engine\r\n"] {
            text.extend_from_slice(part.as_bytes());
        }
        // These types prove that no header contains a line break.
        for (name, value) in head.headers.into_iter().map(|header| header.parse()).collect::<Option<Vec<_>>>()? {
            if !matches!(name, header::HOST | header::CONNECTION | header::CONTENT_LENGTH | header::TRANSFER_ENCODING) {
                for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
                    text.extend_from_slice(part);
                }
            }
        }
        if head.body_bytes > 0 || method == Method::POST {
            text.extend_from_slice(format!("content-length: {}\r\n", head.body_bytes).as_bytes());
        }
        text.extend_from_slice(b"\r\n");
        let is_head = method == Method::HEAD;
        Some(Self {
            head: text.into(),
            piece: Bytes::new(),
            body: Some(body),
            remaining_bytes: head.body_bytes,
            is_head,
            is_untouched: true,
            page: None,
        })
    }

    pub(super) fn get(path: &str) -> Option<Self> {
        let request = Self::whole("GET", path, "", Bytes::new())?;
        Some(Self { page: Some(request.head.clone()), ..request })
    }

    /// Creates a request of the agent itself with a JSON body, which may be empty.
    pub(super) fn post_json(path: &str, json: Bytes) -> Option<Self> {
        let headers = format!("content-type: application/json\r\ncontent-length: {}\r\n", json.len());
        Self::whole("POST", path, &headers, json)
    }

    fn whole(method: &str, path: &str, headers: &str, body: Bytes) -> Option<Self> {
        let path = PathAndQuery::try_from(path).ok()?;
        let head = format!("{method} {path} HTTP/1.1\r\nhost: engine\r\n{headers}\r\n");
        Some(Self { head: head.into(), piece: body, body: None, remaining_bytes: 0, is_head: false, is_untouched: true, page: None })
    }

    /// Prepares the request for another connection, if that is harmless: no engine has seen any of
    /// it, or it asks for a page of which nothing has arrived.
    pub(super) fn rewind(&mut self, is_answered: bool) -> bool {
        if let Some(page) = self.page.as_ref().filter(|_| !is_answered) {
            self.head = page.clone();
            return true;
        }
        self.is_untouched
    }

    /// Whether an engine has the whole request.
    pub(super) fn is_sent(&self) -> bool {
        self.remaining_bytes == 0 && self.head.is_empty() && self.piece.is_empty()
    }

    /// Sends the request and waits for the head of the answer.
    ///
    /// Some of the request may be left to send then.
    pub(super) async fn send_and_await_head(
        &mut self,
        connection: &mut Connection,
        sent: &mut impl FnMut(),
    ) -> Result<(ResponseHead, BodyFraming), RequestError> {
        poll_fn(|context| {
            let sending = self.poll_send(connection, context);
            if matches!(sending, Poll::Ready(Ok(()))) {
                sent();
            }
            let broken = match sending {
                // Stop sending a request that the router broke off.
                Poll::Ready(Err(error @ RequestError::Request(_))) => return Poll::Ready(Err(error)),
                // An engine that closes during the write may have answered before. Either its
                // answer or the end of the stream can be read.
                Poll::Ready(Err(error)) => Some(error),
                _ => None,
            };
            let answer = ready!(connection.poll_head(context, self.is_head, copy_head)).map_err(|error| broken.unwrap_or(error.into()))?;
            sent();
            Poll::Ready(Ok(answer))
        })
        .await
    }

    /// Sends the bytes that have arrived; ready once the whole request has been sent.
    pub(super) fn poll_send(&mut self, connection: &mut Connection, context: &mut Context<'_>) -> Poll<Result<(), RequestError>> {
        while !self.is_sent() {
            if self.piece.is_empty()
                && self.remaining_bytes > 0
                && let Some(body) = &self.body
            {
                match body.poll_bytes(context) {
                    Poll::Ready(Ok(Some(piece))) => self.take_chunk(piece)?,
                    Poll::Ready(Ok(None)) => {
                        return Poll::Ready(Err(StreamFault::protocol("the router sent less than it announced").into()));
                    }
                    Poll::Ready(Err(broken)) => return Poll::Ready(Err(broken.into())),
                    Poll::Pending if self.head.is_empty() => return Poll::Pending,
                    Poll::Pending => {}
                }
            }
            let mut written = ready!(connection.poll_write(context, &[IoSlice::new(&self.head), IoSlice::new(&self.piece)]))?;
            self.is_untouched = false;
            for part in [&mut self.head, &mut self.piece] {
                let taken = written.min(part.len());
                part.advance(taken);
                written -= taken;
            }
        }
        Poll::Ready(Ok(()))
    }

    fn take_chunk(&mut self, piece: Bytes) -> Result<(), RequestError> {
        let left = self.remaining_bytes.checked_sub(piece.len() as u64);
        self.remaining_bytes = left.ok_or_else(|| StreamFault::protocol("the router sent more than it announced"))?;
        self.piece = piece;
        Ok(())
    }
}

fn copy_head(status: u16, headers: &[http1::Header<'_>]) -> ResponseHead {
    let copied = |header: &http1::Header<'_>| Header {
        name: Bytes::copy_from_slice(header.name.as_bytes()),
        value: Bytes::copy_from_slice(header.value),
    };
    ResponseHead { status, headers: headers.iter().map(copied).collect() }
}
