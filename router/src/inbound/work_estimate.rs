//! Estimates the work that a request asks of an engine, from its route and body. The estimate gives
//! the caller's expected usage, and bounds the usage that an answer can report.

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
pub(super) fn output_bounds(peek: &Peek<'_>) -> OutputBounds {
    let most = peek.max_output.count();
    let least = if peek.ignores_end { most } else { peek.min_output.count() };
    OutputBounds { least: least.unwrap_or_default(), most }
}

/// The most work that a request of this route can cause. Embedded inputs, and audio in pieces,
/// count as many prompts as the body has room for.
pub(super) fn estimate_work(route: &str, body_bytes: usize, peek: &Peek<'_>) -> Work {
    if computes_nothing(route) {
        return Work::default();
    }
    let listed = (body_bytes / MIN_PROMPT_BYTES) as u64 + 1;
    let choices = match peek.choices {
        RequestedCount::Unset => 1,
        RequestedCount::Count(number) => number.clamp(1, MAX_CHOICES),
        RequestedCount::Unreadable => MAX_CHOICES,
    };
    let prompts = match route {
        _ if !is_generation(route) => return Work { prompts: listed, answers: 0, turns: 1 },
        "/v1/completions" => peek.prompt_parts.iter().map(|prompt| count_prompts(prompt)).sum::<u64>() + peek.embedded_prompts,
        "/v1/chat/completions/batch" => peek.prompt_parts.iter().map(|messages| count_items(messages)).sum(),
        // Audio is computed in pieces.
        "/v1/audio/transcriptions" | "/v1/audio/translations" => listed,
        _ => 1,
    };
    let prompts = prompts.max(1);
    let turns = if route == "/v1/responses" { MAX_TURNS } else { 1 };
    Work { prompts, answers: prompts.saturating_mul(choices), turns }
}

/// The answers whose tokens the caller pays for. The pieces of audio, which a body does not list,
/// make one answer.
pub(super) fn charged_answers(work: Work, peek: &Peek<'_>) -> u64 {
    let lists_prompts = !peek.prompt_parts.is_empty() || peek.embedded_prompts > 0;
    if lists_prompts { work.answers } else { work.answers / work.prompts.max(1) }
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

/// Routes that need nothing computed on the accelerator.
pub(super) fn computes_nothing(path: &str) -> bool {
    const NOTHING: [&str; 5] = ["/tokenize", "/detokenize", "/tokenizer_info", "/version", "/v1/messages/count_tokens"];
    NOTHING.contains(&path) || path.ends_with("/render") || path.ends_with("/derender") || path.starts_with("/v1/responses/")
}

/// Routes whose answers are generated token by token.
fn is_generation(path: &str) -> bool {
    const GENERATE: [&str; 9] = [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/chat/completions/batch",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/inference/v1/generate",
        "/cohere/v2/chat",
    ];
    GENERATE.contains(&path)
}

#[cfg(test)]
mod tests;
