//! Common parts of the answers of all generation APIs: id, time, model, usage, and the collection
//! of a whole answer.

use std::future::poll_fn;
use std::io::Write;

use super::errors::ApiError;
use super::options::{Options, PromptEcho};
use super::{random_id, unix_seconds};
use crate::VLLM_VERSION;
use crate::args::EngineArgs;
use crate::engine::{EngineHandle, Generation, GenerationRequest, Prompt};
use crate::mailbox::Finish;
use crate::tokens::hash_text;

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) fingerprint: String,
    pub(crate) options: Options,
    /// Tokens of each prompt, kept if the request requires them.
    pub(crate) prompts: Vec<Vec<u32>>,
    pub(crate) prompt_tokens: usize,
    /// Whether usage includes the cached tokens.
    pub(crate) details: bool,
    block_size: usize,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    pub(crate) prompt: usize,
    pub(crate) generated: usize,
    /// Cached prompt tokens, if they should be included.
    pub(crate) cached: Option<usize>,
    /// Prompt tokens that are cached from now on, if included.
    pub(crate) newly_cached: Option<usize>,
}

#[derive(Debug, Default)]
pub(crate) struct Collected {
    pub(crate) tokens: Vec<u32>,
    pub(crate) finish: Option<Finish>,
}

impl Answer {
    /// Starts the generation of an answer with this `id`.
    pub(crate) async fn start(
        core: &EngineHandle,
        args: &EngineArgs,
        id: String,
        options: Options,
        prompts: Vec<Prompt>,
    ) -> Result<(Self, Generation), ApiError> {
        let kept = if options.return_token_ids || options.echo != PromptEcho::None {
            prompts.iter().map(|prompt| prompt.tokens.clone()).collect()
        } else {
            Vec::new()
        };
        let answer = Self {
            id,
            created: unix_seconds(),
            model: options.adapter.clone().unwrap_or_else(|| args.served_name().to_owned()),
            fingerprint: fingerprint(args),
            prompt_tokens: prompts.iter().map(|prompt| prompt.tokens.len()).sum(),
            prompts: kept,
            details: args.enable_prompt_tokens_details,
            block_size: args.block_size,
            options,
        };
        let work = GenerationRequest {
            prompts,
            choices: answer.options.choices,
            seed: answer.options.seed,
            salt: answer.options.salt.clone(),
            adapter: answer.options.adapter.clone(),
            structured: answer.options.structured.clone(),
        };
        let generation = core.submit(work).await?;
        Ok((answer, generation))
    }

    pub(crate) fn usage(&self, generated: usize, cached_tokens: usize) -> Usage {
        Usage { prompt: self.prompt_tokens, generated, cached: self.details.then_some(cached_tokens), newly_cached: None }
    }

    /// Usage for a chat, whose details say more.
    pub(crate) fn chat_usage(&self, generated: usize, cached_tokens: usize) -> Usage {
        let cacheable = self.prompt_tokens / self.block_size * self.block_size;
        Usage { newly_cached: Some(cacheable.saturating_sub(cached_tokens)), ..self.usage(generated, cached_tokens) }
    }

    /// Tokens of the prompt of a choice, if the request asks for them.
    pub(crate) fn prompt_ids(&self, choice: usize) -> String {
        match self.prompts.get(choice / self.options.choices).filter(|_| self.options.return_token_ids) {
            Some(tokens) => token_list(tokens),
            None => "null".to_owned(),
        }
    }

    /// The prompt of a choice that stands before its answer.
    pub(crate) fn echoed(&self, choice: usize) -> Option<&[u32]> {
        let is_echoed = self.options.echo != PromptEcho::None;
        self.prompts.get(choice / self.options.choices).filter(|_| is_echoed).map(Vec::as_slice)
    }
}

/// Id of an answer: the client's own after the prefix, otherwise a random one.
pub(crate) fn answer_id(prefix: &str, request_id: Option<&str>) -> String {
    match request_id {
        Some(request_id) => format!("{prefix}-{request_id}"),
        None => format!("{prefix}-{}", random_id(16)),
    }
}

/// Value of vLLM's `system_fingerprint`: its release and a hash of its configuration.
fn fingerprint(args: &EngineArgs) -> String {
    let hash = hash_text(&format!("{} {}", args.served_name(), args.seed));
    format!("vllm-{VLLM_VERSION}-{:08x}", hash >> 32)
}

pub(crate) fn token_list(tokens: &[u32]) -> String {
    serde_json::to_string(tokens).expect("numbers are always valid JSON")
}

pub(crate) async fn collect(generation: &Generation) -> Result<Vec<Collected>, ApiError> {
    let mut choices: Vec<Collected> = std::iter::repeat_with(Collected::default).take(generation.choices).collect();
    let mut deltas = Vec::new();
    while choices.iter().any(|choice| choice.finish.is_none()) {
        poll_fn(|context| generation.mailbox.poll_deltas(context, &mut deltas)).await;
        for delta in &deltas {
            if delta.finish == Some(Finish::Error) {
                return Err(ApiError::engine_failed());
            }
            choices[delta.choice].tokens.extend(&delta.tokens);
            choices[delta.choice].finish = delta.finish;
        }
    }
    Ok(choices)
}

impl Usage {
    /// Writes usage in the format of each event of a stream with `continuous_usage_stats`.
    pub(crate) fn push_continuous(self, json: &mut Vec<u8>) {
        self.push_counts(json);
        json.extend_from_slice(br#","completion_tokens_details":null}"#);
    }

    /// Writes usage in the format of the last event of a stream.
    pub(crate) fn push_last(self, json: &mut Vec<u8>) {
        self.push_counts(json);
        if let Some(cached) = self.cached {
            let _ = write!(json, r#","prompt_tokens_details":{{"cached_tokens":{cached}"#);
            if let Some(created) = self.newly_cached {
                let _ = write!(json, r#","created_cache_tokens":{created}"#);
            }
            json.push(b'}');
        }
        json.push(b'}');
    }

    /// Writes usage in the format of a whole answer.
    pub(crate) fn push_whole(self, json: &mut Vec<u8>) {
        self.push_counts(json);
        match self.cached {
            Some(cached) => {
                let created = self.newly_cached.map_or("null".to_owned(), |tokens| tokens.to_string());
                let _ = write!(
                    json,
                    r#","prompt_tokens_details":{{"cached_tokens":{cached},"created_cache_tokens":{created},"multimodal_tokens":null}}"#
                );
            }
            None => json.extend_from_slice(br#","prompt_tokens_details":null"#),
        }
        json.extend_from_slice(br#","completion_tokens_details":null}"#);
    }

    /// Writes usage in the format of any event of vLLM's Rust front-end.
    pub(crate) fn push_rust(self, json: &mut Vec<u8>) {
        self.push_counts(json);
        let cached = self.cached.filter(|cached| *cached > 0);
        let details = cached.map_or("null".to_owned(), |cached| format!(r#"{{"cached_tokens":{cached}}}"#));
        let _ = write!(json, r#","prompt_tokens_details":{details},"completion_tokens_details":{{"reasoning_tokens":0}}}}"#);
    }

    fn push_counts(self, json: &mut Vec<u8>) {
        let Self { prompt, generated, .. } = self;
        let _ = write!(json, r#"{{"prompt_tokens":{prompt},"total_tokens":{},"completion_tokens":{generated}"#, prompt + generated);
    }
}
