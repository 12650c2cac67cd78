//! Reads a request's body to its end, within bounds of size, time and memory, and undoes its compression where that is allowed.

mod inflate;

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hostler_placement::hold::has_share;
use http::header::{self, HeaderMap};
use http_body::Body;
use http_body_util::BodyExt;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::time::timeout;

use self::inflate::Inflate;
pub(crate) use self::inflate::NotInflated;
use crate::config::RouterConfig;
use crate::placement::QueueShare;

/// Memory is counted in pieces of this size, and each body takes one from its beginning: connections have buffers too.
const PIECE_BYTES: usize = 16 * 1024;

/// Up to this a body is small: most conversations are.
const SMALL_PIECES: usize = 4;

/// Of the whole memory, this part is for small bodies alone.
const FOR_SMALL: usize = 8;

/// Memory for bodies that arrive, and for those of requests that no answer has begun of, shared by all connections: among tenants by what is free, as
/// the places to wait are. Large bodies do not take all of it, so that there is room for what others say.
#[derive(Debug, Clone)]
pub struct Reading(Arc<Pieces>);

#[derive(Debug)]
struct Pieces {
    most: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    tenants: FxHashMap<u64, usize>,
}

impl Reading {
    /// For so many bytes at once.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self(Arc::new(Pieces { most: (most / PIECE_BYTES).max(1), taken: Mutex::default() }))
    }

    /// Room for a guest's body that is there already.
    pub(crate) fn room(&self, guest: QueueShare) -> Result<Room, NoRoom> {
        let mut room = Room { all: self.clone(), tenant: guest.tenant, weight: guest.weight, taken: 0 };
        room.grow(usize::try_from(guest.bytes).unwrap_or(usize::MAX))?;
        Ok(room)
    }

    /// Whether a body of so many bytes finds room when there is no other, within what is for large ones.
    pub(crate) fn has_room_for(&self, bytes: usize) -> bool {
        self.0.for_large() > bytes / PIECE_BYTES
    }
}

impl Pieces {
    fn for_large(&self) -> usize {
        self.most - self.most / FOR_SMALL
    }
}

/// The memory of one body, given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Room {
    all: Reading,
    tenant: u64,
    weight: f64,
    taken: usize,
}

/// The memory for bodies is taken.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("the bodies of other requests, all or yours, take the memory that router.max_reading_bytes allows: try again soon")]
pub(crate) struct NoRoom;

impl Room {
    fn grow(&mut self, bytes: usize) -> Result<(), NoRoom> {
        let wanted = bytes / PIECE_BYTES + 1;
        let more = wanted.saturating_sub(self.taken);
        if more > 0 {
            let pieces = &*self.all.0;
            let most = if wanted > SMALL_PIECES { pieces.for_large() } else { pieces.most };
            let mut taken = pieces.taken.lock();
            let free = most.saturating_sub(taken.all);
            let own = taken.tenants.get(&self.tenant).copied().unwrap_or_default();
            // What this body has already does not count against the rest of it.
            if free < more || !has_share((own - self.taken) as u64, free as u64, self.weight) {
                return Err(NoRoom);
            }
            taken.all += more;
            taken.tenants.insert(self.tenant, own + more);
            self.taken = wanted;
        }
        Ok(())
    }

    /// The body that it is for, which has the room for as long as any part of it is held anywhere.
    pub(crate) fn around(self, body: Bytes) -> Bytes {
        Bytes::from_owner(Housed { body, _room: self })
    }
}

struct Housed {
    body: Bytes,
    _room: Room,
}

impl AsRef<[u8]> for Housed {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if self.taken == 0 {
            return;
        }
        let mut taken = self.all.0.taken.lock();
        taken.all -= self.taken;
        if let Some(own) = taken.tenants.get_mut(&self.tenant) {
            *own -= self.taken;
            if *own == 0 {
                taken.tenants.remove(&self.tenant);
            }
        }
    }
}

/// Why a request's body is not there.
#[derive(Debug, PartialEq, thiserror::Error)]
pub(crate) enum Unread {
    #[error("the request body is larger than the {0} bytes that router.max_body_bytes allows")]
    TooLarge(usize),
    #[error("the request body did not arrive within {} s", .0.as_secs_f64())]
    TooSlow(Duration),
    #[error("the request body could not be read: {0}")]
    Broken(String),
    #[error("the Content-Encoding `{0}` is not accepted: send the body as it is, or set router.decompress_bodies for gzip and deflate")]
    Compressed(String),
    #[error("the Content-Encoding `{0}` is not accepted: send the body as it is, or as gzip or deflate")]
    Unknown(String),
    #[error("the request body is not decompressed: {0}")]
    Bomb(NotInflated),
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
}

/// A request's body, decompressed, for which `room` is taken as it arrives.
pub(super) async fn read_body<B>(config: &RouterConfig, mut room: Room, headers: &HeaderMap, body: B) -> Result<Bytes, Unread>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    let coding = coding(headers, config.decompress_bodies)?;
    let most = config.max_body_bytes;
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|length| length > most) {
        return Err(Unread::TooLarge(most));
    }
    let read = async {
        match coding {
            // Few bodies are compressed, and the others have no room for what that needs.
            Some(coding) => Box::pin(inflated(Inflate::new(coding, most), body, &mut room)).await,
            None => plain(body, most, &mut room).await,
        }
    };
    timeout(config.body_timeout, read).await.unwrap_or(Err(Unread::TooSlow(config.body_timeout)))
}

/// The next bytes of a body.
async fn next<B>(body: &mut B) -> Result<Option<Bytes>, Unread>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    while let Some(frame) = body.frame().await {
        // Trailers say nothing to an engine.
        if let Ok(bytes) = frame.map_err(|error| Unread::Broken(error.to_string()))?.into_data() {
            return Ok(Some(bytes));
        }
    }
    Ok(None)
}

async fn plain<B>(mut body: B, most: usize, room: &mut Room) -> Result<Bytes, Unread>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    let Some(first) = next(&mut body).await? else { return Ok(Bytes::new()) };
    let mut all = BytesMut::new();
    // Most bodies come in one piece, which then is the body.
    let mut only = Some(first);
    loop {
        let length = all.len() + only.as_ref().map_or(0, Bytes::len);
        if length > most {
            return Err(Unread::TooLarge(most));
        }
        room.grow(length)?;
        let Some(more) = next(&mut body).await? else { break };
        if let Some(first) = only.take() {
            all = BytesMut::from(first);
        }
        all.extend_from_slice(&more);
    }
    Ok(only.unwrap_or_else(|| all.freeze()))
}

async fn inflated<B>(mut inflate: Inflate, mut body: B, room: &mut Room) -> Result<Bytes, Unread>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    while let Some(bytes) = next(&mut body).await? {
        // Some thousand bytes may become a million, which takes a millisecond: others get their turn between.
        for part in bytes.chunks(inflate::STEP_BYTES) {
            inflate.push(part).map_err(Unread::Bomb)?;
            room.grow(inflate.length())?;
            tokio::task::yield_now().await;
        }
    }
    inflate.finish().map_err(Unread::Bomb)
}

/// How the body is compressed, if it is and we take that.
fn coding(headers: &HeaderMap, allowed: bool) -> Result<Option<inflate::Coding>, Unread> {
    let mut codings = headers.get_all(header::CONTENT_ENCODING).iter();
    let (Some(first), second) = (codings.next(), codings.next()) else { return Ok(None) };
    let name = String::from_utf8_lossy(first.as_bytes()).trim().to_ascii_lowercase();
    match (inflate::Coding::of(&name), second) {
        _ if (name == "identity" || name.is_empty()) && second.is_none() => Ok(None),
        (Some(coding), None) if allowed => Ok(Some(coding)),
        _ if allowed => Err(Unread::Unknown(name)),
        _ => Err(Unread::Compressed(name)),
    }
}

#[cfg(test)]
mod tests;
