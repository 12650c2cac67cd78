//! KV cache events in vLLM 0.32's encoding: maps with a `type`, defaults left out, in
//! a batch that is an array. `publisher` sends them; the scheduler makes them.

mod config;
mod publisher;
#[cfg(test)]
mod tests;

use std::borrow::Cow;

pub use config::KvEventsConfig;
pub use publisher::Publisher;
use serde::Serialize;

/// Keys that a block's hash depends on besides its tokens: here a LoRA adapter's name and a cache
/// salt.
pub type ExtraKeys = Vec<Option<Vec<String>>>;

/// One change of the cache.
///
/// Fields are in the order of the wire; an absent field has the default of vLLM's own type.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(serde::Deserialize))]
#[serde(tag = "type")]
pub enum Event {
    BlockStored {
        block_hashes: Vec<u64>,
        parent_block_hash: Option<u64>,
        token_ids: Vec<u32>,
        block_size: usize,
        lora_id: Option<u32>,
        medium: Option<Cow<'static, str>>,
        lora_name: Option<Cow<'static, str>>,
        #[serde(skip_serializing_if = "Option::is_none", default)]
        extra_keys: Option<ExtraKeys>,
        #[serde(skip_serializing_if = "Option::is_none", default)]
        group_idx: Option<u32>,
        #[serde(skip_serializing_if = "Option::is_none", default)]
        kv_cache_spec_kind: Option<Cow<'static, str>>,
    },
    BlockRemoved {
        block_hashes: Vec<u64>,
        medium: Option<Cow<'static, str>>,
        #[serde(skip_serializing_if = "Option::is_none", default)]
        group_idx: Option<u32>,
    },
    AllBlocksCleared,
}

impl Event {
    pub fn stored(hashes: Vec<u64>, parent: Option<u64>, tokens: Vec<u32>, keys: ExtraKeys) -> Self {
        Self::BlockStored {
            block_size: tokens.len() / hashes.len().max(1),
            block_hashes: hashes,
            parent_block_hash: parent,
            token_ids: tokens,
            lora_id: None,
            medium: Some(Cow::Borrowed("GPU")),
            lora_name: None,
            extra_keys: Some(keys),
            group_idx: Some(0),
            kv_cache_spec_kind: Some(Cow::Borrowed("full_attention")),
        }
    }

    /// Adds the LoRA adapter with which the blocks were computed.
    pub(crate) fn of_adapter(mut self, adapter: Option<String>) -> Self {
        if let (Self::BlockStored { lora_name, .. }, Some(adapter)) = (&mut self, adapter) {
            *lora_name = Some(Cow::Owned(adapter));
        }
        self
    }

    /// The same blocks in the host's memory. vLLM leaves their extra keys out.
    pub(crate) fn on_host(mut self) -> Self {
        if let Self::BlockStored { medium, extra_keys, .. } = &mut self {
            (*medium, *extra_keys) = (Some(Cow::Borrowed("CPU")), None);
        }
        self
    }

    pub(crate) fn removed_from_host(hash: u64) -> Self {
        Self::BlockRemoved { block_hashes: vec![hash], medium: Some(Cow::Borrowed("CPU")), group_idx: Some(0) }
    }

    /// Removal of one block; vLLM sends one event for each.
    pub fn removed(hash: u64) -> Self {
        Self::BlockRemoved { block_hashes: vec![hash], medium: Some(Cow::Borrowed("GPU")), group_idx: Some(0) }
    }
}

/// Encodes the events of one step. `timestamp` is in seconds since 1970.
pub(crate) fn encode(timestamp: f64, events: &[Event], rank: u32) -> Vec<u8> {
    let mut payload = Vec::with_capacity(256);
    let mut serializer = rmp_serde::Serializer::new(&mut payload).with_struct_map();
    (timestamp, events, rank).serialize(&mut serializer).expect("writing to memory cannot fail");
    payload
}
