//! vLLM's messages about its cache, decoded: frames of the live and of the replay socket, and the batches of events in them, in every
//! encoding since 0.11. What later releases add is passed over. Nothing here knows a socket or keeps anything.

use std::fmt;

use bytes::Bytes;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de};

pub use super::extra::Extra;

/// Why a message cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// Not a message of either socket.
    #[error("a message of {0} frames")]
    Frames(usize),
    /// The sequence number is not one.
    #[error("a sequence number of {0} bytes")]
    Sequence(usize),
    /// The events cannot be decoded.
    #[error("a batch of events that cannot be decoded: {0}")]
    Payload(#[from] rmp_serde::decode::Error),
}

/// One change of an engine's cache.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Blocks got their contents.
    Stored(Box<Stored>),
    /// Blocks lost their contents.
    Removed(Removed),
    /// The cache is empty.
    Cleared,
    /// Something that this release of ours does not know.
    Unknown,
}

/// Blocks of one sequence that follow each other.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stored {
    /// The engine's hashes, 64 bits of each.
    pub hashes: Vec<u64>,
    /// The block before the first one; `None` where a sequence begins.
    pub parent: Option<u64>,
    /// Tokens of all blocks.
    pub tokens: Vec<u32>,
    /// Tokens that a block holds.
    pub block_size: u32,
    /// Number of the adapter.
    pub lora_id: Option<i64>,
    /// Name of the adapter, since 0.14.
    pub lora_name: Option<String>,
    /// Which memory: `GPU`, `CPU`, `STORAGE`.
    pub medium: Option<String>,
    /// For each block, what its content depends on besides its tokens; since 0.17.
    pub extra_keys: Vec<Extra>,
    /// Number of the cache group, since 0.20.
    pub group: Option<u32>,
    /// The group's kind of attention, since 0.22.
    pub kind: Option<String>,
}

/// Blocks that lost their contents.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Removed {
    /// The engine's hashes, 64 bits of each.
    pub hashes: Vec<u64>,
    /// Which memory.
    pub medium: Option<String>,
    /// Number of the cache group, since 0.20.
    pub group: Option<u32>,
}

/// A message of the replay socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// A message as it was sent before.
    Batch(u64, Bytes),
    /// No more follow.
    End,
}

/// The sequence number and the batch in a live message: `[topic, sequence, batch]`.
///
/// # Errors
/// When it is not one.
pub fn live(frames: &[Bytes]) -> Result<(u64, Bytes), WireError> {
    match frames {
        [_topic, sequence, payload] => Ok((number(sequence)?, payload.clone())),
        other => Err(WireError::Frames(other.len())),
    }
}

/// What a message of the replay socket says: `["", sequence, batch]` up to vLLM 0.25, with the topic before the sequence from 0.26 on.
/// The number -1 marks the end.
///
/// # Errors
/// When it is not one.
pub fn answer(frames: &[Bytes]) -> Result<Answer, WireError> {
    let (sequence, payload) = match frames {
        [_empty, sequence, payload] | [_empty, _, sequence, payload] => (number(sequence)?, payload),
        other => return Err(WireError::Frames(other.len())),
    };
    Ok(if sequence == u64::MAX { Answer::End } else { Answer::Batch(sequence, payload.clone()) })
}

fn number(frame: &Bytes) -> Result<u64, WireError> {
    let bytes = <[u8; 8]>::try_from(frame.as_ref()).map_err(|_| WireError::Sequence(frame.len()))?;
    Ok(u64::from_be_bytes(bytes))
}

/// The events of a batch: `[time, [event…], rank]`.
///
/// # Errors
/// When it is not one.
pub fn events(payload: &[u8]) -> Result<Vec<Event>, WireError> {
    let Batch(events) = rmp_serde::from_slice(payload)?;
    Ok(events)
}

struct Batch(Vec<Event>);

impl<'de> Deserialize<'de> for Batch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(BatchVisitor)
    }
}

struct BatchVisitor;

impl<'de> Visitor<'de> for BatchVisitor {
    type Value = Batch;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an array of a time, events and a rank")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut batch: A) -> Result<Batch, A::Error> {
        let _time: Option<IgnoredAny> = batch.next_element()?;
        let events = batch.next_element()?.ok_or_else(|| A::Error::missing_field("events"))?;
        pass_over(batch)?;
        Ok(Batch(events))
    }
}

fn pass_over<'de, A: SeqAccess<'de>>(mut rest: A) -> Result<(), A::Error> {
    while rest.next_element::<IgnoredAny>()?.is_some() {}
    Ok(())
}

impl<'de> Deserialize<'de> for Event {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(EventVisitor)
    }
}

/// Names and order of the fields where events are arrays, after the tag.
const STORED: [&str; 10] = [
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
const REMOVED: [&str; 3] = ["block_hashes", "medium", "group_idx"];

struct EventVisitor;

impl<'de> Visitor<'de> for EventVisitor {
    type Value = Event;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an event as a map or an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut event: A) -> Result<Event, A::Error> {
        let tag: String = event.next_element()?.ok_or_else(|| A::Error::missing_field("type"))?;
        let names: &[&str] = match tag.as_str() {
            "BlockStored" => &STORED,
            "BlockRemoved" => &REMOVED,
            _ => &[],
        };
        let mut fields = Fields::default();
        for name in names {
            // Older releases end earlier.
            if event.next_element_seed(Field { name, fields: &mut fields })?.is_none() {
                break;
            }
        }
        pass_over(event)?;
        fields.into_event(&tag)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut event: A) -> Result<Event, A::Error> {
        let mut tag: Option<String> = None;
        let mut fields = Fields::default();
        while let Some(name) = event.next_key::<String>()? {
            if name == "type" {
                tag = Some(event.next_value()?);
                continue;
            }
            // The tag comes first. A field of an unknown event may have a known name and another meaning.
            let is_known = matches!(tag.as_deref(), None | Some("BlockStored" | "BlockRemoved"));
            let name = if is_known { name.as_str() } else { "" };
            event.next_value_seed(Field { name, fields: &mut fields })?;
        }
        fields.into_event(&tag.ok_or_else(|| A::Error::missing_field("type"))?)
    }
}

/// What was read of an event.
#[derive(Default)]
struct Fields {
    hashes: Option<Vec<u64>>,
    tokens: Option<Vec<u32>>,
    block_size: Option<u32>,
    rest: Stored,
}

impl Fields {
    fn into_event<E: de::Error>(self, tag: &str) -> Result<Event, E> {
        let Self { hashes, tokens, block_size, rest } = self;
        match tag {
            "BlockStored" => Ok(Event::Stored(Box::new(Stored {
                hashes: hashes.ok_or_else(|| E::missing_field("block_hashes"))?,
                tokens: tokens.ok_or_else(|| E::missing_field("token_ids"))?,
                block_size: block_size.ok_or_else(|| E::missing_field("block_size"))?,
                ..rest
            }))),
            "BlockRemoved" => Ok(Event::Removed(Removed {
                hashes: hashes.ok_or_else(|| E::missing_field("block_hashes"))?,
                medium: rest.medium,
                group: rest.group,
            })),
            "AllBlocksCleared" => Ok(Event::Cleared),
            _ => Ok(Event::Unknown),
        }
    }
}

/// Reads the value of one field to where it belongs.
struct Field<'a> {
    name: &'a str,
    fields: &'a mut Fields,
}

impl<'de> DeserializeSeed<'de> for Field<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<(), D::Error> {
        let fields = self.fields;
        match self.name {
            "block_hashes" => {
                let hashes: Vec<Hash> = Deserialize::deserialize(value)?;
                fields.hashes = Some(hashes.into_iter().map(|Hash(hash)| hash).collect());
            }
            "parent_block_hash" => {
                let parent: Option<Hash> = Deserialize::deserialize(value)?;
                fields.rest.parent = parent.map(|Hash(hash)| hash);
            }
            "token_ids" => fields.tokens = Some(Deserialize::deserialize(value)?),
            "block_size" => fields.block_size = Some(Deserialize::deserialize(value)?),
            "lora_id" => fields.rest.lora_id = Deserialize::deserialize(value)?,
            "medium" => fields.rest.medium = Deserialize::deserialize(value)?,
            "lora_name" => fields.rest.lora_name = Deserialize::deserialize(value)?,
            "extra_keys" => {
                let keys: Option<Vec<Extra>> = Deserialize::deserialize(value)?;
                fields.rest.extra_keys = keys.unwrap_or_default();
            }
            "group_idx" => fields.rest.group = Deserialize::deserialize(value)?,
            "kv_cache_spec_kind" => fields.rest.kind = Deserialize::deserialize(value)?,
            _ => drop(IgnoredAny::deserialize(value)?),
        }
        Ok(())
    }
}

/// 64 bits of an engine's hash. Where the engine sends the whole digest, its last eight bytes: that is the number it sends otherwise.
struct Hash(u64);

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(HashVisitor)
    }
}

struct HashVisitor;

impl Visitor<'_> for HashVisitor {
    type Value = Hash;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a hash of 64 bits, or of eight bytes or more")
    }

    fn visit_u64<E: de::Error>(self, hash: u64) -> Result<Hash, E> {
        Ok(Hash(hash))
    }

    fn visit_i64<E: de::Error>(self, hash: i64) -> Result<Hash, E> {
        Ok(Hash(hash.cast_unsigned()))
    }

    fn visit_bytes<E: de::Error>(self, hash: &[u8]) -> Result<Hash, E> {
        let last = hash.last_chunk::<8>().ok_or_else(|| E::invalid_length(hash.len(), &self))?;
        Ok(Hash(u64::from_be_bytes(*last)))
    }
}

#[cfg(test)]
mod tests;
