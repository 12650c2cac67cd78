//! Decoder for vLLM's cache messages.
//!
//! Covers frames of the live and replay sockets and the event batches in them, in every encoding
//! since 0.11. Additions of later releases are skipped. This module knows no sockets and keeps no
//! state.

use std::fmt;

use bytes::Bytes;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de};

pub(crate) use super::extra::ExtraKey;

#[derive(Debug, thiserror::Error)]
pub(crate) enum KvEventError {
    #[error("a message of {0} frames")]
    Frames(usize),
    #[error("a sequence number of {0} bytes")]
    Sequence(usize),
    #[error("a batch of events that cannot be decoded: {0}")]
    Payload(#[from] rmp_serde::decode::Error),
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

/// Events of a batch: `[time, [event…], rank]`.
///
/// # Errors
/// When the payload is no such batch.
pub(crate) fn parse_events(payload: &[u8]) -> Result<Vec<KvEvent>, KvEventError> {
    let EventBatch(events) = rmp_serde::from_slice(payload)?;
    Ok(events)
}

struct EventBatch(Vec<KvEvent>);

impl<'de> Deserialize<'de> for EventBatch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(EventBatchVisitor)
    }
}

struct EventBatchVisitor;

impl<'de> Visitor<'de> for EventBatchVisitor {
    type Value = EventBatch;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an array of a time, events and a rank")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut batch: A) -> Result<EventBatch, A::Error> {
        let _time: Option<IgnoredAny> = batch.next_element()?;
        let events = batch.next_element()?.ok_or_else(|| A::Error::missing_field("events"))?;
        skip_rest(batch)?;
        Ok(EventBatch(events))
    }
}

fn skip_rest<'de, A: SeqAccess<'de>>(mut rest: A) -> Result<(), A::Error> {
    while rest.next_element::<IgnoredAny>()?.is_some() {}
    Ok(())
}

impl<'de> Deserialize<'de> for KvEvent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(KvEventVisitor)
    }
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

struct KvEventVisitor;

impl<'de> Visitor<'de> for KvEventVisitor {
    type Value = KvEvent;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an event as a map or an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut event: A) -> Result<KvEvent, A::Error> {
        let tag: String = event.next_element()?.ok_or_else(|| A::Error::missing_field("type"))?;
        let names: &[&str] = match tag.as_str() {
            "BlockStored" => &STORED_FIELDS,
            "BlockRemoved" => &REMOVED_FIELDS,
            _ => &[],
        };
        let mut fields = EventFields::default();
        for name in names {
            // Older releases end earlier.
            if event.next_element_seed(EventField { name, fields: &mut fields })?.is_none() {
                break;
            }
        }
        skip_rest(event)?;
        fields.into_event(&tag)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut event: A) -> Result<KvEvent, A::Error> {
        let mut tag: Option<String> = None;
        let mut fields = EventFields::default();
        while let Some(name) = event.next_key::<String>()? {
            if name == "type" {
                tag = Some(event.next_value()?);
                continue;
            }
            // The tag comes first. A field of an unknown event may have a known name and another
            // meaning.
            let is_known = matches!(tag.as_deref(), None | Some("BlockStored" | "BlockRemoved"));
            let name = if is_known { name.as_str() } else { "" };
            event.next_value_seed(EventField { name, fields: &mut fields })?;
        }
        fields.into_event(&tag.ok_or_else(|| A::Error::missing_field("type"))?)
    }
}

#[derive(Default)]
struct EventFields {
    hashes: Option<Vec<u64>>,
    tokens: Option<Vec<u32>>,
    block_size: Option<u32>,
    rest: BlocksStored,
}

impl EventFields {
    fn into_event<E: de::Error>(self, tag: &str) -> Result<KvEvent, E> {
        let Self { hashes, tokens, block_size, rest } = self;
        match tag {
            "BlockStored" => Ok(KvEvent::Stored(Box::new(BlocksStored {
                hashes: hashes.ok_or_else(|| E::missing_field("block_hashes"))?,
                tokens: tokens.ok_or_else(|| E::missing_field("token_ids"))?,
                block_size: block_size.ok_or_else(|| E::missing_field("block_size"))?,
                ..rest
            }))),
            "BlockRemoved" => Ok(KvEvent::Removed(BlocksRemoved {
                hashes: hashes.ok_or_else(|| E::missing_field("block_hashes"))?,
                medium: rest.medium,
                group: rest.group,
            })),
            "AllBlocksCleared" => Ok(KvEvent::Cleared),
            _ => Ok(KvEvent::Unknown),
        }
    }
}

struct EventField<'a> {
    name: &'a str,
    fields: &'a mut EventFields,
}

impl<'de> DeserializeSeed<'de> for EventField<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<(), D::Error> {
        let fields = self.fields;
        match self.name {
            "block_hashes" => {
                let hashes: Vec<EngineHash> = Deserialize::deserialize(value)?;
                fields.hashes = Some(hashes.into_iter().map(|EngineHash(hash)| hash).collect());
            }
            "parent_block_hash" => {
                let parent: Option<EngineHash> = Deserialize::deserialize(value)?;
                fields.rest.parent = parent.map(|EngineHash(hash)| hash);
            }
            "token_ids" => fields.tokens = Some(Deserialize::deserialize(value)?),
            "block_size" => fields.block_size = Some(Deserialize::deserialize(value)?),
            "lora_id" => fields.rest.lora_id = Deserialize::deserialize(value)?,
            "medium" => fields.rest.medium = Deserialize::deserialize(value)?,
            "lora_name" => fields.rest.lora_name = Deserialize::deserialize(value)?,
            "extra_keys" => {
                let keys: Option<Vec<ExtraKey>> = Deserialize::deserialize(value)?;
                fields.rest.extra_keys = keys.unwrap_or_default();
            }
            "group_idx" => fields.rest.group = Deserialize::deserialize(value)?,
            "kv_cache_spec_kind" => fields.rest.kind = Deserialize::deserialize(value)?,
            _ => drop(IgnoredAny::deserialize(value)?),
        }
        Ok(())
    }
}

/// 64 bits of an engine's hash.
///
/// If the engine sends the whole digest, these are its last eight bytes: the number that it sends
/// otherwise.
struct EngineHash(u64);

impl<'de> Deserialize<'de> for EngineHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(EngineHashVisitor)
    }
}

struct EngineHashVisitor;

impl Visitor<'_> for EngineHashVisitor {
    type Value = EngineHash;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a hash of 64 bits, or of eight bytes or more")
    }

    fn visit_u64<E: de::Error>(self, hash: u64) -> Result<EngineHash, E> {
        Ok(EngineHash(hash))
    }

    fn visit_i64<E: de::Error>(self, hash: i64) -> Result<EngineHash, E> {
        Ok(EngineHash(hash.cast_unsigned()))
    }

    fn visit_bytes<E: de::Error>(self, hash: &[u8]) -> Result<EngineHash, E> {
        let last = hash.last_chunk::<8>().ok_or_else(|| E::invalid_length(hash.len(), &self))?;
        Ok(EngineHash(u64::from_be_bytes(*last)))
    }
}

#[cfg(test)]
mod tests;
