//! Reads a request's prompt into tokens, if they can change the choice: with an encoder of the
//! router's own, or else by asking an engine.

use hostler_api::Route;
use hostler_placement::block_keys::KeyChain;
use hostler_prompt::EncodedPrompt;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::{BYTES_PER_TOKEN, MIN_PROMPT_BLOCKS, PlacementRequest, Prompt, TokenizedPrompt, mentions_media};
use crate::fleet::{FleetView, Replica};
use crate::placement::prompt_reading::{BlockChain, PromptReading};
use crate::placement::{Placer, block_tokens};
use crate::prompt::{EncoderKey, MAX_RENDERED_BYTES, NotEncoded, RenderingFailure, TokenRules};

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
        let chain = KeyChain::new(&plan.lora_adapter, &prompt.request.cache_salt);
        let encoded = match plan.reader {
            Some(reader) => self.encode_by(reader, prompt, &plan, others_wait).await,
            None => Err(NotEncoded::NotUnderstood),
        };
        let read = match encoded {
            // Only the engine knows how it reads such a prompt.
            Err(NotEncoded::FormNotProved(_) | NotEncoded::NotProved | NotEncoded::NotUnderstood) if plan.may_render => {
                match self.render(prompt).await {
                    Some(rendered) => rendered.map(|(rules, tokens)| (rules, None, tokens)),
                    None => encoded,
                }
            }
            encoded => encoded,
        };
        match read {
            Ok((rules, equivalent_rules, encoded)) => {
                // Tokens after the first image or sound are not counted, because the router does
                // not know how many a medium has.
                let known = u32::try_from(encoded.tokens.len()).unwrap_or(u32::MAX).saturating_add(encoded.unread_tokens);
                prompt.tokenized = Some(TokenizedPrompt {
                    rules,
                    equivalent_rules,
                    total_tokens: known.saturating_add(encoded.batch_tokens),
                    unread_tokens: encoded.unread_tokens,
                    tokens: encoded.tokens,
                    chain,
                    keys: Mutex::default(),
                });
                if prompt.is_partially_read() {
                    prompt.in_flight_blocks = plan.block_sizes.first().map(|size| self.overlay.add_unplaced(prompt.extent(*size)));
                }
            }
            Err(NotEncoded::NotUnderstood) => prompt.fallback_reason = "not understood",
            Err(NotEncoded::NotProved) => prompt.fallback_reason = "tokenizer not ready",
            Err(NotEncoded::FormNotProved(form)) => prompt.fallback_reason = form.unproved_reason(),
            Err(NotEncoded::Busy) => prompt.fallback_reason = "tokenizer busy",
            Err(NotEncoded::NotRendered(failure)) => prompt.fallback_reason = failure.as_str(),
            Err(NotEncoded::Failed(reason)) => {
                tracing::debug!(reason, "a prompt is placed by its text");
                prompt.fallback_reason = "tokenizer failed";
            }
        }
    }

    /// Reads a prompt with an encoder of our own.
    async fn encode_by(
        &self,
        mut reader: EncoderKey,
        prompt: &Prompt,
        plan: &ReadingPlan,
        others_wait: bool,
    ) -> Result<ReadTokens, NotEncoded> {
        let chain = KeyChain::new(&plan.lora_adapter, &prompt.request.cache_salt);
        let waits = others_wait || self.is_full(&self.fleet.view(), prompt.model(), Instant::now());
        let sizes_read: &[u32] = if waits { &[] } else { &plan.block_sizes };
        let mut encoded = self.encode(&reader, prompt, chain, sizes_read).await;
        // An engine of the other dialect may agree about this form.
        if let Err(NotEncoded::FormNotProved(_)) = encoded
            && let Some(other) = self.find_other_dialect(reader, prompt)
            && let Ok(by_other) = self.encode(&other, prompt, chain, sizes_read).await
        {
            (reader, encoded) = (other, Ok(by_other));
        }
        let encoded = encoded?;
        let equivalent = self.find_equivalent_reader(reader, prompt, &encoded).await;
        Ok((reader.into(), equivalent.map(TokenRules::from), encoded))
    }

    /// The tokens that an engine makes of a prompt, and its rules; `None` if no engine is to be
    /// asked.
    ///
    /// The least busy engine is asked. All with its rules make the same tokens.
    async fn render(&self, prompt: &Prompt) -> Option<Result<(TokenRules, EncodedPrompt), NotEncoded>> {
        let request = &prompt.request;
        if request.is_suspect || request.body.len() > MAX_RENDERED_BYTES || mentions_media(&request.body) {
            return None;
        }
        let (view, now) = (self.fleet.view().clone(), Instant::now());
        let offered = |replica: &Replica| !replica.lease_lapsed && replica.local_load.rendering.is_offered(replica.epoch);
        let offering: Vec<_> = view.eligible(prompt.model(), &[]).map(|(_, replica)| replica).filter(|replica| offered(replica)).collect();
        if offering.is_empty() {
            return None;
        }
        let in_flight = |replica: &Replica| replica.local_load.in_flight().saturating_add(replica.load.in_flight_elsewhere);
        let free = offering.into_iter().filter(|replica| replica.local_load.rendering.may_be_asked(replica.epoch, now));
        let Some(replica) = free.min_by_key(|replica| in_flight(replica)) else {
            return Some(Err(NotEncoded::NotRendered(RenderingFailure::Busy)));
        };
        let engine = replica.rendering_engine();
        let rendered = self.prompts.render(request.tenant, &engine, Route::of(prompt.path()), request.body.clone()).await;
        Some(rendered.map(|tokens| (replica.state.token_rules(), tokens)))
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
    pub(super) fn plan_reading(&self, prompt: &Prompt) -> Option<ReadingPlan> {
        if !matches!(Route::of(prompt.path()), Route::ChatCompletions | Route::Completions) {
            return None;
        }
        let view = self.fleet.view();
        // With fewer than two replicas there is no choice.
        view.eligible(prompt.model(), &[]).nth(1)?;
        let (mut proved, mut unproved): (Option<EncoderKey>, Option<EncoderKey>) = (None, None);
        let (mut block_sizes, mut may_render) = (Vec::new(), false);
        for replica in view.replicas.iter().filter(|replica| replica.cache.slot.is_some()) {
            let size = block_tokens(replica);
            let block_bytes = size.map_or(0, |tokens| tokens as usize) * BYTES_PER_TOKEN;
            // The test that rules out most replicas comes first, because every request makes it for
            // each replica.
            if prompt.text.byte_len() < MIN_PROMPT_BLOCKS * block_bytes || !replica.accepts(prompt.model()) {
                continue;
            }
            may_render = may_render || replica.local_load.rendering.is_offered(replica.epoch);
            let Some(reader) = replica.state.encoder_key() else { continue };
            if proved.is_none() && unproved != Some(reader) {
                let is_proved = self.prompts.status(&reader).is_proved();
                if is_proved { proved = Some(reader) } else { unproved = unproved.or(Some(reader)) }
            }
            if let Some(size) = size.filter(|size| !block_sizes.contains(size)) {
                block_sizes.push(size);
            }
        }
        // Without a proved encoder, encoding will report that none is ready.
        let reader = proved.or(unproved);
        if reader.is_none() && !may_render {
            return None;
        }
        Some(ReadingPlan { reader, lora_adapter: adapter_name(&view, prompt.model()), block_sizes, may_render })
    }
}

/// The rules by which replicas read a prompt, others of the same outcome, and its tokens.
type ReadTokens = (TokenRules, Option<TokenRules>, EncodedPrompt);

#[derive(Debug, PartialEq, Eq)]
pub(super) struct ReadingPlan {
    /// `None` if no replica's files are known.
    pub(super) reader: Option<EncoderKey>,
    /// The request's LoRA adapter; empty for none.
    pub(super) lora_adapter: String,
    /// Block sizes in tokens of all replicas that the request may go to and whose files and caches
    /// are known.
    pub(super) block_sizes: Vec<u32>,
    /// Whether an engine offers to say its tokens.
    pub(super) may_render: bool,
}

/// The name by which an engine separates the blocks of a LoRA adapter; empty for the model itself.
fn adapter_name(view: &FleetView, model: Option<&str>) -> String {
    let Some(model) = model else { return String::new() };
    let is_adapter = view.replicas.iter().flat_map(|replica| &replica.state.models).any(|known| known.id == model && known.is_adapter);
    if is_adapter { model.to_owned() } else { String::new() }
}
