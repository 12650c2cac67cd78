//! Notices HTTP/1.1 requests whose end another proxy may see elsewhere. They must be refused.
//!
//! Such requests have two framings (Content-Length and Transfer-Encoding), which the HTTP library
//! resolves silently, or lines that end in something else than CR LF, which it allows. This parser
//! reads along with the connection and changes nothing. If it loses its place, the library alone
//! still frames the requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use hostler_boot::connection_clock::ConnectionClock;

/// Length of the longest header name that matters, `transfer-encoding`.
const MAX_NAME_BYTES: usize = 17;

#[derive(Debug, Clone)]
pub(super) struct FramingVerdict(Arc<AtomicU8>);

/// Why a request's end is in doubt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FramingFlaw {
    /// `Content-Length` and `Transfer-Encoding` together.
    TwoFramings = 1,
    /// A line feed without a carriage return, or the reverse.
    LineEnd,
}

impl FramingFlaw {
    pub(super) fn message(self) -> &'static str {
        match self {
            Self::TwoFramings => "a request has either Content-Length or Transfer-Encoding, not both",
            Self::LineEnd => "a line of a request ends with carriage return and line feed, and has neither of them elsewhere",
        }
    }
}

impl FramingVerdict {
    pub(super) fn flaw(&self) -> Option<FramingFlaw> {
        [FramingFlaw::TwoFramings, FramingFlaw::LineEnd].into_iter().find(|flaw| *flaw as u8 == self.0.load(Ordering::Relaxed))
    }
}

/// The observer of a connection's pieces, and its verdict. The observer also tells the connection's
/// clock when heads begin and end.
pub(super) fn watch_framing(clock: Arc<ConnectionClock>) -> (impl FnMut(&[u8]), FramingVerdict) {
    let (verdict, mut parser) = (Arc::new(AtomicU8::new(0)), FramingParser::default());
    let noticed = FramingVerdict(verdict.clone());
    let watch = move |piece: &[u8]| {
        if parser.state != FramingState::Other && !piece.is_empty() {
            parser.push(piece);
            verdict.store(parser.flaw.map_or(0, |flaw| flaw as u8), Ordering::Relaxed);
            clock.set_reading_head(parser.is_in_head());
        }
    };
    (watch, noticed)
}

/// The position in the stream of requests.
#[derive(Debug, Default)]
struct FramingParser {
    state: FramingState,
    line: FramingLine,
    content_length: Option<u64>,
    chunked: bool,
    flaw: Option<FramingFlaw>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum FramingState {
    #[default]
    RequestLine,
    Headers,
    /// This many bytes of a body are left.
    Body(u64),
    ChunkSize,
    /// This many bytes of a chunk are left, including its line end.
    Chunk(u64),
    Trailers,
    /// HTTP/2, whose framing is unambiguous.
    Other,
}

/// The current line, as far as it matters.
#[derive(Debug, Default)]
struct FramingLine {
    name: [u8; MAX_NAME_BYTES],
    name_bytes: usize,
    in_value: bool,
    length: usize,
    number: u64,
    /// The number that the line begins with, for a chunk's size. The HTTP library refuses one that
    /// overflows.
    size: u64,
    after_size: bool,
    after_return: bool,
}

impl FramingLine {
    /// Reads more of the line, without its end.
    fn push(&mut self, mut bytes: &[u8]) {
        self.length += bytes.len();
        if !self.after_size {
            let digits = bytes.iter().map_while(|byte| char::from(*byte).to_digit(16));
            let (size, count) =
                digits.fold((self.size, 0), |(size, count), digit| (size.wrapping_mul(16).wrapping_add(digit.into()), count + 1));
            (self.size, self.after_size) = (size, count < bytes.len());
        }
        if !self.in_value {
            let colon = memchr::memchr(b':', bytes);
            let (name, rest) = bytes.split_at(colon.unwrap_or(bytes.len()));
            let room = self.name.iter_mut().skip(self.name_bytes);
            room.zip(name).for_each(|(slot, byte)| *slot = byte.to_ascii_lowercase());
            self.name_bytes += name.len();
            self.in_value = colon.is_some();
            bytes = rest;
        }
        // Other headers' values do not matter.
        if self.in_value && self.name_text() == b"content-length" {
            let digits = bytes.iter().filter(|byte| byte.is_ascii_digit());
            self.number = digits.fold(self.number, |number, digit| number.wrapping_mul(10).wrapping_add(u64::from(digit - b'0')));
        }
    }

    fn name_text(&self) -> &[u8] {
        self.name.get(..self.name_bytes).unwrap_or_default()
    }
}

impl FramingParser {
    fn push(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match self.state {
                FramingState::Other => return,
                FramingState::Body(left) | FramingState::Chunk(left) => {
                    let skipped = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                    bytes = &bytes[skipped..];
                    let left = left - skipped as u64;
                    self.state = match self.state {
                        FramingState::Chunk(_) if left == 0 => FramingState::ChunkSize,
                        FramingState::Chunk(_) => FramingState::Chunk(left),
                        _ if left == 0 => FramingState::RequestLine,
                        _ => FramingState::Body(left),
                    };
                }
                _ => {
                    let (line, rest) = bytes.split_at(memchr::memchr2(b'\r', b'\n', bytes).unwrap_or(bytes.len()));
                    if !line.is_empty() {
                        self.check_line_end(!self.line.after_return);
                        self.line.after_return = false;
                        self.line.push(line);
                    }
                    let Some((&end, rest)) = rest.split_first() else { return };
                    bytes = rest;
                    // A line feed must follow a carriage return, and nothing else may.
                    self.check_line_end(self.line.after_return == (end == b'\n'));
                    self.line.after_return = end == b'\r';
                    if end == b'\n' {
                        self.end_of_line();
                    }
                }
            }
        }
    }

    /// A line with another end than CR LF is a flaw.
    fn check_line_end(&mut self, ends_well: bool) {
        if !ends_well {
            self.flaw = self.flaw.or(Some(FramingFlaw::LineEnd));
        }
    }

    fn is_in_head(&self) -> bool {
        match self.state {
            FramingState::RequestLine => self.line.length > 0,
            FramingState::Headers => true,
            _ => false,
        }
    }

    fn end_of_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        let empty = line.length == 0;
        match self.state {
            // Empty lines before a request are allowed.
            FramingState::RequestLine if empty => {}
            FramingState::RequestLine if line.name_text() == b"pri * http/2.0" => self.state = FramingState::Other,
            FramingState::RequestLine => self.state = FramingState::Headers,
            FramingState::Headers if empty => self.end_of_head(),
            FramingState::Headers => match line.name_text() {
                b"content-length" => self.content_length = Some(line.number),
                b"transfer-encoding" => self.chunked = true,
                _ => {}
            },
            FramingState::ChunkSize => {
                self.state = if line.size == 0 { FramingState::Trailers } else { FramingState::Chunk(line.size.saturating_add(2)) };
            }
            FramingState::Trailers if empty => self.state = FramingState::RequestLine,
            _ => {}
        }
    }

    fn end_of_head(&mut self) {
        let (length, chunked) = (self.content_length.take(), std::mem::take(&mut self.chunked));
        if chunked && length.is_some() {
            self.flaw = self.flaw.or(Some(FramingFlaw::TwoFramings));
        }
        self.state = match length {
            _ if chunked => FramingState::ChunkSize,
            Some(length) if length > 0 => FramingState::Body(length),
            _ => FramingState::RequestLine,
        };
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
    const BOTH_REVERSED: &str = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nHost: a\r\nContent-Length: 4\r\n\r\n0\r\n\r\n";
    const BARE: &str = "POST / HTTP/1.1\r\nHost: a\nContent-Length: 0\r\n\r\n";
    /// A chunk's size longer than any header's name that matters, with a body that looks like a
    /// request.
    const LONG_SIZE: &str = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0000000000000000000001f;name=\"a:b\"\r\n\
        X\r\n\r\nA / 1\r\nContent-Length: 999\r\n0;a-long-extension-at-the-end\r\n\r\n";

    fn flaw(pieces: &[&[u8]]) -> Option<FramingFlaw> {
        let mut watch = FramingParser::default();
        pieces.iter().for_each(|piece| watch.push(piece));
        watch.flaw
    }

    proptest! {
        #[test]
        fn framing_flaws_are_found_anywhere_outside_bodies(
            order in prop::collection::vec(0..4usize, 0..5), conflict in 0..4usize, cut in 1..40usize,
        ) {
            let mut stream: String = order.iter().map(|which| [PLAIN, CHUNKED, GET, LONG_SIZE][*which]).collect();
            let (last, expected) = [
                ("", None),
                (BOTH, Some(FramingFlaw::TwoFramings)),
                (BOTH_REVERSED, Some(FramingFlaw::TwoFramings)),
                (BARE, Some(FramingFlaw::LineEnd)),
            ][conflict];
            stream.push_str(last);
            let pieces: Vec<&[u8]> = stream.as_bytes().chunks(cut).collect();
            prop_assert_eq!(flaw(&pieces), expected);
        }

        #[test]
        fn no_bytes_make_the_framing_check_panic(bytes: Vec<u8>, cut in 1..20usize) {
            flaw(&bytes.chunks(cut).collect::<Vec<_>>());
        }
    }

    #[test]
    fn http_2_traffic_is_not_checked_for_framing() {
        assert_eq!(flaw(&[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", BOTH.as_bytes(), b"\n"]), None);
    }

    #[test]
    fn bare_line_ends_are_flaws_except_in_bodies() {
        let chunked = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
        for broken in
            ["\nGET / HTTP/1.1\r\n", "GET / HTTP/1.1\n", "GET / HTTP/1.1\r\nHost: a\rContent-Length: 1\r\n", "GET / HTTP/1.1\r\r\n"]
        {
            assert_eq!(flaw(&[broken.as_bytes()]), Some(FramingFlaw::LineEnd), "{broken:?}");
        }
        for broken in ["1\nx\r\n0\r\n\r\n", "1;a\nb\r\nx\r\n0\r\n\r\n", "0\r\nX: y\n\r\n"] {
            assert_eq!(flaw(&[chunked.as_bytes(), broken.as_bytes()]), Some(FramingFlaw::LineEnd), "{broken:?}");
        }
        assert_eq!(flaw(&[chunked.as_bytes(), b"4\r\na\nb\r\r\n0\r\n\r\n", GET.as_bytes()]), None);
    }
}
