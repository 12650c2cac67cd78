//! Notices HTTP/1.1 requests with two conflicting framings (Content-Length and Transfer-Encoding), which the HTTP library
//! resolves silently. A router behind another proxy must refuse them: the two could disagree on where a request ends.
//!
//! It reads along with the connection and changes nothing. If it should lose its place, requests are still framed by the library alone.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::clock::Clock;

/// Longest header name of interest, `transfer-encoding`.
const NAME_BYTES: usize = 17;

/// A connection whose requests' framing is watched.
#[derive(Debug)]
pub(super) struct Framed<S> {
    stream: S,
    watch: Watch,
    seen: Arc<AtomicBool>,
    clock: Arc<Clock>,
}

/// What was noticed on a connection.
#[derive(Debug, Clone)]
pub(super) struct Framing(Arc<AtomicBool>);

impl Framing {
    /// Whether a request of this connection had two framings.
    pub(super) fn is_ambiguous(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl<S> Framed<S> {
    /// Also tells the connection's clock when heads begin and end.
    pub(super) fn new(stream: S, clock: Arc<Clock>) -> (Self, Framing) {
        let seen = Arc::new(AtomicBool::new(false));
        (Self { stream, watch: Watch::default(), seen: seen.clone(), clock }, Framing(seen))
    }
}

/// Where in the stream of requests we are.
#[derive(Debug, Default)]
struct Watch {
    place: Place,
    line: Line,
    content_length: Option<u64>,
    chunked: bool,
    ambiguous: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Place {
    #[default]
    RequestLine,
    Headers,
    /// This many bytes of a body are left.
    Body(u64),
    ChunkSize,
    /// This many bytes of a chunk are left, its line end included.
    Chunk(u64),
    Trailers,
    /// HTTP/2, which has no such ambiguity.
    Other,
}

/// The line being read, as far as it matters.
#[derive(Debug, Default)]
struct Line {
    name: [u8; NAME_BYTES],
    name_bytes: usize,
    in_value: bool,
    length: usize,
    number: u64,
}

impl Line {
    fn push(&mut self, byte: u8) {
        self.length += 1;
        if byte == b':' && !self.in_value {
            self.in_value = true;
        } else if self.in_value {
            if byte.is_ascii_digit() {
                self.number = self.number.wrapping_mul(10).wrapping_add(u64::from(byte - b'0'));
            }
        } else {
            if let Some(slot) = self.name.get_mut(self.name_bytes) {
                *slot = byte.to_ascii_lowercase();
            }
            self.name_bytes += 1;
        }
    }

    fn text(&self) -> &[u8] {
        self.name.get(..self.name_bytes).unwrap_or_default()
    }
}

impl Watch {
    fn read(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match self.place {
                Place::Other => return,
                Place::Body(left) | Place::Chunk(left) => {
                    let skipped = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                    bytes = &bytes[skipped..];
                    let left = left - skipped as u64;
                    self.place = match self.place {
                        Place::Chunk(_) if left == 0 => Place::ChunkSize,
                        Place::Chunk(_) => Place::Chunk(left),
                        _ if left == 0 => Place::RequestLine,
                        _ => Place::Body(left),
                    };
                }
                _ => {
                    let byte = bytes[0];
                    bytes = &bytes[1..];
                    match byte {
                        b'\n' => self.end_of_line(),
                        b'\r' => {}
                        _ => self.line.push(byte),
                    }
                }
            }
        }
    }

    fn is_in_head(&self) -> bool {
        match self.place {
            Place::RequestLine => self.line.length > 0,
            Place::Headers => true,
            _ => false,
        }
    }

    fn end_of_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        let empty = line.length == 0;
        match self.place {
            // Empty lines before a request are allowed.
            Place::RequestLine if empty => {}
            Place::RequestLine if line.text() == b"pri * http/2.0" => self.place = Place::Other,
            Place::RequestLine => self.place = Place::Headers,
            Place::Headers if empty => self.end_of_head(),
            Place::Headers => match line.text() {
                b"content-length" => self.content_length = Some(line.number),
                b"transfer-encoding" => self.chunked = true,
                _ => {}
            },
            Place::ChunkSize => {
                let digits = line.text().iter().map_while(|byte| char::from(*byte).to_digit(16));
                let size = digits.fold(0_u64, |size, digit| size.wrapping_mul(16).wrapping_add(digit.into()));
                self.place = if size == 0 { Place::Trailers } else { Place::Chunk(size.saturating_add(2)) };
            }
            Place::Trailers if empty => self.place = Place::RequestLine,
            _ => {}
        }
    }

    fn end_of_head(&mut self) {
        let (length, chunked) = (self.content_length.take(), std::mem::take(&mut self.chunked));
        self.ambiguous |= chunked && length.is_some();
        self.place = match length {
            _ if chunked => Place::ChunkSize,
            Some(length) if length > 0 => Place::Body(length),
            _ => Place::RequestLine,
        };
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Framed<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let framed = self.get_mut();
        let before = buffer.filled().len();
        let read = Pin::new(&mut framed.stream).poll_read(context, buffer);
        if framed.watch.place != Place::Other && buffer.filled().len() > before {
            framed.watch.read(&buffer.filled()[before..]);
            framed.seen.store(framed.watch.ambiguous, Ordering::Relaxed);
            framed.clock.reading_head(framed.watch.is_in_head());
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Framed<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(self: Pin<&mut Self>, context: &mut Context<'_>, slices: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PLAIN: &str = "POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 31\r\n\r\nTransfer-Encoding: chunked\r\n1234";
    const CHUNKED: &str =
        "POST /v1/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1c\r\nContent-Length: 5\r\n\r\nXXXXXXX\r\n0\r\nX: y\r\n\r\n";
    const GET: &str = "\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n";
    const BOTH: &str = "POST / HTTP/1.1\r\ncontent-LENGTH: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n";
    const BOTH_REVERSED: &str = "POST / HTTP/1.1\nTransfer-Encoding: chunked\nHost: a\nContent-Length: 4\n\n0\n\n";

    fn is_ambiguous(pieces: &[&[u8]]) -> bool {
        let mut watch = Watch::default();
        pieces.iter().for_each(|piece| watch.read(piece));
        watch.ambiguous
    }

    proptest! {
        #[test]
        fn two_framings_are_noticed_wherever_they_stand_and_bodies_are_not_taken_for_heads(
            order in prop::collection::vec(0..3usize, 0..5), conflict in 0..3usize, cut in 1..40usize,
        ) {
            let mut stream: String = order.iter().map(|which| [PLAIN, CHUNKED, GET][*which]).collect();
            stream.push_str(["", BOTH, BOTH_REVERSED][conflict]);
            let pieces: Vec<&[u8]> = stream.as_bytes().chunks(cut).collect();
            prop_assert_eq!(is_ambiguous(&pieces), conflict > 0);
        }

        #[test]
        fn no_bytes_can_panic_it(bytes: Vec<u8>, cut in 1..20usize) {
            is_ambiguous(&bytes.chunks(cut).collect::<Vec<_>>());
        }
    }

    #[test]
    fn http_2_is_left_alone() {
        assert!(!is_ambiguous(&[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", BOTH.as_bytes()]));
    }
}
