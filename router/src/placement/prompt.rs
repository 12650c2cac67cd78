//! The router's knowledge of a request's prompt: its tokens and their keys if the model's tokenizer
//! is here and proved, else its text.

use std::sync::{Arc, LazyLock, OnceLock};

use bytes::Bytes;
use hostler_api::Route;
use hostler_placement::affinity::{Arrivals, InFlightBlocks, PromptKeys};
use hostler_placement::block_keys::{BlockKey, KeyChain, TEXT_BLOCK_TOKENS, token_keys};
use hostler_prompt::EncodedPrompt;
use memchr::memmem::Finder;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::prompt_reading::{BlockChain, PromptReading, PromptText};
use super::{OutputBounds, Placer, block_tokens};
use crate::engine_life::EngineLife;
use crate::fleet::{FleetView, Replica};
use crate::prompt::{EncoderKey, NotEncoded};

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
    reader: EncoderKey,
    /// Another encoder that gives the same tokens.
    equivalent_reader: Option<EncoderKey>,
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

    /// Whether a replica with this encoder sees exactly these tokens.
    #[must_use]
    pub(crate) fn is_exact_for(&self, reader: Option<EncoderKey>) -> bool {
        self.tokenized.as_ref().is_some_and(|exact| reader.is_some() && (Some(exact.reader) == reader || exact.equivalent_reader == reader))
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

impl Placer {
    /// Reads a request's prompt into tokens, if and as far as they can change the choice.
    ///
    /// If the request will have to wait, because others do or no replica has room, the whole prompt
    /// is read: by then a cache may have more of it.
    pub(crate) async fn read_prompt(&self, request: PlacementRequest, others_wait: bool) -> Prompt {
        let mut prompt = Prompt::from_text(request, "");
        if let Some(plan) = self.plan_reading(&prompt) {
            // Boxed: a request that is not tokenized should not reserve room for it.
            Box::pin(self.tokenize(&mut prompt, plan, others_wait)).await;
        }
        prompt
    }

    async fn tokenize(&self, prompt: &mut Prompt, plan: ReadingPlan, others_wait: bool) {
        let ReadingPlan { mut reader, lora_adapter, block_sizes } = plan;
        let chain = KeyChain::new(&lora_adapter, &prompt.request.cache_salt);
        let waits = others_wait || self.is_full(&self.fleet.view(), prompt.model(), Instant::now());
        let sizes_read: &[u32] = if waits { &[] } else { &block_sizes };
        let mut encoded = self.encode(&reader, prompt, chain, sizes_read).await;
        // An engine of the other dialect may agree about this form.
        if let Err(NotEncoded::FormNotProved(_)) = encoded
            && let Some(other) = self.find_other_dialect(reader, prompt)
            && let Ok(by_other) = self.encode(&other, prompt, chain, sizes_read).await
        {
            (reader, encoded) = (other, Ok(by_other));
        }
        match encoded {
            Ok(encoded) => {
                // Tokens after the first image or sound are not counted, because the router does
                // not know how many a medium has.
                let known = u32::try_from(encoded.tokens.len()).unwrap_or(u32::MAX).saturating_add(encoded.unread_tokens);
                prompt.tokenized = Some(TokenizedPrompt {
                    reader,
                    equivalent_reader: self.find_equivalent_reader(reader, prompt, &encoded).await,
                    total_tokens: known.saturating_add(encoded.batch_tokens),
                    unread_tokens: encoded.unread_tokens,
                    tokens: encoded.tokens,
                    chain,
                    keys: Mutex::default(),
                });
                if prompt.is_partially_read() {
                    prompt.in_flight_blocks = block_sizes.first().map(|size| self.overlay.add_unplaced(prompt.extent(*size)));
                }
            }
            Err(NotEncoded::NotUnderstood) => prompt.fallback_reason = "not understood",
            Err(NotEncoded::NotProved) => prompt.fallback_reason = "tokenizer not ready",
            Err(NotEncoded::FormNotProved(form)) => prompt.fallback_reason = form.unproved_reason(),
            Err(NotEncoded::Busy) => prompt.fallback_reason = "tokenizer busy",
            Err(NotEncoded::Failed(reason)) => {
                tracing::debug!(reason, "a prompt is placed by its text");
                prompt.fallback_reason = "tokenizer failed";
            }
        }
    }

    /// Reads tokens until no cache can have more of the prompt in blocks of these sizes. Without
    /// sizes, all tokens are read.
    async fn encode(&self, reader: &EncoderKey, prompt: &Prompt, chain: KeyChain, sizes: &[u32]) -> Result<EncodedPrompt, NotEncoded> {
        let mut reading = PromptReading {
            index: self.index.clone(),
            overlay: self.overlay.clone(),
            text: prompt.text.clone(),
            block_chains: sizes.iter().map(|size| BlockChain::new(*size, chain)).collect(),
        };
        let (path, body) = (prompt.path(), prompt.request.body.clone());
        self.prompts.encode((prompt.request.tenant, reader), path, body, move |progress| reading.has_more_to_match(progress)).await
    }

    /// The other encoder, if engines of both dialects serve the model and it gives the same tokens.
    ///
    /// It does unless there are tools, or messages of several parts. Recent encodings are
    /// remembered, so this costs little.
    async fn find_equivalent_reader(&self, reader: EncoderKey, prompt: &Prompt, encoded: &EncodedPrompt) -> Option<EncoderKey> {
        let other = self.find_other_dialect(reader, prompt)?;
        let read = encoded.tokens.len();
        let (path, body) = (prompt.path(), prompt.request.body.clone());
        let by_other = self.prompts.encode((prompt.request.tenant, &other), path, body, move |progress| progress.tokens.len() < read);
        by_other.await.is_ok_and(|other| other == *encoded).then_some(other)
    }

    /// An encoder of the same files with the other dialect, if a replica that the request may go to
    /// has them.
    fn find_other_dialect(&self, reader: EncoderKey, prompt: &Prompt) -> Option<EncoderKey> {
        let view = self.fleet.view();
        let mut readers = view.eligible(prompt.model(), &[]).filter_map(|(_, replica)| replica.state.encoder_key());
        readers.find(|other| other.files == reader.files && other.dialect != reader.dialect)
    }

    /// How to tokenize a prompt; `None` if its tokens cannot change the choice.
    fn plan_reading(&self, prompt: &Prompt) -> Option<ReadingPlan> {
        if !matches!(Route::of(prompt.path()), Route::ChatCompletions | Route::Completions) {
            return None;
        }
        let view = self.fleet.view();
        // With fewer than two replicas there is no choice.
        view.eligible(prompt.model(), &[]).nth(1)?;
        let (mut proved, mut unproved): (Option<EncoderKey>, Option<EncoderKey>) = (None, None);
        let mut block_sizes = Vec::new();
        for replica in view.replicas.iter().filter(|replica| replica.cache.slot.is_some()) {
            let size = block_tokens(replica);
            let block_bytes = size.map_or(0, |tokens| tokens as usize) * BYTES_PER_TOKEN;
            // The test that rules out most replicas comes first, because every request makes it for
            // each replica.
            if prompt.text.byte_len() < MIN_PROMPT_BLOCKS * block_bytes || !replica.accepts(prompt.model()) {
                continue;
            }
            let Some(reader) = replica.state.encoder_key() else { continue };
            if proved.is_none() && unproved != Some(reader) {
                let is_proved = self.prompts.status(&reader).is_proved();
                if is_proved { proved = Some(reader) } else { unproved = unproved.or(Some(reader)) }
            }
            if let Some(size) = size.filter(|size| !block_sizes.contains(size)) {
                block_sizes.push(size);
            }
        }
        match proved {
            Some(reader) => Some(ReadingPlan { reader, lora_adapter: adapter_name(&view, prompt.model()), block_sizes }),
            // Encoding will report that no encoder is ready.
            None => Some(ReadingPlan { reader: unproved?, lora_adapter: String::new(), block_sizes }),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
struct ReadingPlan {
    reader: EncoderKey,
    /// The request's LoRA adapter; empty for none.
    lora_adapter: String,
    /// Block sizes in tokens of all replicas that the request may go to and whose caches are known.
    block_sizes: Vec<u32>,
}

/// The name by which an engine separates the blocks of a LoRA adapter; empty for the model itself.
fn adapter_name(view: &FleetView, model: Option<&str>) -> String {
    let Some(model) = model else { return String::new() };
    let is_adapter = view.replicas.iter().flat_map(|replica| &replica.state.models).any(|known| known.id == model && known.is_adapter);
    if is_adapter { model.to_owned() } else { String::new() }
}

#[cfg(test)]
pub(super) mod tests;
