//! A request as the simulator sees it: no text and no tokens, only the keys of its blocks and two
//! lengths.
//!
//! Equal content means equal keys. Only shared content matters here, so nothing else is kept.

use std::sync::Arc;

use hostler_placement::block_keys::{BlockKey, KeyChain};

/// Tokens in a block, vLLM's default.
pub(crate) const BLOCK_TOKENS: u32 = 16;

/// A request and the answer that it will get.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Keys of the whole blocks of prompt and answer together, and maybe of later turns of the same
    /// conversation.
    pub keys: Arc<[BlockKey]>,
    pub prompt: u32,
    pub output: u32,
    pub session: u64,
}

impl Request {
    /// Keys of the whole blocks of the prompt.
    pub(crate) fn prompt_keys(&self) -> &[BlockKey] {
        &self.keys[..(self.prompt / BLOCK_TOKENS) as usize]
    }
}

/// A part of a conversation, with this many tokens. Segments of the same name have equal content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) name: u64,
    pub(crate) tokens: u32,
}

/// Keys of the whole blocks of these segments, one after another.
pub(crate) fn keys(segments: &[Segment]) -> Arc<[BlockKey]> {
    let total: u32 = segments.iter().map(|segment| segment.tokens).sum();
    let mut keys = Vec::with_capacity((total / BLOCK_TOKENS) as usize);
    let mut chain = KeyChain::new("", "");
    // Pieces of segments in the block so far: the name in two halves, where the piece begins, how
    // long it is.
    let mut block: Vec<u32> = Vec::new();
    let mut room = BLOCK_TOKENS;
    for segment in segments {
        let mut at = 0;
        while at < segment.tokens {
            let piece = room.min(segment.tokens - at);
            let [high, low] = [segment.name >> 32, segment.name & 0xffff_ffff].map(|half| u32::try_from(half).unwrap_or(u32::MAX));
            block.extend([high, low, at, piece]);
            at += piece;
            room -= piece;
            if room == 0 {
                keys.push(chain.push(&block));
                block.clear();
                room = BLOCK_TOKENS;
            }
        }
    }
    keys.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(name: u64, tokens: u32) -> Segment {
        Segment { name, tokens }
    }

    #[test]
    fn a_later_turn_continues_the_earlier_turns_keys() {
        let turn = keys(&[segment(1, 100), segment(2, 30)]);
        let later = keys(&[segment(1, 100), segment(2, 30), segment(3, 50)]);
        assert_eq!((turn.len(), later.len()), (8, 11));
        assert_eq!(turn[..], later[..8]);
    }

    #[test]
    fn equal_content_after_another_prefix_is_another_block() {
        let plain = keys(&[segment(1, 64)]);
        let shifted = keys(&[segment(9, 16), segment(1, 64)]);
        assert!(plain.iter().all(|key| !shifted.contains(key)));
        assert_eq!(keys(&[segment(1, 32), segment(2, 32)])[..2], plain[..2]);
    }
}
