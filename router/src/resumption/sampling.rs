//! What the continuation of a request takes over from its body, and why some request has none. Every field has a rule; one without a rule, or said
//! twice, means that the stream is not resumed.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt::{self, Write};

use bytes::{Bytes, BytesMut};
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::placement::mentions_media;
use crate::resume_tier::ResumeTier;

/// A longer body is not asked for tokens: those of its prompt come in one event.
pub(super) const MAX_BODY_BYTES: usize = 128 * 1024;

/// A continuation takes over no more than this of the body; only lists of tokens can be longer.
const MAX_CARRIED_BYTES: usize = 4096;

/// What a completion has without `max_tokens`, in vLLM and OpenAI's API.
const DEFAULT_COMPLETION_TOKENS: u64 = 16;

/// Which API a stream that may be resumed is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamApi {
    Chat,
    Completions,
}

impl StreamApi {
    #[must_use]
    pub(crate) fn for_path(path: &str) -> Option<Self> {
        match path {
            "/v1/chat/completions" => Some(Self::Chat),
            "/v1/completions" => Some(Self::Completions),
            _ => None,
        }
    }
}

/// The parameters of a request whose stream may be resumed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sampling {
    pub(crate) api: StreamApi,
    pub(crate) tier: ResumeTier,
    /// Fields as they stood in the body, each followed by a comma.
    pub(super) carried: Box<str>,
    /// Tokens that the answer may have; `None` for as many as the context has room for.
    pub(super) max_tokens: Option<u64>,
    pub(super) min_tokens: u64,
    /// It ends at its limit alone.
    pub(super) ignores_end: bool,
    pub(super) wants_usage: bool,
    /// The salt of its cached blocks.
    pub(crate) cache_salt: String,
}

/// Why a stream is not continued from its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unfit {
    pub(crate) reason: &'static str,
    /// The same request gives the same answer, and each of its fields has a rule.
    pub(crate) may_be_replayed: bool,
}

impl Unfit {
    /// By what nobody can do anything about.
    fn hopeless(reason: &'static str) -> Self {
        Self { reason, may_be_replayed: false }
    }
}

/// Reasons that say that an answer is not the text of its tokens, or that a continuation would choose other tokens. The same request is answered in the
/// same way all the same.
const REPLAYABLE: [&str; 9] = ["choices", "penalty", "logprobs", "tools", "grammar", "stop", "echo", "continuous_usage", "parser"];

impl Sampling {
    /// Of a stream.
    ///
    /// # Errors
    /// With the reason why it is not continued from its tokens.
    pub(crate) fn parse(api: StreamApi, body: &[u8]) -> Result<Self, Unfit> {
        if body.len() > MAX_BODY_BYTES {
            return Err(Unfit::hopeless("size"));
        }
        let draft: SamplingDraft = serde_json::from_slice(body).map_err(|_| Unfit::hopeless("body"))?;
        draft.finish(api)
    }

    /// Whether the same request gives the same answer again.
    pub(crate) fn is_determined(&self) -> bool {
        self.tier == ResumeTier::TokenExact
    }

    /// Tokens that the answer may have; `None` for as many as there is room for.
    pub(crate) fn max_tokens(&self) -> Option<u64> {
        self.max_tokens
    }
}

/// How a body ends that asks for the tokens of its answer.
const ASKING_END: &[u8] = b",\"return_token_ids\":true}";

/// A body, which is a JSON object with a field, that also asks for the tokens of its answer. All before keeps its place.
#[must_use]
pub(crate) fn ask_for_tokens(body: &[u8]) -> Bytes {
    let end = body.trim_ascii_end().len().saturating_sub(1);
    let within = body[..end].trim_ascii_end();
    let mut asking = BytesMut::with_capacity(within.len() + ASKING_END.len());
    asking.extend_from_slice(within);
    asking.extend_from_slice(ASKING_END);
    asking.freeze()
}

/// A body as it was before, but for blanks at its end; one that does not ask stays as it is.
#[must_use]
pub(crate) fn without_asking(body: &Bytes) -> Bytes {
    match body.strip_suffix(ASKING_END) {
        Some(within) => [within, b"}"].concat().into(),
        None => body.clone(),
    }
}

/// What a body has before its end, which is the same whether it asks for tokens or not.
#[must_use]
pub(crate) fn unasked_part(body: &[u8]) -> &[u8] {
    let unasking = || {
        let body = body.trim_ascii_end();
        body.strip_suffix(b"}").unwrap_or(body).trim_ascii_end()
    };
    body.strip_suffix(ASKING_END).unwrap_or_else(unasking)
}

/// The fields of a body as they are read. Numbers that are not plain count as a reason: engines take more forms than the router.
#[derive(Debug, Default)]
struct SamplingDraft {
    carried: String,
    reason: Option<&'static str>,
    /// A field has no rule even for a replay.
    is_hopeless: bool,
    is_greedy: bool,
    is_seeded: bool,
    /// `None` if it was not said, `Some(None)` if it was said to be none.
    max_tokens: Option<Option<u64>>,
    max_completion_tokens: Option<u64>,
    min_tokens: u64,
    ignores_end: bool,
    wants_usage: bool,
}

impl SamplingDraft {
    fn finish(self, api: StreamApi) -> Result<Sampling, Unfit> {
        let may_be_replayed = !self.is_hopeless && (self.is_greedy || self.is_seeded);
        let unfit = |reason| Unfit { reason, may_be_replayed };
        if let Some(reason) = self.reason {
            return Err(unfit(reason));
        }
        let max_tokens = match (api, self.max_completion_tokens, self.max_tokens) {
            (StreamApi::Chat, Some(most), _) => Some(most),
            (StreamApi::Completions, Some(_), _) => return Err(Unfit::hopeless("max_completion_tokens")),
            (StreamApi::Completions, None, None) => Some(DEFAULT_COMPLETION_TOKENS),
            // The default to vLLM 0.32, and no limit to releases before it normalized this.
            (StreamApi::Completions, None, Some(None)) => return Err(unfit("max_tokens")),
            (_, None, most) => most.flatten(),
        };
        let tier = match (self.is_greedy, self.is_seeded) {
            (true, _) => ResumeTier::TokenExact,
            (false, true) => return Err(unfit("seed")),
            (false, false) => ResumeTier::ValidContinuation,
        };
        if self.carried.len() > MAX_CARRIED_BYTES {
            return Err(unfit("size"));
        }
        let Self { carried, min_tokens, ignores_end, wants_usage, .. } = self;
        let cache_salt = String::new();
        Ok(Sampling { api, tier, carried: carried.into(), max_tokens, min_tokens, ignores_end, wants_usage, cache_salt })
    }

    /// Applies the rule of a field.
    fn read(&mut self, name: &str, value: &RawValue) -> Result<(), &'static str> {
        let raw = value.get();
        match (name, raw) {
            ("max_tokens", "null") => self.max_tokens = Some(None),
            // The router adds this one, and vLLM's Rust front-end refuses a field that is there twice.
            ("return_token_ids", _) => return Err("token_ids"),
            (_, "null") => {}
            ("messages" | "prompt", _) if mentions_media(raw.as_bytes()) => return Err("media"),
            ("prompt", _) if !is_single_prompt(raw) => return Err("choices"),
            // They make the prompt, whose tokens the engine says, or say nothing to the engine.
            ("messages" | "prompt" | "chat_template" | "chat_template_kwargs" | "documents" | "add_generation_prompt", _)
            | ("continue_final_message" | "add_special_tokens" | "truncate_prompt_tokens" | "truncation_side" | "reasoning_effort", _)
            | ("metadata" | "store" | "service_tier" | "safety_identifier" | "prompt_cache_key" | "request_id", _)
            | ("parallel_tool_calls", _)
            | ("include_reasoning", "true") => {}
            ("model" | "user" | "priority" | "cache_salt" | "top_p" | "top_k" | "min_p" | "repetition_penalty", _)
            | ("logit_bias" | "allowed_token_ids" | "stop_token_ids", _)
            | ("skip_special_tokens" | "spaces_between_special_tokens" | "include_stop_str_in_output", _) => self.carry(name, raw),
            ("ignore_eos", _) => {
                self.ignores_end = raw == "true";
                self.carry(name, raw);
            }
            ("temperature", _) => {
                self.is_greedy = number(value) == Some(0.0);
                self.carry(name, raw);
            }
            ("seed", _) => {
                // To vLLM this one is none.
                self.is_seeded = raw != "-1";
                self.carry(name, raw);
            }
            ("max_tokens", _) => self.max_tokens = Some(Some(count(value).ok_or("max_tokens")?)),
            ("max_completion_tokens", _) => self.max_completion_tokens = Some(count(value).ok_or("max_tokens")?),
            ("min_tokens", _) => self.min_tokens = count(value).ok_or("min_tokens")?,
            ("stream", "true") | ("logprobs" | "echo" | "use_beam_search" | "return_tokens_as_token_ids", "false") => {}
            ("tools" | "stop" | "bad_words", "[]") | ("tool_choice", "\"none\"" | "\"auto\"") | ("suffix" | "stop", "\"\"") => {}
            ("n" | "best_of", "1") | ("top_logprobs", "0") => {}
            ("presence_penalty" | "frequency_penalty", _) if number(value) == Some(0.0) => {}
            ("response_format", _) if is_text_format(raw) => {}
            ("stream_options", _) => self.read_stream_options(raw)?,
            ("n" | "best_of", _) => return Err("choices"),
            ("presence_penalty" | "frequency_penalty", _) => return Err("penalty"),
            ("logprobs" | "top_logprobs" | "prompt_logprobs", _) => return Err("logprobs"),
            ("tools" | "tool_choice" | "functions" | "function_call", _) => return Err("tools"),
            ("response_format" | "structured_outputs" | "guided_json" | "guided_regex" | "guided_choice" | "guided_grammar", _) => {
                return Err("grammar");
            }
            ("return_tokens_as_token_ids", _) => return Err("token_ids"),
            // Engines look for them in what they generated themselves, and one may straddle the seam.
            ("stop" | "bad_words", _) => return Err("stop"),
            ("echo" | "suffix", _) => return Err("echo"),
            // The tokens of what is hidden are not told.
            ("include_reasoning", _) => return Err("parser"),
            _ => return Err("field"),
        }
        Ok(())
    }

    fn carry(&mut self, name: &str, raw: &str) {
        // The names are ours, from the table above.
        let _ = write!(self.carried, "\"{name}\":{raw},");
    }

    fn read_stream_options(&mut self, raw: &str) -> Result<(), &'static str> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct StreamOptions {
            #[serde(default)]
            include_usage: Option<bool>,
            #[serde(default)]
            continuous_usage_stats: Option<bool>,
        }
        let options: StreamOptions = serde_json::from_str(raw).map_err(|_| "stream_options")?;
        self.wants_usage = options.include_usage == Some(true);
        if options.continuous_usage_stats == Some(true) { Err("continuous_usage") } else { Ok(()) }
    }
}

/// A text, or one list of tokens.
fn is_single_prompt(raw: &str) -> bool {
    let in_list = raw.strip_prefix('[').map(|rest| rest.trim_start().as_bytes().first().is_some_and(u8::is_ascii_digit));
    in_list.unwrap_or(raw.starts_with('"'))
}

fn number(value: &RawValue) -> Option<f64> {
    serde_json::from_str(value.get()).ok()
}

fn count(value: &RawValue) -> Option<u64> {
    serde_json::from_str(value.get()).ok()
}

fn is_text_format(raw: &str) -> bool {
    #[derive(Deserialize)]
    struct Format<'a> {
        #[serde(borrow)]
        r#type: Cow<'a, str>,
    }
    serde_json::from_str::<Format<'_>>(raw).is_ok_and(|format| format.r#type == "text")
}

impl<'de> Deserialize<'de> for SamplingDraft {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(SamplingVisitor)
    }
}

struct SamplingVisitor;

impl<'de> Visitor<'de> for SamplingVisitor {
    type Value = SamplingDraft;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<SamplingDraft, A::Error> {
        #[derive(Deserialize)]
        struct ParameterName<'a>(#[serde(borrow)] Cow<'a, str>);

        let mut draft = SamplingDraft::default();
        // Ordered: no client can choose names that collide, as with a hash.
        let mut names = BTreeSet::new();
        while let Some(ParameterName(name)) = map.next_key::<ParameterName<'de>>()? {
            let value: &RawValue = map.next_value()?;
            // Engines differ in which of two values they take.
            let read = if names.contains(&name) { Err("repeated_field") } else { draft.read(&name, value) };
            // The first reason in the order of the body.
            draft.is_hopeless |= read.is_err_and(|reason| !REPLAYABLE.contains(&reason));
            draft.reason = draft.reason.or(read.err());
            names.insert(name);
        }
        Ok(draft)
    }
}

#[cfg(test)]
mod tests;
