//! Framing of a body: where its pieces end.
//!
//! It is taken out of the bytes read and waits for nothing, so any way of cutting the bytes can be
//! tested.

use bytes::{Buf, BytesMut};
use httparse::{EMPTY_HEADER, Status};

use crate::HttpError;

/// Most bytes of a chunk's size line, to which some engines could add extensions.
const MAX_CHUNK_LINE_BYTES: usize = 256;

/// Most bytes of trailer fields, which are dropped.
const MAX_TRAILER_BYTES: usize = 8 * 1024;

/// Next element on the connection.
#[derive(Debug, PartialEq, Eq)]
pub enum Framing {
    /// Rest of the body, in bytes.
    Length(u64),
    /// Size line of a chunk.
    ChunkSize,
    /// Rest of a chunk, in bytes.
    Chunk(u64),
    /// Line end after a chunk.
    ChunkEnd,
    /// Trailer fields after the last chunk.
    Trailers,
    /// Bytes until the connection is closed.
    UntilClosed,
    /// Nothing more.
    Complete,
}

impl Framing {
    /// Takes out framing, and returns how many bytes at the beginning of `read` are the next piece
    /// of the body.
    ///
    /// `None` if there is none yet, or none any more. The caller must take out exactly those bytes
    /// before the next call.
    pub(crate) fn next_piece_bytes(&mut self, read: &mut BytesMut) -> Result<Option<usize>, HttpError> {
        while !read.is_empty() {
            match self {
                Self::Length(left) => {
                    let length = take_up_to(left, read);
                    if *left == 0 {
                        *self = Self::Complete;
                    }
                    return Ok(Some(length));
                }
                Self::Chunk(left) => {
                    let length = take_up_to(left, read);
                    if *left == 0 {
                        *self = Self::ChunkEnd;
                    }
                    return Ok(Some(length));
                }
                Self::UntilClosed => return Ok(Some(read.len())),
                Self::ChunkEnd if read.starts_with(b"\r\n") => {
                    read.advance(2);
                    *self = Self::ChunkSize;
                }
                Self::ChunkEnd if read[..] == *b"\r" => return Ok(None),
                Self::ChunkEnd => return Err(HttpError::Malformed("a chunk is longer than it says")),
                Self::ChunkSize => match parse_chunk_size(read)? {
                    None => return Ok(None),
                    Some(0) => *self = Self::Trailers,
                    Some(size) => *self = Self::Chunk(size),
                },
                Self::Trailers => match httparse::parse_headers(read, &mut [EMPTY_HEADER; 16]) {
                    Ok(Status::Complete((length, _))) => {
                        read.advance(length);
                        *self = Self::Complete;
                    }
                    Ok(Status::Partial) if read.len() < MAX_TRAILER_BYTES => return Ok(None),
                    _ => return Err(HttpError::Malformed("what follows its last chunk is too much, or no HTTP")),
                },
                Self::Complete => return Ok(None),
            }
        }
        Ok(None)
    }

    /// Handles a closed connection, which is an error within a body.
    pub(crate) fn close(&mut self) -> Result<(), HttpError> {
        if *self != Self::UntilClosed {
            return Err(HttpError::Closed);
        }
        *self = Self::Complete;
        Ok(())
    }
}

/// Available bytes, at most `left`, which is reduced.
fn take_up_to(left: &mut u64, read: &BytesMut) -> usize {
    let length = usize::try_from(*left).unwrap_or(usize::MAX).min(read.len());
    *left -= length as u64;
    length
}

/// Takes out a chunk's size line and returns the size.
fn parse_chunk_size(read: &mut BytesMut) -> Result<Option<u64>, HttpError> {
    // `httparse` parses an empty line as zero.
    let begins = read[0].is_ascii_hexdigit();
    match httparse::parse_chunk_size(read) {
        Ok(Status::Complete((length, size))) if begins && length <= MAX_CHUNK_LINE_BYTES => {
            read.advance(length);
            Ok(Some(size))
        }
        Ok(Status::Partial) if begins && read.len() < MAX_CHUNK_LINE_BYTES => Ok(None),
        _ => Err(HttpError::Malformed("a chunk has no size")),
    }
}

#[cfg(test)]
mod tests;
