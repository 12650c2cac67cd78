//! Estimates the work that a request asks of an engine, from its route and body. The estimate gives
//! the caller's expected usage, and bounds the usage that an answer can report.

use hostler_api::{self as api, Prompts, Route};

use super::peek::{Peek, RequestedCount, count_items};
use crate::dispatch::Work;
use crate::placement::OutputBounds;

/// About how many bytes of text make a token.
const BYTES_PER_TOKEN: usize = 4;

/// Least bytes of a prompt in a list, including the comma.
const MIN_PROMPT_BYTES: usize = 2;

/// Most answers that engines give to a prompt: vLLM's `VLLM_MAX_N_SEQUENCES`.
const MAX_CHOICES: u64 = 16_384;

/// Most turns that are charged. A response with the engine's own tools is computed in turns, each
/// with the whole prompt, and nothing bounds their number.
const MAX_TURNS: u64 = 64;

/// The bounds that a body sets for the length of its answer.
pub(super) fn output_bounds(peek: &Peek) -> OutputBounds {
    let most = peek.max_output.count();
    let least = if peek.ignores_end { most } else { peek.min_output.count() };
    OutputBounds { least: least.unwrap_or_default(), most }
}

/// The most work that a request of this route can cause. Embedded inputs, and audio in pieces,
/// count as many prompts as the body has room for.
pub(super) fn estimate_work(route: Route, body: &[u8], peek: &Peek) -> Work {
    let listed = (body.len() / MIN_PROMPT_BYTES) as u64 + 1;
    let choices = match peek.choices {
        RequestedCount::Unset => 1,
        RequestedCount::Count(number) => number.clamp(1, MAX_CHOICES),
        RequestedCount::Unreadable => MAX_CHOICES,
    };
    let form = match route.work() {
        api::Work::Nothing => return Work::default(),
        api::Work::Pooled => return Work { prompts: listed, answers: 0, turns: 1 },
        api::Work::Generated(form) => form,
    };
    let prompts = match form {
        Prompts::One | Prompts::InTurns => 1,
        Prompts::OfCompletion => peek.texts(body).map(count_prompts).sum::<u64>() + peek.embedded_prompts,
        Prompts::OfChats => peek.texts(body).map(count_items).sum(),
        Prompts::OfSound => listed,
    };
    let prompts = prompts.max(1);
    let turns = if form == Prompts::InTurns { MAX_TURNS } else { 1 };
    Work { prompts, answers: prompts.saturating_mul(choices), turns }
}

/// The answers whose tokens the caller pays for. The pieces of audio, which a body does not list,
/// make one answer.
pub(super) fn charged_answers(work: Work, peek: &Peek) -> u64 {
    let lists_prompts = !peek.prompt_parts.is_empty() || peek.embedded_prompts > 0;
    if lists_prompts { work.answers } else { work.answers / work.prompts.max(1) }
}

/// Sequences that an engine computes for so many answers.
pub(super) fn sequences(answers: u64) -> u32 {
    u32::try_from(answers.min(MAX_CHOICES)).unwrap_or(u32::MAX)
}

/// Prompts of a completion's `prompt`: a text, a list of tokens, or a list of either.
fn count_prompts(prompt: &str) -> u64 {
    if token_ids(prompt).is_some() { 1 } else { count_items(prompt) }
}

/// About how many prompt tokens a part of a body has: the number in a list of tokens, or an
/// estimate from a text's length.
pub(super) fn estimate_tokens(text: &str) -> u64 {
    match token_ids(text) {
        Some(ids) => memchr::memchr_iter(b',', ids.as_bytes()).count() as u64 + 1,
        None => (text.len() / BYTES_PER_TOKEN) as u64,
    }
}

/// The inside of a list of tokens.
fn token_ids(text: &str) -> Option<&str> {
    text.strip_prefix('[').map(str::trim_start).filter(|ids| ids.starts_with(|first: char| first.is_ascii_digit()))
}

#[cfg(test)]
mod tests;
