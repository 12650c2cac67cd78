//! Reads a request's body to its end within bounds of size, time and memory, and decompresses it if
//! that is allowed.

mod inflate;

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{self, HeaderMap, HeaderName};
use http_body::Body;
use http_body_util::BodyExt;
use tokio::time::timeout;

pub(crate) use self::inflate::InflateError;
use self::inflate::Inflater;
use super::headers::is_forbidden_in_trailers;
use crate::admission::LimitExceeded;
use crate::config::RouterConfig;
use crate::placement::QueueShare;
use crate::tenant_pool::{PoolShare, TenantPool};

/// Longest body that is read at once. A longer one may take more than a millisecond to read and
/// translate: bodies of small values are parsed at about 60 MB/s.
pub(crate) const SHORT_BODY_BYTES: usize = 64 * 1024;

/// The unit in which memory is counted. Each body takes one piece at its start, because connections
/// have buffers too.
const PIECE_BYTES: usize = 16 * 1024;

/// Most pieces of a small body. Most conversations are small.
const SMALL_PIECES: usize = 4;

/// The part of the memory reserved for small bodies is one in this many.
const SMALL_BODY_DIVISOR: usize = 8;

/// Memory for arriving bodies, and for those of requests whose answer has not begun, shared by all
/// connections.
///
/// Tenants share the free memory as they share the queue. Large bodies must leave room for small
/// ones.
#[derive(Debug, Clone)]
pub(crate) struct BodyMemory(Arc<TenantPool>);

impl BodyMemory {
    /// Creates a memory of `most` bytes.
    #[must_use]
    pub(crate) fn new(most: usize) -> Self {
        Self(TenantPool::new((most / PIECE_BYTES).max(1)))
    }

    /// Room for a body that is already complete.
    pub(crate) fn reserve(&self, owner: QueueShare) -> Result<BodyReservation, BodyMemoryFull> {
        let mut room = BodyReservation(self.0.share(owner.tenant, owner.weight));
        room.grow(usize::try_from(owner.bytes).unwrap_or(usize::MAX))?;
        Ok(room)
    }

    /// Whether a body of so many bytes would fit alone into the part for large bodies.
    pub(crate) fn can_fit(&self, bytes: usize) -> bool {
        large_body_pieces(&self.0) > bytes / PIECE_BYTES
    }
}

fn large_body_pieces(memory: &TenantPool) -> usize {
    memory.capacity() - memory.capacity() / SMALL_BODY_DIVISOR
}

/// The memory of one body, given back when it is dropped.
#[derive(Debug)]
pub(crate) struct BodyReservation(PoolShare);

#[derive(Debug, PartialEq, thiserror::Error)]
#[error("the bodies of other requests, all or yours, take the memory that router.max_buffered_body_bytes allows: try again soon")]
pub(crate) struct BodyMemoryFull;

impl From<BodyMemoryFull> for LimitExceeded {
    fn from(full: BodyMemoryFull) -> Self {
        Self::of_router(full.to_string())
    }
}

impl BodyReservation {
    /// Transfers the reservation to the body as it will be sent, once its owner is known.
    pub(crate) fn transfer_to(mut self, owner: QueueShare) -> Result<Self, BodyMemoryFull> {
        if self.0.tenant() != owner.tenant {
            let memory = BodyMemory(self.0.pool().clone());
            drop(self);
            return memory.reserve(owner);
        }
        let bytes = usize::try_from(owner.bytes).unwrap_or(usize::MAX);
        self.grow(bytes)?;
        self.0.shrink_to(pieces_of(bytes));
        Ok(self)
    }

    /// Counts `copies` of a body of `bytes` bytes.
    ///
    /// The count is at most half of the memory, or the body itself if that is larger, so whatever
    /// fits can be translated.
    pub(crate) fn count_copies(&mut self, copies: usize, bytes: usize) -> Result<(), BodyMemoryFull> {
        let half = self.0.pool().capacity() * PIECE_BYTES / 2;
        self.grow((copies * bytes).min(half.max(bytes)))
    }

    /// Moves what is reserved out of this.
    pub(crate) fn take(&mut self) -> Self {
        Self(self.0.take())
    }

    fn grow(&mut self, bytes: usize) -> Result<(), BodyMemoryFull> {
        let (wanted, memory) = (pieces_of(bytes), self.0.pool());
        let capacity = if wanted > SMALL_PIECES { large_body_pieces(memory) } else { memory.capacity() };
        if self.0.grow_to(wanted, capacity) { Ok(()) } else { Err(BodyMemoryFull) }
    }

    /// Wraps this reservation's body. The memory stays taken as long as any part of the body is
    /// held anywhere.
    pub(crate) fn wrap(self, body: Bytes) -> Bytes {
        Bytes::from_owner(ReservedBody { body, _reservation: self })
    }
}

struct ReservedBody {
    body: Bytes,
    _reservation: BodyReservation,
}

impl AsRef<[u8]> for ReservedBody {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

fn pieces_of(bytes: usize) -> usize {
    bytes / PIECE_BYTES + 1
}

#[derive(Debug, PartialEq, thiserror::Error)]
pub(crate) enum BodyReadError {
    #[error("the request body is larger than the {0} bytes that router.max_body_bytes allows")]
    TooLarge(usize),
    #[error("the request body did not arrive within {} s", .0.as_secs_f64())]
    TooSlow(Duration),
    #[error("the request body could not be read: {0}")]
    Broken(String),
    #[error("the trailer `{0}` is not accepted: send it as a header before the body, or not at all")]
    ForbiddenTrailer(HeaderName),
    #[error("the Content-Encoding `{0}` is not accepted: send the body as it is, or set router.decompress_bodies for gzip and deflate")]
    CompressionOff(String),
    #[error("the Content-Encoding `{0}` is not accepted: send the body as it is, or as gzip or deflate")]
    UnknownCoding(String),
    #[error("the request body is not decompressed: {0}")]
    Decompression(InflateError),
    #[error(transparent)]
    MemoryFull(#[from] BodyMemoryFull),
}

/// Reads and decompresses a request's body, taking `room` as it arrives.
pub(super) async fn read_body<B>(
    config: &RouterConfig,
    room: &mut BodyReservation,
    headers: &HeaderMap,
    body: B,
) -> Result<Bytes, BodyReadError>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    let coding = content_coding(headers, config.decompress_bodies)?;
    let most = config.max_body_bytes;
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|length| length > most) {
        return Err(BodyReadError::TooLarge(most));
    }
    let read = async {
        match coding {
            // Boxed: few bodies are compressed, and the others should not reserve room for it.
            Some(coding) => Box::pin(read_compressed(Inflater::new(coding, most), body, room)).await,
            None => read_plain(body, most, (room, 1)).await,
        }
    };
    timeout(config.body_timeout, read).await.unwrap_or(Err(BodyReadError::TooSlow(config.body_timeout)))
}

async fn next_bytes<B>(body: &mut B) -> Result<Option<Bytes>, BodyReadError>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    while let Some(frame) = body.frame().await {
        match frame.map_err(|error| BodyReadError::Broken(error.to_string()))?.into_data() {
            Ok(bytes) => return Ok(Some(bytes)),
            // Trailers mean nothing to an engine, but another reader may obey them.
            Err(trailers) => {
                let forbidden = trailers.trailers_ref().and_then(|trailers| trailers.keys().find(|name| is_forbidden_in_trailers(name)));
                forbidden.map_or(Ok(()), |name| Err(BodyReadError::ForbiddenTrailer(name.clone())))?;
            }
        }
    }
    Ok(None)
}

/// Reads a body of at most `most` bytes to its end, and counts so many copies of it as it comes.
pub(crate) async fn read_plain<B>(mut body: B, most: usize, (room, copies): (&mut BodyReservation, usize)) -> Result<Bytes, BodyReadError>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    let Some(first) = next_bytes(&mut body).await? else { return Ok(Bytes::new()) };
    let mut all = BytesMut::new();
    // Most bodies come in one piece, which then is not copied.
    let mut only = Some(first);
    loop {
        let length = all.len() + only.as_ref().map_or(0, Bytes::len);
        if length > most {
            return Err(BodyReadError::TooLarge(most));
        }
        room.count_copies(copies, length)?;
        let Some(more) = next_bytes(&mut body).await? else { break };
        if let Some(first) = only.take() {
            all = BytesMut::from(first);
        }
        all.extend_from_slice(&more);
    }
    Ok(only.unwrap_or_else(|| all.freeze()))
}

async fn read_compressed<B>(mut inflate: Inflater, mut body: B, room: &mut BodyReservation) -> Result<Bytes, BodyReadError>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    while let Some(bytes) = next_bytes(&mut body).await? {
        // A few thousand bytes may become a million, which takes a millisecond. Other tasks get
        // their turn in between.
        for part in bytes.chunks(inflate::STEP_BYTES) {
            inflate.push(part).map_err(BodyReadError::Decompression)?;
            room.grow(inflate.output_bytes())?;
            tokio::task::yield_now().await;
        }
    }
    inflate.finish().map_err(BodyReadError::Decompression)
}

/// The body's compression, if there is one and it is accepted.
fn content_coding(headers: &HeaderMap, allowed: bool) -> Result<Option<inflate::ContentCoding>, BodyReadError> {
    let mut codings = headers.get_all(header::CONTENT_ENCODING).iter();
    let (Some(first), second) = (codings.next(), codings.next()) else { return Ok(None) };
    let name = String::from_utf8_lossy(first.as_bytes()).trim().to_ascii_lowercase();
    match (inflate::ContentCoding::parse(&name), second) {
        _ if (name == "identity" || name.is_empty()) && second.is_none() => Ok(None),
        (Some(coding), None) if allowed => Ok(Some(coding)),
        _ if allowed => Err(BodyReadError::UnknownCoding(name)),
        _ => Err(BodyReadError::CompressionOff(name)),
    }
}

#[cfg(test)]
mod tests;
