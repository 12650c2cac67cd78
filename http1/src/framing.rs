//! Where the pieces of a body end. It takes them out of what has been read and waits for nothing, so that any way of cutting the bytes can be tested.

use bytes::{Buf, BytesMut};
use httparse::{EMPTY_HEADER, Status};

use crate::HttpError;

/// The most bytes of a chunk's size line, to which some engines could add extensions.
const MAX_CHUNK_LINE_BYTES: usize = 256;

/// The most bytes of trailer fields, which are dropped.
const MAX_TRAILER_BYTES: usize = 8 * 1024;

/// What comes next on the connection.
#[derive(Debug, PartialEq, Eq)]
pub enum Framing {
    /// The rest of the body, in bytes.
    Length(u64),
    /// The size line of a chunk.
    ChunkSize,
    /// The rest of a chunk, in bytes.
    Chunk(u64),
    /// The line end after a chunk.
    ChunkEnd,
    /// The trailer fields after the last chunk.
    Trailers,
    /// Bytes until the connection is closed.
    UntilClosed,
    /// Nothing.
    Complete,
}

impl Framing {
    /// Takes out framing and returns how many bytes at the beginning of `read` are the next piece
    /// of the body; `None` when there is none yet, or none any more. The caller must take out
    /// exactly those before the next call.
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

    /// The connection was closed, which is an error within a body.
    pub(crate) fn close(&mut self) -> Result<(), HttpError> {
        if *self != Self::UntilClosed {
            return Err(HttpError::Closed);
        }
        *self = Self::Complete;
        Ok(())
    }
}

/// As many bytes as are there, at most `left`, which is reduced.
fn take_up_to(left: &mut u64, read: &BytesMut) -> usize {
    let length = usize::try_from(*left).unwrap_or(usize::MAX).min(read.len());
    *left -= length as u64;
    length
}

/// Takes out a chunk's size line and returns the size.
fn parse_chunk_size(read: &mut BytesMut) -> Result<Option<u64>, HttpError> {
    // `httparse` takes an empty line for a zero.
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
