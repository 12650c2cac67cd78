//! Keys of KV blocks: a chain of hashes over token ids, so that one key stands for a block and
//! everything before it.
//!
//! The agent computes them from the tokens in its engine's events, the router from the tokens of a
//! request. Engines hash their blocks differently in each release; their hashes are never
//! reproduced here.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Hash that identifies a block of tokens and everything before it.
pub type BlockKey = u64;

/// Bytes of text in one block of the text level, which is used if tokens are unknown.
pub const TEXT_BLOCK_BYTES: usize = 256;

/// Tokens per text block. About four bytes of prose or code make a token.
pub const TEXT_BLOCK_TOKENS: u32 = 64;

/// Key so far; each block continues it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyChain(BlockKey);

impl KeyChain {
    /// Start of every sequence with this LoRA adapter and cache salt; empty means none.
    ///
    /// Engines separate the blocks of different adapters and salts.
    #[must_use]
    pub fn new(lora: &str, salt: &str) -> Self {
        let lora = xxh3_64_with_seed(lora.as_bytes(), 1);
        Self(xxh3_64_with_seed(salt.as_bytes(), lora))
    }

    /// Resumes after the block with this key.
    #[must_use]
    pub fn resume(key: BlockKey) -> Self {
        Self(key)
    }

    /// Adds a block and returns its key.
    pub fn push(&mut self, tokens: &[u32]) -> BlockKey {
        self.fold(xxh3_64(bytemuck::cast_slice(tokens)))
    }

    /// Adds a block that more than its tokens identifies, such as an image, and returns its key.
    pub fn push_with_extra(&mut self, tokens: &[u32], more: &[u8]) -> BlockKey {
        self.fold(xxh3_64(more));
        self.push(tokens)
    }

    pub fn push_text(&mut self, text: &[u8]) -> BlockKey {
        self.fold(xxh3_64(text))
    }

    /// Folds a block's hash into the chain by one wide multiplication.
    ///
    /// Each block is hashed separately, so the processor hashes several at a time. With the key as
    /// the next block's seed it could not (1.6 times as fast for 100k tokens).
    #[expect(clippy::cast_possible_truncation, reason = "both halves of the product are used")]
    fn fold(&mut self, block: u64) -> BlockKey {
        let product = u128::from(self.0 ^ 0x9e37_79b9_7f4a_7c15) * u128::from(block ^ 0xd1b5_4a32_d192_ed03);
        self.0 = (product >> 64) as u64 ^ product as u64;
        self.0
    }
}

/// Keys of the whole blocks of `tokens`.
///
/// # Panics
/// When a block has no tokens.
#[must_use]
pub fn token_keys(mut chain: KeyChain, tokens: &[u32], block_tokens: usize) -> Vec<BlockKey> {
    tokens.chunks_exact(block_tokens).map(|block| chain.push(block)).collect()
}

/// Keys of the whole blocks of a text, for the text level.
#[must_use]
pub fn text_keys(mut chain: KeyChain, text: &[u8]) -> Vec<BlockKey> {
    text.chunks_exact(TEXT_BLOCK_BYTES).map(|block| chain.push_text(block)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_prefixes_have_equal_keys_up_to_their_first_difference() {
        let tokens: Vec<u32> = (0..100).collect();
        let mut other = tokens.clone();
        other[40] = 7;
        let (left, right) = (token_keys(KeyChain::new("", ""), &tokens, 16), token_keys(KeyChain::new("", ""), &other, 16));
        assert_eq!(left.len(), 6, "only whole blocks have a key");
        assert_eq!(left[..2], right[..2]);
        assert!((2..6).all(|block| left[block] != right[block]));
    }

    #[test]
    fn adapters_and_salts_have_separate_keys() {
        let keys = |lora, salt| token_keys(KeyChain::new(lora, salt), &[1, 2], 2);
        assert_ne!(keys("", ""), keys("a", ""));
        assert_ne!(keys("", "a"), keys("a", ""));
        assert_ne!(keys("", "a"), keys("", "b"));
    }

    #[test]
    fn a_chain_continues_where_another_ended() {
        let mut chain = KeyChain::new("", "");
        let first = chain.push(&[1, 2]);
        assert_eq!(KeyChain::resume(first).push(&[3, 4]), chain.push(&[3, 4]));
    }
}
