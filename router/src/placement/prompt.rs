//! The router's knowledge of a request's prompt: its tokens and their keys if the model's tokenizer
//! is here and proved, or an engine has said them; else its text.

mod reading;

use std::sync::{Arc, LazyLock, OnceLock};

use bytes::Bytes;
use hostler_placement::affinity::{Arrivals, InFlightBlocks, PromptKeys};
use hostler_placement::block_keys::{BlockKey, KeyChain, TEXT_BLOCK_TOKENS, token_keys};
use memchr::memmem::Finder;
use parking_lot::Mutex;

use super::OutputBounds;
use super::prompt_reading::PromptText;
use crate::engine_life::EngineLife;
use crate::fleet::Replica;
use crate::prompt::TokenRules;

/// Bytes of text per token, if tokens are not counted.
const BYTES_PER_TOKEN: usize = 4;

/// Text in a request's JSON that marks a medium, by URL or as bytes. Quotes within strings are
/// escaped, so a text that only mentions a marker does not match.
static MEDIA_MARKERS: LazyLock<[Finder<'static>; 5]> =
    LazyLock::new(|| ["_url\"", "\"input_audio\"", "\"input_image\"", "\"base64\"", "\"file_data\""].map(Finder::new));

/// Whether a part of a request's JSON seems to contain a medium.
#[must_use]
pub(crate) fn mentions_media(part: &[u8]) -> bool {
    MEDIA_MARKERS.iter().any(|marker| marker.find(part).is_some())
}

/// Most bytes of a prompt that are searched for media and compared as text: a million tokens, and
/// two milliseconds.
const MAX_COMPARED_BYTES: usize = 4 * 1024 * 1024;

/// Fewest blocks of a prompt that is tokenized. A shorter prompt's cached part is worth less than
/// tokenizing costs.
const MIN_PROMPT_BLOCKS: usize = 2;

/// A prompt of this many contexts does not fit. Where its tokens are estimated by its text, they
/// may be a quarter of the estimate: runs of blanks make tokens of 16 bytes.
const SURELY_TOO_LONG: u64 = 4;

#[derive(Debug, Clone, Default)]
pub(crate) struct PlacementRequest {
    /// Whose turn it takes to be read: `QueueShare::tenant`.
    pub tenant: u64,
    pub model: Option<String>,
    /// The effective route: the path without its query, or the carried route of an invocation.
    pub path: String,
    pub body: Bytes,
    /// The parts of the body that make the prompt, unchanged.
    pub prompt_parts: Vec<Bytes>,
    /// The `cache_salt`; empty if there is none. Engines keep the blocks of different salts apart.
    pub cache_salt: String,
    pub output_bounds: OutputBounds,
    /// Sequences that the engine computes for the request. 0 counts as 1.
    pub sequences: u32,
    pub is_stream: bool,
    /// Whether the request or its tenant may have crashed engines. Then it is sent to none that it
    /// was not placed on.
    pub is_suspect: bool,
    /// The only engine that can answer the request, because it keeps what the request refers to.
    pub required_engine: Option<EngineLife>,
}

/// A request's prompt, as far as it is understood.
#[derive(Debug)]
pub(crate) struct Prompt {
    request: PlacementRequest,
    text: Arc<PromptText>,
    tokenized: Option<TokenizedPrompt>,
    /// Why the prompt has no tokens, for operators; empty when it has some or needs none.
    pub fallback_reason: &'static str,
    arrivals: OnceLock<Arrivals>,
    /// Set while the prompt is here but not read to its end.
    in_flight_blocks: Option<InFlightBlocks>,
}

#[derive(Debug)]
struct TokenizedPrompt {
    /// By which replicas the prompt is read so.
    rules: TokenRules,
    /// Other replicas that read it so.
    equivalent_rules: Option<TokenRules>,
    /// Tokens that were read.
    tokens: Vec<u32>,
    /// About how many further tokens were not read.
    unread_tokens: u32,
    /// All tokens, including those of a batch's further prompts.
    total_tokens: u32,
    chain: KeyChain,
    /// Block keys for each requested block size, nearly always one.
    keys: Mutex<Vec<(u32, Arc<[BlockKey]>)>>,
}

impl Prompt {
    /// A prompt without tokens. They are not needed, or `fallback_reason` says why there are none.
    #[must_use]
    pub(crate) fn from_text(mut request: PlacementRequest, fallback_reason: &'static str) -> Self {
        let text = Arc::new(request.take_prompt_text());
        Self { request, text, tokenized: None, fallback_reason, arrivals: OnceLock::new(), in_flight_blocks: None }
    }

    #[must_use]
    pub(crate) fn model(&self) -> Option<&str> {
        self.request.model.as_deref()
    }

    #[must_use]
    pub(crate) fn required_engine(&self) -> Option<&EngineLife> {
        self.request.required_engine.as_ref()
    }

    /// Whether a replica can answer the request: its front-end has the route, and it is the
    /// required engine, if there is one.
    #[must_use]
    pub(crate) fn is_answerable_by(&self, replica: &Replica) -> bool {
        replica.has_route(&self.request.path) && self.required_engine().is_none_or(|only| replica.has_life(only))
    }

    #[must_use]
    pub(crate) fn path(&self) -> &str {
        &self.request.path
    }

    #[must_use]
    pub(crate) fn is_stream(&self) -> bool {
        self.request.is_stream
    }

    /// Sequences that the engine computes for the request; at least 1.
    #[must_use]
    pub(crate) fn sequences(&self) -> u32 {
        self.request.sequences.max(1)
    }

    #[must_use]
    pub(crate) fn output_bounds(&self) -> OutputBounds {
        self.request.output_bounds
    }

    /// Tokens of the prompt, or an estimate if they are not counted.
    #[must_use]
    pub(crate) fn token_count(&self) -> u32 {
        let estimate = || u32::try_from(self.text.byte_len().div_ceil(BYTES_PER_TOKEN)).unwrap_or(u32::MAX);
        self.tokenized.as_ref().map_or_else(estimate, |exact| exact.total_tokens)
    }

    /// Tokens that an engine with this context computes. An engine refuses a prompt that is too
    /// long for it, so such a prompt keeps nobody waiting.
    #[must_use]
    pub(crate) fn computed_tokens(&self, max_context: u64) -> u32 {
        let tokens = self.token_count();
        if u64::from(tokens) > max_context.saturating_mul(SURELY_TOO_LONG) { 0 } else { tokens }
    }

    /// Whether a replica with these rules sees exactly these tokens.
    #[must_use]
    pub(crate) fn is_exact_for(&self, rules: TokenRules) -> bool {
        self.tokenized.as_ref().is_some_and(|exact| exact.rules == rules || exact.equivalent_rules == Some(rules))
    }

    /// Block keys of the prompt's whole blocks of `size` tokens, as far as it was read; empty if
    /// its tokens are not known.
    #[must_use]
    pub(crate) fn token_keys(&self, size: u32) -> Arc<[BlockKey]> {
        let Some(exact) = &self.tokenized else { return Arc::default() };
        let mut known = exact.keys.lock();
        if let Some((_, keys)) = known.iter().find(|(of, _)| *of == size) {
            return keys.clone();
        }
        let keys: Arc<[BlockKey]> = token_keys(exact.chain, &exact.tokens, size.max(1) as usize).into();
        known.push((size, keys.clone()));
        keys
    }

    /// The blocks of `size` tokens that a request in flight with this prompt will have cached.
    #[must_use]
    pub(crate) fn extent(&self, size: u32) -> PromptKeys {
        PromptKeys { keys: self.token_keys(size), text: if self.is_partially_read() { self.text_keys().clone() } else { Arc::default() } }
    }

    fn is_partially_read(&self) -> bool {
        self.tokenized.as_ref().is_some_and(|exact| exact.unread_tokens > 0)
    }

    /// Whether most tokens are estimated because they were not read.
    #[must_use]
    pub(crate) fn is_estimate(&self) -> bool {
        self.tokenized.as_ref().is_some_and(|exact| exact.unread_tokens as usize > exact.tokens.len())
    }

    /// Number of whole blocks of `size` tokens, including unread ones.
    #[must_use]
    pub(crate) fn block_count(&self, size: u32) -> u32 {
        let tokens = |exact: &TokenizedPrompt| u32::try_from(exact.tokens.len()).unwrap_or(u32::MAX).saturating_add(exact.unread_tokens);
        self.tokenized.as_ref().map_or(0, tokens) / size.max(1)
    }

    #[must_use]
    pub(crate) fn text_keys(&self) -> &Arc<[BlockKey]> {
        self.text.block_keys()
    }

    /// How often the prompt's beginnings have lately been requested. `count` is called once.
    pub(crate) fn arrivals(&self, count: impl FnOnce(&[BlockKey], u32) -> Arrivals) -> &Arrivals {
        self.arrivals.get_or_init(|| {
            let size = self.tokenized.as_ref().and_then(|exact| exact.keys.lock().first().map(|(size, _)| *size));
            match size {
                Some(size) => count(&self.token_keys(size), size),
                None => count(self.text_keys(), TEXT_BLOCK_TOKENS),
            }
        })
    }
}

impl PlacementRequest {
    /// Takes out the text that can be counted and compared.
    fn take_prompt_text(&mut self) -> PromptText {
        let mut parts = std::mem::take(&mut self.prompt_parts);
        let mut byte_len = parts.iter().map(Bytes::len).sum();
        truncate(&mut parts, MAX_COMPARED_BYTES);
        if let Some(at) = find_media(&parts) {
            truncate(&mut parts, at);
            byte_len = at;
        }
        PromptText::new((parts, byte_len), self.model.as_deref(), &self.cache_salt)
    }
}

/// Keeps the first `room` bytes of a text in parts.
fn truncate(text: &mut Vec<Bytes>, mut room: usize) {
    text.retain_mut(|part| {
        part.truncate(room);
        room -= part.len();
        !part.is_empty()
    });
}

/// Where the first image, sound or video begins, whose number of tokens the router cannot know.
fn find_media(text: &[Bytes]) -> Option<usize> {
    let mut before = 0;
    text.iter().find_map(|part| {
        let found = MEDIA_MARKERS.iter().filter_map(|marker| marker.find(part)).min();
        before += part.len();
        found.map(|at| before - part.len() + at)
    })
}

#[cfg(test)]
pub(super) mod tests;
