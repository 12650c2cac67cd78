//! Where the pieces of a body end. It takes them out of what has been read and waits for nothing, so that any way of cutting the bytes can be tested.

use bytes::{Buf, Bytes, BytesMut};
use httparse::{EMPTY_HEADER, Status};

use super::RequestError;

/// A piece up to this size, as events are, is copied out of the buffer that it was read into. Until it has left, it would hold the whole buffer, and each
/// event of a step would need one of its own: to take those from the operating system cost a fifth of all that the agent did for an event.
const COPIED_BYTES: usize = 2048;

/// The most bytes of the line before a chunk, which some engines could put extensions into.
const MOST_LINE: usize = 256;

/// The most bytes of the fields after the last chunk. Nobody is told of them.
const MOST_TRAILERS: usize = 8 * 1024;

/// What comes next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Framing {
    /// So many bytes, which are the rest of the body.
    Length(u64),
    /// The line before a chunk.
    Size,
    /// So many bytes of a chunk.
    Chunk(u64),
    /// The end of a chunk's last line.
    ChunkEnd,
    /// The fields after the last chunk.
    Trailers,
    /// Bytes until the connection is closed.
    UntilClosed,
    /// Nothing.
    Complete,
}

impl Framing {
    /// The next piece, taken out of `read`; nothing when there is none yet, or none any more.
    pub(super) fn take(&mut self, read: &mut BytesMut) -> Result<Option<Bytes>, RequestError> {
        while !read.is_empty() {
            match self {
                Self::Length(left) => {
                    let piece = piece(read, left);
                    if *left == 0 {
                        *self = Self::Complete;
                    }
                    return Ok(Some(piece));
                }
                Self::Chunk(left) => {
                    let piece = piece(read, left);
                    if *left == 0 {
                        *self = Self::ChunkEnd;
                    }
                    return Ok(Some(piece));
                }
                Self::UntilClosed => {
                    let mut left = u64::MAX;
                    return Ok(Some(piece(read, &mut left)));
                }
                Self::ChunkEnd if read.starts_with(b"\r\n") => {
                    read.advance(2);
                    *self = Self::Size;
                }
                Self::ChunkEnd if read[..] == *b"\r" => return Ok(None),
                Self::ChunkEnd => return Err(RequestError::Malformed("a chunk is longer than it says")),
                Self::Size => match size(read)? {
                    None => return Ok(None),
                    Some(0) => *self = Self::Trailers,
                    Some(size) => *self = Self::Chunk(size),
                },
                Self::Trailers => match httparse::parse_headers(read, &mut [EMPTY_HEADER; 16]) {
                    Ok(Status::Complete((length, _))) => {
                        read.advance(length);
                        *self = Self::Complete;
                    }
                    Ok(Status::Partial) if read.len() < MOST_TRAILERS => return Ok(None),
                    _ => return Err(RequestError::Malformed("what follows its last chunk is too much, or no HTTP")),
                },
                Self::Complete => return Ok(None),
            }
        }
        Ok(None)
    }

    /// The connection was closed.
    pub(super) fn close(&mut self) -> Result<(), RequestError> {
        if *self != Self::UntilClosed {
            return Err(RequestError::Closed);
        }
        *self = Self::Complete;
        Ok(())
    }
}

/// Up to `left` bytes, which is lowered.
fn piece(read: &mut BytesMut, left: &mut u64) -> Bytes {
    let length = usize::try_from(*left).unwrap_or(usize::MAX).min(read.len());
    *left -= length as u64;
    if length > COPIED_BYTES {
        return read.split_to(length).freeze();
    }
    let piece = Bytes::copy_from_slice(&read[..length]);
    read.advance(length);
    piece
}

/// The size of the next chunk, its line taken out.
fn size(read: &mut BytesMut) -> Result<Option<u64>, RequestError> {
    // `httparse` takes an empty line for a zero.
    let begins = read[0].is_ascii_hexdigit();
    match httparse::parse_chunk_size(read) {
        Ok(Status::Complete((length, size))) if begins && length <= MOST_LINE => {
            read.advance(length);
            Ok(Some(size))
        }
        Ok(Status::Partial) if begins && read.len() < MOST_LINE => Ok(None),
        _ => Err(RequestError::Malformed("a chunk has no size")),
    }
}

#[cfg(test)]
mod tests;
