//! Decoder for vLLM's cache messages.
//!
//! Covers frames of the live and replay sockets and the event batches in them, in every encoding
//! since 0.11. Additions of later releases are skipped. This module knows no sockets and keeps no
//! state.

use std::io;

use bytes::Bytes;
use rmp::Marker;
use rmp::decode::{read_array_len, read_bin_len, read_int, read_map_len, read_nil, read_str_len};
use rmp_serde::decode::Error;
use serde::Deserialize;
use serde::de::{Error as _, IgnoredAny};

pub(crate) use super::extra::ExtraKey;

#[derive(Debug, thiserror::Error)]
pub(crate) enum KvEventError {
    #[error("a message of {0} frames")]
    Frames(usize),
    #[error("a sequence number of {0} bytes")]
    Sequence(usize),
    #[error("a batch of events of {0} bytes, more than {MAX_BATCH_BYTES}")]
    Length(usize),
    #[error("a batch of events that cannot be decoded: {0}")]
    Payload(#[from] Error),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum KvEvent {
    Stored(Box<BlocksStored>),
    Removed(BlocksRemoved),
    Cleared,
    /// An event kind unknown to this release of Hostler.
    Unknown,
}

/// Consecutive blocks of one sequence.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct BlocksStored {
    /// The engine's hashes, 64 bits of each.
    pub hashes: Vec<u64>,
    /// The block before the first one; `None` where a sequence begins.
    pub parent: Option<u64>,
    /// Tokens of all blocks.
    pub tokens: Vec<u32>,
    pub block_size: u32,
    pub lora_id: Option<i64>,
    /// Name of the adapter, since 0.14.
    pub lora_name: Option<String>,
    /// Which memory: `GPU`, `CPU`, `STORAGE`.
    pub medium: Option<String>,
    /// Extra keys of each block, on which its content depends besides its tokens; since 0.17.
    pub extra_keys: Vec<ExtraKey>,
    /// Number of the cache group, since 0.20.
    pub group: Option<u32>,
    /// The group's kind of attention, since 0.22.
    pub kind: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct BlocksRemoved {
    /// The engine's hashes, 64 bits of each.
    pub hashes: Vec<u64>,
    pub medium: Option<String>,
    /// Number of the cache group, since 0.20.
    pub group: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ReplayMessage {
    /// A message that was sent before.
    Batch(u64, Bytes),
    End,
}

/// Sequence number and batch of a live message: `[topic, sequence, batch]`.
///
/// # Errors
/// When the frames are no such message.
pub(crate) fn parse_live(frames: &[Bytes]) -> Result<(u64, Bytes), KvEventError> {
    match frames {
        [_topic, sequence, payload] => Ok((parse_sequence(sequence)?, payload.clone())),
        other => Err(KvEventError::Frames(other.len())),
    }
}

/// Parses a message of the replay socket.
///
/// Its frames are `["", sequence, batch]` up to vLLM 0.25; since 0.26 the topic comes before the
/// sequence. Sequence number -1 marks the end.
///
/// # Errors
/// When the frames are no such message.
pub(crate) fn parse_replay(frames: &[Bytes]) -> Result<ReplayMessage, KvEventError> {
    let (sequence, payload) = match frames {
        [_empty, sequence, payload] | [_empty, _, sequence, payload] => (parse_sequence(sequence)?, payload),
        other => return Err(KvEventError::Frames(other.len())),
    };
    Ok(if sequence == u64::MAX { ReplayMessage::End } else { ReplayMessage::Batch(sequence, payload.clone()) })
}

fn parse_sequence(frame: &Bytes) -> Result<u64, KvEventError> {
    let bytes = <[u8; 8]>::try_from(frame.as_ref()).map_err(|_| KvEventError::Sequence(frame.len()))?;
    Ok(u64::from_be_bytes(bytes))
}

/// Longest batch. A step of 16,384 new tokens and as many removed blocks takes 0.3 MB.
const MAX_BATCH_BYTES: usize = 8 << 20;

/// Events of a batch: `[time, [event…], rank]`.
///
/// # Errors
/// When the payload is no such batch.
pub(crate) fn parse_events(mut payload: &[u8]) -> Result<Vec<KvEvent>, KvEventError> {
    if payload.len() > MAX_BATCH_BYTES {
        return Err(KvEventError::Length(payload.len()));
    }
    Ok(read_batch(&mut payload)?)
}

fn read_batch(rest: &mut &[u8]) -> Result<Vec<KvEvent>, Error> {
    let fields = read_array_len(rest)?;
    if fields < 2 {
        return Err(Error::missing_field("events"));
    }
    skip_all(rest, 1)?;
    let events = read_array(rest, read_event)?;
    skip_all(rest, fields - 2)?;
    Ok(events)
}

/// Names and order of the fields after the tag, for events encoded as arrays.
const STORED_FIELDS: [&str; 10] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
];
const REMOVED_FIELDS: [&str; 3] = ["block_hashes", "medium", "group_idx"];

/// Reads an event, a map or an array, that begins with its tag.
fn read_event(rest: &mut &[u8]) -> Result<KvEvent, Error> {
    let is_map = matches!(peek(rest), Some(Marker::FixMap(_) | Marker::Map16 | Marker::Map32));
    let count = if is_map { read_map_len(rest)? } else { read_array_len(rest)? };
    if count == 0 || is_map && read_text(rest)? != b"type" {
        return Err(Error::missing_field("type"));
    }
    let tag = read_text(rest)?;
    // A field of an unknown event may have a known name and another meaning.
    let names: &[&str] = match tag {
        b"BlockStored" => &STORED_FIELDS,
        b"BlockRemoved" => &REMOVED_FIELDS,
        _ => &[],
    };
    let mut fields = EventFields::default();
    // Older releases end earlier.
    for number in 0..count as usize - 1 {
        let name = if is_map {
            let sent = read_text(rest)?;
            names.iter().find(|name| name.as_bytes() == sent)
        } else {
            names.get(number)
        };
        match name {
            Some(name) => fields.read(name, rest)?,
            None => skip_all(rest, 1)?,
        }
    }
    fields.into_event(tag)
}

#[derive(Default)]
struct EventFields {
    hashes: Option<Vec<u64>>,
    tokens: Option<Vec<u32>>,
    block_size: Option<u32>,
    rest: BlocksStored,
}

impl EventFields {
    fn read(&mut self, name: &str, rest: &mut &[u8]) -> Result<(), Error> {
        match name {
            "block_hashes" => self.hashes = Some(read_array(rest, read_hash)?),
            "parent_block_hash" => self.rest.parent = read_option(rest, read_hash)?,
            "token_ids" => self.tokens = Some(read_array(rest, read_token)?),
            "block_size" => self.block_size = Some(read_int(rest)?),
            "lora_id" => self.rest.lora_id = read_option(rest, |rest| Ok(read_int(rest)?))?,
            "medium" => self.rest.medium = read_option(rest, read_string)?,
            "lora_name" => self.rest.lora_name = read_option(rest, read_string)?,
            "extra_keys" => self.rest.extra_keys = read_option(rest, read_any)?.unwrap_or_default(),
            "group_idx" => self.rest.group = read_option(rest, |rest| Ok(read_int(rest)?))?,
            "kv_cache_spec_kind" => self.rest.kind = read_option(rest, read_string)?,
            _ => skip_all(rest, 1)?,
        }
        Ok(())
    }

    fn into_event(self, tag: &[u8]) -> Result<KvEvent, Error> {
        let Self { hashes, tokens, block_size, rest } = self;
        match tag {
            b"BlockStored" => Ok(KvEvent::Stored(Box::new(BlocksStored {
                hashes: hashes.ok_or_else(|| Error::missing_field("block_hashes"))?,
                tokens: tokens.ok_or_else(|| Error::missing_field("token_ids"))?,
                block_size: block_size.ok_or_else(|| Error::missing_field("block_size"))?,
                ..rest
            }))),
            b"BlockRemoved" => Ok(KvEvent::Removed(BlocksRemoved {
                hashes: hashes.ok_or_else(|| Error::missing_field("block_hashes"))?,
                medium: rest.medium,
                group: rest.group,
            })),
            b"AllBlocksCleared" => Ok(KvEvent::Cleared),
            _ => Ok(KvEvent::Unknown),
        }
    }
}

/// Reads 64 bits of an engine's hash.
///
/// If the engine sends the whole digest, these are its last eight bytes: the number that it sends
/// otherwise.
fn read_hash(rest: &mut &[u8]) -> Result<u64, Error> {
    if !matches!(peek(rest), Some(Marker::Bin8 | Marker::Bin16 | Marker::Bin32)) {
        // Some releases send it with a sign.
        let hash: i128 = read_int(rest)?;
        #[expect(clippy::cast_possible_truncation, reason = "MessagePack has no integers of more than 64 bits")]
        return Ok(hash as u64);
    }
    let len = read_bin_len(rest)?;
    let digest = read_bytes(rest, len)?;
    let last = digest.last_chunk().ok_or_else(|| Error::invalid_length(digest.len(), &"eight bytes or more"))?;
    Ok(u64::from_be_bytes(*last))
}

/// First bytes of integers of 16 and 32 bits.
const U16: u8 = 0xcd;
const U32: u8 = 0xce;

/// Reads a token. Nearly all have the two forms below, which cost half of any other here.
fn read_token(rest: &mut &[u8]) -> Result<u32, Error> {
    let (token, tail) = match **rest {
        [U16, a, b, ref tail @ ..] => (u32::from_be_bytes([0, 0, a, b]), tail),
        [U32, a, b, c, d, ref tail @ ..] => (u32::from_be_bytes([a, b, c, d]), tail),
        _ => return Ok(read_int(rest)?),
    };
    *rest = tail;
    Ok(token)
}

fn peek(rest: &[u8]) -> Option<Marker> {
    rest.first().copied().map(Marker::from_u8)
}

fn read_bytes<'a>(rest: &mut &'a [u8], len: u32) -> Result<&'a [u8], Error> {
    rest.split_off(..len as usize).ok_or_else(|| Error::InvalidDataRead(io::ErrorKind::UnexpectedEof.into()))
}

/// Reads a text that need not be UTF-8.
fn read_text<'a>(rest: &mut &'a [u8]) -> Result<&'a [u8], Error> {
    let len = read_str_len(rest)?;
    read_bytes(rest, len)
}

fn read_string(rest: &mut &[u8]) -> Result<String, Error> {
    let text = str::from_utf8(read_text(rest)?).map_err(Error::Utf8Error)?;
    Ok(text.to_owned())
}

fn read_option<T>(rest: &mut &[u8], read: impl Fn(&mut &[u8]) -> Result<T, Error>) -> Result<Option<T>, Error> {
    if peek(rest) == Some(Marker::Null) {
        read_nil(rest)?;
        return Ok(None);
    }
    read(rest).map(Some)
}

fn read_array<T>(rest: &mut &[u8], read: impl Fn(&mut &[u8]) -> Result<T, Error>) -> Result<Vec<T>, Error> {
    let mut all = Vec::new();
    for _ in 0..read_array_len(rest)? {
        all.push(read(rest)?);
    }
    Ok(all)
}

/// Deepest nesting of what is skipped or rare. Without a limit, 780 levels overflowed the stack of
/// a debug build.
const MAX_DEPTH: usize = 32;

/// Reads what is rare, at several times the cost.
fn read_any<'de, T: Deserialize<'de>>(rest: &mut &[u8]) -> Result<T, Error> {
    let mut deserializer = rmp_serde::Deserializer::new(rest);
    deserializer.set_max_depth(MAX_DEPTH);
    T::deserialize(&mut deserializer)
}

fn skip_all(rest: &mut &[u8], values: u32) -> Result<(), Error> {
    (0..values).try_for_each(|_| read_any::<IgnoredAny>(rest).map(drop))
}

#[cfg(test)]
mod tests;
