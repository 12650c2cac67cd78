//! The parameters that a continuation takes from its request's body, and why some requests have
//! none.
//!
//! Every field has a rule; a field without a rule, or a repeated one, rules out a continuation.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt::{self, Write};

use bytes::{Bytes, BytesMut};
use hostler_api::Route;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::placement::mentions_media;
use crate::resume_tier::{NotResumed, ResumeTier};

/// Longest body that is asked for tokens: those of its prompt come in one event.
pub(super) const MAX_BODY_BYTES: usize = 128 * 1024;

/// Most bytes of the body that a continuation takes over. Only lists of tokens can be longer.
const MAX_CARRIED_BYTES: usize = 4096;

/// The default of `max_tokens` for completions, in vLLM and OpenAI's API.
const DEFAULT_COMPLETION_TOKENS: u64 = 16;

/// The APIs whose streams may be continued from their tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamApi {
    Chat,
    Completions,
}

impl StreamApi {
    #[must_use]
    pub(crate) fn for_route(route: Route) -> Option<Self> {
        match route {
            Route::ChatCompletions => Some(Self::Chat),
            Route::Completions => Some(Self::Completions),
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
    /// Most tokens of the answer; `None` for as many as the context has room for.
    pub(super) max_tokens: Option<u64>,
    pub(super) min_tokens: u64,
    /// Only the limit ends the answer.
    pub(super) ignores_end: bool,
    pub(super) wants_usage: bool,
    /// The salt of the request's cached blocks.
    pub(crate) cache_salt: String,
}

/// Why a stream is not continued from its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unfit {
    pub(crate) reason: NotResumed,
    /// Repeating the request gives the same answer, and each of its fields has a rule.
    pub(crate) may_be_replayed: bool,
}

impl Unfit {
    /// An obstacle that rules out a replay too.
    fn hopeless(reason: NotResumed) -> Self {
        Self { reason, may_be_replayed: false }
    }
}

/// Reasons that an answer is not the text of its tokens, or that a continuation would choose other
/// tokens. Sending the same request again still gives the same answer.
const REPLAYABLE: [NotResumed; 9] = [
    NotResumed::Choices,
    NotResumed::Penalty,
    NotResumed::Logprobs,
    NotResumed::Tools,
    NotResumed::Grammar,
    NotResumed::Stop,
    NotResumed::Echo,
    NotResumed::ContinuousUsage,
    NotResumed::Parser,
];

impl Sampling {
    /// Reads the parameters of a request for a stream.
    ///
    /// # Errors
    /// The reason why the stream is not continued from its tokens.
    pub(crate) fn parse(api: StreamApi, body: &[u8]) -> Result<Self, Unfit> {
        if body.len() > MAX_BODY_BYTES {
            return Err(Unfit::hopeless(NotResumed::Size));
        }
        let draft: SamplingDraft = serde_json::from_slice(body).map_err(|_| Unfit::hopeless(NotResumed::Body))?;
        draft.finish(api)
    }

    /// Whether the same request gives the same answer again.
    pub(crate) fn is_determined(&self) -> bool {
        self.tier == ResumeTier::TokenExact
    }

    /// Most tokens of the answer; `None` for as many as there is room for.
    pub(crate) fn max_tokens(&self) -> Option<u64> {
        self.max_tokens
    }
}

/// The end of a body that asks for the tokens of its answer.
const ASKING_END: &[u8] = b",\"return_token_ids\":true}";

/// Adds the request for tokens to a body, which is a JSON object with a field. Everything before
/// keeps its place.
#[must_use]
pub(crate) fn ask_for_tokens(body: &[u8]) -> Bytes {
    let end = body.trim_ascii_end().len().saturating_sub(1);
    let within = body[..end].trim_ascii_end();
    let mut asking = BytesMut::with_capacity(within.len() + ASKING_END.len());
    asking.extend_from_slice(within);
    asking.extend_from_slice(ASKING_END);
    asking.freeze()
}

/// Removes the request for tokens, and blanks at the body's end. A body without it stays as it is.
#[must_use]
pub(crate) fn without_asking(body: &Bytes) -> Bytes {
    match body.strip_suffix(ASKING_END) {
        Some(within) => [within, b"}"].concat().into(),
        None => body.clone(),
    }
}

/// The part of a body before its end, the same whether or not it asks for tokens.
#[must_use]
pub(crate) fn unasked_part(body: &[u8]) -> &[u8] {
    let unasking = || {
        let body = body.trim_ascii_end();
        body.strip_suffix(b"}").unwrap_or(body).trim_ascii_end()
    };
    body.strip_suffix(ASKING_END).unwrap_or_else(unasking)
}

/// Fields of a body as they are read. Numbers in unusual forms count as a reason: engines accept
/// more forms than the router.
#[derive(Debug, Default)]
struct SamplingDraft {
    carried: String,
    reason: Option<NotResumed>,
    /// A field has no rule even for a replay.
    is_hopeless: bool,
    is_greedy: bool,
    is_seeded: bool,
    /// `None` if absent, `Some(None)` if `null`.
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
            (StreamApi::Completions, Some(_), _) => return Err(Unfit::hopeless(NotResumed::MaxCompletionTokens)),
            (StreamApi::Completions, None, None) => Some(DEFAULT_COMPLETION_TOKENS),
            // vLLM 0.32 takes the default. Releases before it normalized this take no limit.
            (StreamApi::Completions, None, Some(None)) => return Err(unfit(NotResumed::MaxTokens)),
            (_, None, most) => most.flatten(),
        };
        let tier = match (self.is_greedy, self.is_seeded) {
            (true, _) => ResumeTier::TokenExact,
            (false, true) => return Err(unfit(NotResumed::Seed)),
            (false, false) => ResumeTier::ValidContinuation,
        };
        if self.carried.len() > MAX_CARRIED_BYTES {
            return Err(unfit(NotResumed::Size));
        }
        let Self { carried, min_tokens, ignores_end, wants_usage, .. } = self;
        let cache_salt = String::new();
        Ok(Sampling { api, tier, carried: carried.into(), max_tokens, min_tokens, ignores_end, wants_usage, cache_salt })
    }

    /// Applies the rule of a field.
    fn read(&mut self, name: &str, value: &RawValue) -> Result<(), NotResumed> {
        let raw = value.get();
        match (name, raw) {
            ("max_tokens", "null") => self.max_tokens = Some(None),
            // The router adds this field, and vLLM's Rust front-end refuses repeated fields.
            ("return_token_ids", _) => return Err(NotResumed::TokenIds),
            (_, "null") => {}
            ("messages" | "prompt", _) if mentions_media(raw.as_bytes()) => return Err(NotResumed::Media),
            ("prompt", _) if !is_single_prompt(raw) => return Err(NotResumed::Choices),
            // These fields make the prompt, whose tokens the engine reports, or mean nothing to the
            // engine.
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
                // To vLLM, -1 means no seed.
                self.is_seeded = raw != "-1";
                self.carry(name, raw);
            }
            ("max_tokens", _) => self.max_tokens = Some(Some(count(value).ok_or(NotResumed::MaxTokens)?)),
            ("max_completion_tokens", _) => self.max_completion_tokens = Some(count(value).ok_or(NotResumed::MaxTokens)?),
            ("min_tokens", _) => self.min_tokens = count(value).ok_or(NotResumed::MinTokens)?,
            ("stream", "true") | ("logprobs" | "echo" | "use_beam_search" | "return_tokens_as_token_ids", "false") => {}
            ("tools" | "stop" | "bad_words", "[]") | ("tool_choice", "\"none\"" | "\"auto\"") | ("suffix" | "stop", "\"\"") => {}
            ("n" | "best_of", "1") | ("top_logprobs", "0") => {}
            ("presence_penalty" | "frequency_penalty", _) if number(value) == Some(0.0) => {}
            ("response_format", _) if is_text_format(raw) => {}
            ("stream_options", _) => self.read_stream_options(raw)?,
            ("n" | "best_of", _) => return Err(NotResumed::Choices),
            ("presence_penalty" | "frequency_penalty", _) => return Err(NotResumed::Penalty),
            ("logprobs" | "top_logprobs" | "prompt_logprobs", _) => return Err(NotResumed::Logprobs),
            ("tools" | "tool_choice" | "functions" | "function_call", _) => return Err(NotResumed::Tools),
            ("response_format" | "structured_outputs" | "guided_json" | "guided_regex" | "guided_choice" | "guided_grammar", _) => {
                return Err(NotResumed::Grammar);
            }
            ("return_tokens_as_token_ids", _) => return Err(NotResumed::TokenIds),
            // Engines look for stop words in their own output, and one may straddle the seam.
            ("stop" | "bad_words", _) => return Err(NotResumed::Stop),
            ("echo" | "suffix", _) => return Err(NotResumed::Echo),
            // The tokens of hidden text are not sent.
            ("include_reasoning", _) => return Err(NotResumed::Parser),
            _ => return Err(NotResumed::Field),
        }
        Ok(())
    }

    fn carry(&mut self, name: &str, raw: &str) {
        // Names need no escapes: they come from the table above.
        let _ = write!(self.carried, "\"{name}\":{raw},");
    }

    fn read_stream_options(&mut self, raw: &str) -> Result<(), NotResumed> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct StreamOptions {
            #[serde(default)]
            include_usage: Option<bool>,
            #[serde(default)]
            continuous_usage_stats: Option<bool>,
        }
        let options: StreamOptions = serde_json::from_str(raw).map_err(|_| NotResumed::StreamOptions)?;
        self.wants_usage = options.include_usage == Some(true);
        if options.continuous_usage_stats == Some(true) { Err(NotResumed::ContinuousUsage) } else { Ok(()) }
    }
}

/// Whether the prompt is a text or one list of tokens.
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
        // An ordered set: clients cannot make names collide, as with a hash.
        let mut names = BTreeSet::new();
        while let Some(ParameterName(name)) = map.next_key::<ParameterName<'de>>()? {
            let value: &RawValue = map.next_value()?;
            // Engines differ in which of two values they take.
            let read = if names.contains(&name) { Err(NotResumed::RepeatedField) } else { draft.read(&name, value) };
            // Keep the first reason in the body's order.
            draft.is_hopeless |= read.is_err_and(|reason| !REPLAYABLE.contains(&reason));
            draft.reason = draft.reason.or(read.err());
            names.insert(name);
        }
        Ok(draft)
    }
}

#[cfg(test)]
mod tests;
