//! Recorded messages, and a shorthand for events, shared by the tests of this folder.

use bytes::Bytes;
use serde_json::Value;

use super::kv_event::{BlocksRemoved, BlocksStored, KvEvent};

pub(super) fn fixture(name: &str) -> String {
    let path = format!("{}/../tests/fixtures/vllm/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("cannot read {path}: {error}"))
}

/// Recorded messages, one a line; `-` is an empty frame.
pub(super) fn frames(name: &str) -> Vec<Vec<Bytes>> {
    let frame = |frame: &str| if frame == "-" { Bytes::new() } else { bytes_of(frame) };
    fixture(name).lines().map(|line| line.split(' ').map(frame).collect()).collect()
}

pub(super) fn bytes_of(hex: &str) -> Bytes {
    let digits = hex.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
    digits.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
}

/// A batch with these events, as an engine sends it.
pub(super) fn batch(events: &[Value]) -> Bytes {
    rmp_serde::to_vec(&serde_json::json!([0.5, events, 0])).unwrap().into()
}

/// Blocks of two tokens: the token of block `n` is `n`, twice, and so is its hash.
pub(super) fn stored(parent: Option<u64>, blocks: &[u64]) -> KvEvent {
    let tokens = blocks.iter().flat_map(|&block| [u32::try_from(block).unwrap(); 2]).collect();
    KvEvent::Stored(Box::new(BlocksStored { hashes: blocks.to_vec(), parent, tokens, block_size: 2, ..BlocksStored::default() }))
}

pub(super) fn removed(block: u64) -> KvEvent {
    KvEvent::Removed(BlocksRemoved { hashes: vec![block], ..BlocksRemoved::default() })
}
