//! Explains the HTTP library's refusals. For a head that it cannot read, the library sends only the
//! status. The connection's task writes through this stream.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use http::StatusCode;
use memchr::memmem;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::error_forms::error_text;
use hostler_boot::connection_clock::ConnectionClock;

/// The beginning of each refusal of the library, which no HTTP/2 frame shares.
const REFUSAL_START: &[u8] = b"HTTP/1.1 4";

/// The header that says that a refusal has no body.
const NO_BODY: &[u8] = b"content-length: 0\r\n";

/// A connection whose library explains its refusals.
#[derive(Debug)]
pub(super) struct RefusalStream<S> {
    stream: S,
    clock: Arc<ConnectionClock>,
    /// Any page may read the refusal: the page that sent the request is not known.
    allows_all_origins: bool,
    /// The unwritten rest of a refusal.
    refusal: Bytes,
}

impl<S> RefusalStream<S> {
    /// The clock distinguishes the library's own answers from others.
    pub(super) fn new(stream: S, clock: Arc<ConnectionClock>, allows_all_origins: bool) -> Self {
        Self { stream, clock, allows_all_origins, refusal: Bytes::new() }
    }

    /// Intercepts the library's next bytes if they are a refusal.
    fn intercept(&mut self, head: &[u8]) -> bool {
        if !head.starts_with(REFUSAL_START) || self.clock.is_answering() {
            return false;
        }
        self.refusal = explain(head, self.allows_all_origins).unwrap_or_default();
        !self.refusal.is_empty()
    }
}

impl<S: AsyncWrite + Unpin> RefusalStream<S> {
    fn poll_refusal(&mut self, context: &mut Context<'_>) -> Poll<io::Result<Pin<&mut S>>> {
        while !self.refusal.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(context, &self.refusal))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.refusal.advance(written);
        }
        Poll::Ready(Ok(Pin::new(&mut self.stream)))
    }
}

/// Adds a body to a refusal.
fn explain(head: &[u8], allows_all_origins: bool) -> Option<Bytes> {
    let status = StatusCode::from_bytes(head.get(9..12)?).ok()?;
    let message = match status {
        StatusCode::URI_TOO_LONG => "the request's target is longer than 65,534 bytes: send what is long in the body",
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => {
            "the request has more than 100 headers, or more than 64 KiB of them with its target: send fewer or shorter ones"
        }
        _ => "the request's head is not HTTP: check its method, target and version, and that each header is a line `name: value`",
    };
    let body = error_text(status, "BadRequestError", message);
    let (before, after) = head.split_at(memmem::find(head, NO_BODY)?);
    let mark = if allows_all_origins { "access-control-allow-origin: *\r\n" } else { "" };
    let fields = format!("content-type: application/json\r\ncontent-length: {}\r\n{mark}", body.len());
    Some([before, fields.as_bytes(), &after[NO_BODY.len()..], body.as_bytes()].concat().into())
}

impl<S: AsyncRead + Unpin> AsyncRead for RefusalStream<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for RefusalStream<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let explained = self.get_mut();
        if explained.intercept(bytes) {
            return Poll::Ready(Ok(bytes.len()));
        }
        Pin::new(&mut explained.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(self: Pin<&mut Self>, context: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let explained = self.get_mut();
        if let Some(head) = slices.first().filter(|head| explained.intercept(head)) {
            return Poll::Ready(Ok(head.len()));
        }
        Pin::new(&mut explained.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let explained = self.get_mut();
        ready!(ready!(explained.poll_refusal(context))?.poll_flush(context))?;
        explained.clock.record_flush();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.get_mut().poll_refusal(context))?.poll_shutdown(context)
    }
}
