//! Decides how far a prompt is read into tokens: as long as some cache may have what has been read.
//! The rest is cached nowhere, so its tokens could not change the choice, and they are most of the
//! cost of a long prompt.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use hostler_placement::affinity::{CacheIndex, InFlightOverlay, PromptToMatch};
use hostler_placement::block_keys::{BlockKey, KeyChain, text_keys};
use hostler_prompt::Progress;

/// The text of a prompt as in the request, and its block keys, made on first use.
#[derive(Debug, Default)]
pub(super) struct PromptText {
    /// The part of the text that is compared.
    parts: Vec<Bytes>,
    /// Length of the whole text.
    byte_len: usize,
    /// The model's name starts the chain of keys.
    model: String,
    salt: String,
    block_keys: OnceLock<Arc<[BlockKey]>>,
}

impl PromptText {
    pub(super) fn new((parts, byte_len): (Vec<Bytes>, usize), model: Option<&str>, salt: &str) -> Self {
        Self { parts, byte_len, model: model.unwrap_or_default().to_owned(), salt: salt.to_owned(), block_keys: OnceLock::new() }
    }

    pub(super) fn byte_len(&self) -> usize {
        self.byte_len
    }

    pub(super) fn block_keys(&self) -> &Arc<[BlockKey]> {
        self.block_keys.get_or_init(|| {
            let chain = KeyChain::new(&self.model, &self.salt);
            match &self.parts[..] {
                [] => Arc::default(),
                [text] => text_keys(chain, text).into(),
                texts => text_keys(chain, &texts.concat()).into(),
            }
        })
    }
}

/// Decides how far to read a prompt, by present and future caches.
#[derive(Debug)]
pub(super) struct PromptReading {
    pub(super) index: Arc<CacheIndex>,
    pub(super) overlay: Arc<InFlightOverlay>,
    pub(super) text: Arc<PromptText>,
    /// Chains, one per block size of the replicas.
    pub(super) block_chains: Vec<BlockChain>,
}

#[derive(Debug)]
pub(super) struct BlockChain {
    block_size: usize,
    chain: KeyChain,
    keys: Vec<BlockKey>,
}

impl BlockChain {
    pub(super) fn new(size: u32, chain: KeyChain) -> Self {
        Self { block_size: size.max(1) as usize, chain, keys: Vec::new() }
    }

    fn extend(&mut self, tokens: &[u32]) {
        let new = tokens[self.keys.len() * self.block_size..].chunks_exact(self.block_size);
        self.keys.extend(new.map(|block| self.chain.push(block)));
    }
}

impl PromptReading {
    /// Whether more than what was read may be cached, or that is unknown.
    ///
    /// The latter holds without a whole block yet, or if the request's text does not represent its
    /// prompt, as with long tools or further prompts.
    pub(super) fn has_more_to_match(&mut self, progress: Progress<'_>) -> bool {
        let Self { index, overlay, text, block_chains } = self;
        let is_told = !block_chains.is_empty() && (progress.total_bytes / 2..4 * progress.total_bytes).contains(&text.byte_len());
        !is_told
            || block_chains.iter_mut().any(|blocks| {
                blocks.extend(progress.tokens);
                let Some(last) = blocks.keys.last() else { return true };
                index.has(*last) || {
                    let text: &[BlockKey] = if overlay.has_partly_read() { text.block_keys() } else { &[] };
                    // The request has the text in another form, but its parts are about as long.
                    let text_read = text.len() * progress.bytes / progress.total_bytes.max(1);
                    overlay.goes_beyond(&PromptToMatch { text, ..PromptToMatch::whole(&blocks.keys) }, text_read)
                }
            })
    }
}
