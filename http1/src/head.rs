//! Head of an answer, parsed by `httparse`, and the framing of its body.
//!
//! The parser is stricter than HTTP asks: engines are few, and if two sides saw a body's end in
//! different places, one user's answer would get into another's.

use bytes::{Buf, BytesMut};
use httparse::{EMPTY_HEADER, Header, Response, Status};

use crate::HttpError;
use crate::framing::Framing;

/// Most headers, and most bytes of a head. Engines send about ten headers of 300 bytes together.
const MAX_HEADERS: usize = 100;
const MAX_HEAD_BYTES: usize = 64 * 1024;

#[derive(Debug)]
pub struct BodyFraming {
    pub framing: Framing,
    pub keeps_alive: bool,
}

/// Takes out the complete head at the beginning of `read`, and returns the part that `keep` keeps
/// and the body's framing.
///
/// `None` while the head is incomplete. Interim answers are skipped.
pub(crate) fn parse_head<H>(
    read: &mut BytesMut,
    is_head: bool,
    keep: impl Fn(u16, &[Header<'_>]) -> H,
) -> Result<Option<(H, BodyFraming)>, HttpError> {
    loop {
        let mut headers = [EMPTY_HEADER; MAX_HEADERS];
        let mut response = Response::new(&mut headers);
        let length = match response.parse(read) {
            Ok(Status::Complete(length)) => length,
            Ok(Status::Partial) if read.len() < MAX_HEAD_BYTES => return Ok(None),
            Ok(Status::Partial) => return Err(HttpError::Malformed("its head is too large")),
            Err(_) => return Err(HttpError::Malformed("its head is not one of HTTP")),
        };
        let status = response.code.unwrap_or_default();
        if (200..1000).contains(&status) {
            let body = body_framing(&response, status, is_head)?;
            let head = keep(status, response.headers);
            read.advance(length);
            return Ok(Some((head, body)));
        }
        if status == 101 || !(100..200).contains(&status) {
            return Err(HttpError::Malformed("its status is none that was asked for"));
        }
        read.advance(length);
    }
}

/// Framing of a body by RFC 9112, section 6.3.
fn body_framing(response: &Response<'_, '_>, status: u16, is_head: bool) -> Result<BodyFraming, HttpError> {
    let values = |name: &'static str| {
        response.headers.iter().filter(move |header| header.name.eq_ignore_ascii_case(name)).map(|header| header.value.trim_ascii())
    };
    let mut encodings = values("transfer-encoding");
    let framing = match (encodings.next(), content_length(values("content-length"))?) {
        _ if is_head || matches!(status, 204 | 304) => Framing::Complete,
        (Some(_), Some(_)) => return Err(HttpError::Malformed("it has a length and an encoding")),
        (Some(encoding), None) if encoding.eq_ignore_ascii_case(b"chunked") && encodings.next().is_none() => Framing::ChunkSize,
        (Some(_), None) => return Err(HttpError::Malformed("its encoding is unknown")),
        (None, Some(0)) => Framing::Complete,
        (None, Some(length)) => Framing::Length(length),
        (None, None) => Framing::UntilClosed,
    };
    let is_closing = values("connection")
        .flat_map(|value| value.split(|byte| *byte == b','))
        .any(|word| word.trim_ascii().eq_ignore_ascii_case(b"close"));
    let keeps_alive = response.version == Some(1) && !is_closing && !matches!(framing, Framing::UntilClosed);
    Ok(BodyFraming { framing, keeps_alive })
}

/// Content length, if all values agree.
fn content_length<'a>(values: impl Iterator<Item = &'a [u8]>) -> Result<Option<u64>, HttpError> {
    let malformed = HttpError::Malformed("its length is none");
    let mut agreed = None;
    for value in values {
        let is_number = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
        let length = str::from_utf8(value).ok().filter(|_| is_number).and_then(|digits| digits.parse().ok());
        if length.is_none() || agreed.is_some_and(|agreed| Some(agreed) != length) {
            return Err(malformed);
        }
        agreed = length;
    }
    Ok(agreed)
}

#[cfg(test)]
mod tests;
