//! Options of a generation request besides its prompt, typed and checked in the order in which vLLM
//! complains.

use std::sync::atomic::Ordering;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::Api;
use super::errors::ApiError;
use super::fields::{Fields, boolean, integer, number, text, typed};
use super::structured_outputs::structured_output;
use crate::args::EngineArgs;
use crate::mailbox::Finish;
use crate::scheduler::Limit;
use crate::structured::StructuredOutput;

/// Most answers to one prompt, as in vLLM.
const MOST_CHOICES: usize = 16_384;

#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) continuous_usage: bool,
    pub(crate) choices: usize,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) echo: PromptEcho,
    pub(crate) seed: u64,
    pub(crate) ignore_eos: bool,
    /// Alternatives to report for each token, when log probabilities are requested.
    pub(crate) logprobs: Option<usize>,
    pub(crate) return_token_ids: bool,
    pub(crate) salt: Option<String>,
    pub(crate) adapter: Option<String>,
    /// Form of the answer, if it is not left to the model.
    pub(crate) structured: Option<StructuredOutput>,
}

/// What a completion shows of its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PromptEcho {
    None,
    /// The prompt stands before the answer.
    Before,
    /// Only the prompt is shown. As in vLLM, one token is computed for it.
    Alone,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: Option<bool>,
    continuous_usage_stats: Option<bool>,
}

/// Name of the field that limits tokens, with its default.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TokenLimit {
    /// Field `max_completion_tokens`, else `max_tokens`, else until the answer ends.
    Chat,
    /// Field `max_tokens`, else 16, as in vLLM.
    Completions,
    /// Field `max_output_tokens`, else until the answer ends.
    Responses,
}

impl Options {
    pub(crate) fn read(fields: &Fields<'_>, api: &Api, token_limit: TokenLimit) -> Result<Self, ApiError> {
        let adapter = check_model(fields, api)?;
        check_temperature(fields, &api.args)?;
        let stream_options: Option<StreamOptions> = match fields.stream_options {
            Some(options) if api.args.sim_rust_front_end => Some(fields.strictly("stream_options", options)?),
            options => typed("stream_options", options, "dict_type", "Input should be a valid dictionary")?,
        };
        let stream_options = stream_options.unwrap_or_default();
        let include_usage = stream_options.include_usage.unwrap_or(false);
        let (max_tokens, echo) = length(fields, &api.args, token_limit)?;
        Ok(Self {
            stream: boolean("stream", fields.stream)?,
            include_usage,
            continuous_usage: include_usage && stream_options.continuous_usage_stats.unwrap_or(false),
            choices: choices(fields, &api.args)?,
            max_tokens,
            echo,
            seed: match seed(fields)? {
                Some(seed) => seed,
                // The router asks the Rust front-end for several answers one by one.
                None if api.args.sim_rust_front_end && number("temperature", fields.temperature)? != Some(0.0) => {
                    api.unseeded.fetch_add(1, Ordering::Relaxed)
                }
                None => 0,
            },
            ignore_eos: boolean("ignore_eos", fields.ignore_eos)?,
            logprobs: logprobs(fields, token_limit)?,
            return_token_ids: boolean("return_token_ids", fields.return_token_ids)?,
            salt: text("cache_salt", fields.cache_salt)?,
            adapter,
            structured: structured_output(fields)?,
        })
    }

    /// Limit of the answer to a prompt of `prompt_tokens`.
    pub(crate) fn limit(&self, args: &EngineArgs, prompt_tokens: usize) -> Result<Limit, ApiError> {
        let context = args.context_length();
        let Some(room) = context.checked_sub(prompt_tokens).filter(|room| *room > 0) else {
            return Err(too_long(context, prompt_tokens));
        };
        match self.max_tokens {
            // Coding agents ask for 32,000 tokens. A model ends by itself, and this one where it
            // plays an agent's model.
            Some(tokens)
                if args.sim_call_tools
                    && !self.ignore_eos
                    && self.structured.is_none()
                    && tokens.min(room) > args.sim_output_tokens.max(1) =>
            {
                Ok(Limit { tokens: args.sim_output_tokens.max(1), finish: Finish::Stop })
            }
            // A prompt with its answer is cut to the available room; `max_tokens` alone is checked
            // above.
            Some(tokens) => Ok(Limit { tokens: tokens.min(room), finish: Finish::Length }),
            // A structured answer ends by itself, however long that takes.
            None if self.ignore_eos || self.structured.is_some() || args.sim_output_tokens > room => {
                Ok(Limit { tokens: room, finish: Finish::Length })
            }
            None => Ok(Limit { tokens: args.sim_output_tokens.max(1), finish: Finish::Stop }),
        }
    }
}

/// Requested adapter, if it is one.
///
/// Refuses a model that is not served; without a model the engine's own answers.
pub(crate) fn check_model(fields: &Fields<'_>, api: &Api) -> Result<Option<String>, ApiError> {
    let mut served = api.args.served_names();
    let Some(model) = text("model", fields.model)?.filter(|model| !model.is_empty() && !served.contains(model)) else { return Ok(None) };
    let adapters = api.adapters.all();
    if adapters.iter().any(|adapter| adapter.name == model) {
        return Ok(Some(model));
    }
    served.extend(adapters.into_iter().map(|adapter| adapter.name));
    Err(ApiError::unknown_model(&model, &served))
}

/// The request's seed. As in vLLM, -1 is none.
fn seed(fields: &Fields<'_>) -> Result<Option<u64>, ApiError> {
    let is_long = |raw: &&RawValue| {
        let digits = raw.get().trim_start_matches('-');
        !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()) && raw.get().parse::<i64>().is_err()
    };
    if let Some(raw) = fields.seed.filter(is_long) {
        let message = format!("Input should be between {} and {}", i64::MIN, i64::MAX);
        return Err(ApiError::bad_value("seed", raw.get(), &message));
    }
    Ok(integer("seed", fields.seed)?.filter(|seed| *seed != -1).map(i64::cast_unsigned))
}

fn check_temperature(fields: &Fields<'_>, args: &EngineArgs) -> Result<(), ApiError> {
    match number("temperature", fields.temperature)? {
        Some(0.0) => match choices(fields, args)? {
            1 => Ok(()),
            several => Err(ApiError::refused(None, &format!("n must be 1 when using greedy sampling, got {several}."))),
        },
        Some(value) if value < 0.0 => {
            let message = format!("temperature must be non-negative, got {value:?}.");
            Err(ApiError::bad_value("temperature", &format!("{value:?}"), &message))
        }
        _ => Ok(()),
    }
}

fn choices(fields: &Fields<'_>, args: &EngineArgs) -> Result<usize, ApiError> {
    match at_least_one("n", integer("n", fields.n)?)?.unwrap_or(1) {
        choices if choices > 1 && args.sim_rust_front_end => Err(ApiError::of_rust(Some("n"), "Only n=1 is supported.")),
        choices if choices > MOST_CHOICES => {
            let message = format!("n must be at most {MOST_CHOICES}, got {choices}.");
            Err(ApiError::bad_value("n", &choices.to_string(), &message))
        }
        choices => Ok(choices),
    }
}

fn at_least_one(field: &str, value: Option<i64>) -> Result<Option<usize>, ApiError> {
    let Some(value) = value else { return Ok(None) };
    match usize::try_from(value) {
        Ok(count) if count > 0 => Ok(Some(count)),
        _ => {
            let message = format!("{field} must be at least 1, got {value}.");
            Err(ApiError::bad_value(field, &value.to_string(), &message))
        }
    }
}

/// Length of the answer, and what is shown of the prompt.
fn length(fields: &Fields<'_>, args: &EngineArgs, token_limit: TokenLimit) -> Result<(Option<usize>, PromptEcho), ApiError> {
    let is_completion = matches!(token_limit, TokenLimit::Completions);
    let echoes = match fields.echo.filter(|_| is_completion) {
        Some(echo) if args.sim_rust_front_end => fields.strictly("echo", echo)?,
        echo => boolean("echo", echo)?,
    };
    let is_empty = is_completion && integer("max_tokens", fields.max_tokens)? == Some(0);
    match (echoes, is_empty) {
        (true, true) => Ok((Some(1), PromptEcho::Alone)),
        (false, true) if args.sim_rust_front_end => {
            Err(ApiError::of_rust(Some("max_tokens"), "max_tokens=0 is only supported when echo=true."))
        }
        (echoes, _) => Ok((max_tokens(fields, args, token_limit)?, if echoes { PromptEcho::Before } else { PromptEcho::None })),
    }
}

fn max_tokens(fields: &Fields<'_>, args: &EngineArgs, token_limit: TokenLimit) -> Result<Option<usize>, ApiError> {
    let given = integer("max_tokens", fields.max_tokens)?;
    let given = match token_limit {
        TokenLimit::Chat => integer("max_completion_tokens", fields.max_completion_tokens)?.or(given),
        TokenLimit::Completions => given.or(Some(16)),
        TokenLimit::Responses => integer("max_output_tokens", fields.max_output_tokens)?,
    };
    let tokens = at_least_one("max_tokens", given)?;
    let context = args.context_length();
    match tokens {
        // The Rust front-end takes what is left of the context.
        Some(tokens) if tokens > context && !args.sim_rust_front_end => {
            let message =
                format!("max_tokens={tokens} cannot be greater than max_model_len={context}. Please request fewer output tokens.");
            Err(ApiError::bad_value("max_tokens", &tokens.to_string(), &message))
        }
        tokens => Ok(tokens),
    }
}

/// Number of alternatives.
///
/// Chat has `logprobs: true` and `top_logprobs: k`; completions have `logprobs: k`.
fn logprobs(fields: &Fields<'_>, token_limit: TokenLimit) -> Result<Option<usize>, ApiError> {
    let alternatives = match token_limit {
        TokenLimit::Completions => integer("logprobs", fields.logprobs)?,
        TokenLimit::Chat if boolean("logprobs", fields.logprobs)? => Some(integer("top_logprobs", fields.top_logprobs)?.unwrap_or(0)),
        _ => None,
    };
    // vLLM's own bound is 20 by default.
    Ok(alternatives.map(|count| usize::try_from(count.clamp(0, 20)).unwrap_or(0)))
}

fn too_long(context: usize, prompt: usize) -> ApiError {
    let message = format!(
        "This model's maximum context length is {context} tokens. However, your prompt contains {prompt} input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
    );
    ApiError::bad_value("input_tokens", &prompt.to_string(), &message)
}
