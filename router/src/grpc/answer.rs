//! An engine's JSON as typed messages.

use bytes::{Bytes, BytesMut};
use hostler_api::{ChunkChoice, ChunkLogprobs, ChunkMessage, ChunkUsage, CompletionChunk};
use hostler_proto::inference::v1 as wire;
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tonic::Status;
use wire::finish::StoppedBy;

use super::engine::{EngineEmbeddings, EngineLogprob};
use super::status;
use crate::dispatch::{Answer, Relay};
use crate::placement::PlacementDecision;

/// Largest whole answer that is read. Log probabilities of long answers make the largest.
const MAX_ANSWER_BYTES: usize = 256 * 1024 * 1024;

/// Reads a whole successful answer and parses it.
///
/// # Errors
/// If the answer is the engine's refusal, has broken, or has another form.
pub(super) async fn parse_answer<T: DeserializeOwned>(mut answer: Answer) -> Result<T, Status> {
    let body = read_body(&mut answer.body).await?;
    if answer.head.status != 200 {
        return Err(status::engine_refusal(answer.head.status, &answer.head.headers, &body));
    }
    serde_json::from_slice(&body).map_err(|error| status::unreadable_answer(&error.to_string()))
}

pub(super) async fn read_body(relay: &mut Relay) -> Result<Bytes, Status> {
    let mut only: Option<Bytes> = None;
    let mut all = BytesMut::new();
    while let Some(frame) = relay.frame().await {
        let Ok(bytes) = frame.map_err(|broken| status::broken_answer(&broken))?.into_data() else { continue };
        if all.len() + bytes.len() > MAX_ANSWER_BYTES {
            return Err(status::unreadable_answer(&format!("it is longer than {MAX_ANSWER_BYTES} bytes; ask for a stream")));
        }
        if all.is_empty() && only.is_none() {
            only = Some(bytes);
            continue;
        }
        all.extend_from_slice(&only.take().unwrap_or_default());
        all.extend_from_slice(&bytes);
    }
    Ok(only.unwrap_or_else(|| all.freeze()))
}

pub(super) fn generate_response(mut answered: CompletionChunk, placement: wire::Placement) -> wire::GenerateResponse {
    let prompt = prompt_token_ids(&mut answered);
    wire::GenerateResponse {
        id: answered.id.unwrap_or_default(),
        model: answered.model.unwrap_or_default(),
        choices: answered.choices.into_iter().map(choice).collect(),
        usage: answered.usage.as_ref().map(usage),
        placement: Some(placement),
        prompt_token_ids: prompt,
    }
}

pub(super) fn embed_response(embedded: EngineEmbeddings, placement: wire::Placement) -> wire::EmbedResponse {
    let vectors = embedded.data.into_iter().zip(0..);
    wire::EmbedResponse {
        id: embedded.id.unwrap_or_default(),
        model: embedded.model.unwrap_or_default(),
        embeddings: vectors.map(|(of, at)| wire::Embedding { index: of.index.unwrap_or(at), values: of.embedding }).collect(),
        usage: embedded.usage.as_ref().map(usage),
        placement: Some(placement),
    }
}

/// The prompt's tokens, from whichever field has them.
pub(super) fn prompt_token_ids(answered: &mut CompletionChunk) -> Vec<u32> {
    let beside = answered.prompt_token_ids.take();
    let within = || answered.choices.iter().find_map(|choice| choice.prompt_token_ids.clone());
    beside.or_else(within).unwrap_or_default()
}

/// Where a request went, and why. Without `caches`, everything that depends on cached blocks is
/// left out.
pub(super) fn placement(record: &PlacementDecision, caches: bool) -> wire::Placement {
    let (replica, choice) = record.choice();
    let (matched_tokens, why, predicted_first_token_seconds) =
        if caches { (choice.candidate.matched, record.reason(), choice.terms.first_token()) } else { Default::default() };
    wire::Placement {
        request_id: format!("{:016x}", record.id),
        replica: replica.to_owned(),
        matched_tokens,
        prompt_tokens: record.prompt_tokens,
        level: record.level.as_str().to_owned(),
        why: why.to_owned(),
        predicted_first_token_seconds,
        attempt: record.attempt,
        queue_seconds: record.queued_seconds.into(),
        candidates: u32::try_from(record.decision.candidates).unwrap_or(u32::MAX),
    }
}

pub(super) fn usage(usage: &ChunkUsage) -> wire::Usage {
    wire::Usage {
        prompt_tokens: usage.prompt_tokens,
        completion_tokens: usage.completion_tokens,
        cached_tokens: usage.cached_tokens(),
        reasoning_tokens: usage.reasoning_tokens(),
    }
}

fn choice(choice: ChunkChoice) -> wire::Choice {
    let finish = finish(&choice);
    let index = choice.index.unwrap_or(0);
    let ChunkMessage { content, reasoning, refusal, tool_calls } = choice.message.unwrap_or_default();
    let calls = tool_calls.unwrap_or_default().into_iter().map(|call| wire::ToolCall {
        id: call.id.unwrap_or_default(),
        name: call.function.name.unwrap_or_default(),
        arguments: call.function.arguments.unwrap_or_default(),
    });
    wire::Choice {
        index,
        text: choice.text.or(content).unwrap_or_default(),
        reasoning: reasoning.unwrap_or_default(),
        tool_calls: calls.collect(),
        token_ids: choice.token_ids.unwrap_or_default(),
        logprobs: choice.logprobs.map(logprobs).unwrap_or_default(),
        finish,
        refusal: refusal.unwrap_or_default(),
    }
}

/// A piece of a choice; `None` without content, as in the event that only names the role.
pub(super) fn delta(choice: ChunkChoice) -> Option<wire::Delta> {
    let index = choice.index.unwrap_or(0);
    let ChunkMessage { content, reasoning, refusal, tool_calls } = choice.message.unwrap_or_default();
    let calls = tool_calls.unwrap_or_default().into_iter().zip(0..).map(|(call, at)| wire::ToolCallDelta {
        index: call.index.unwrap_or(at),
        id: call.id.unwrap_or_default(),
        name: call.function.name.unwrap_or_default(),
        arguments: call.function.arguments.unwrap_or_default(),
    });
    let delta = wire::Delta {
        index,
        text: choice.text.or(content).unwrap_or_default(),
        reasoning: reasoning.unwrap_or_default(),
        tool_calls: calls.collect(),
        token_ids: choice.token_ids.unwrap_or_default(),
        logprobs: choice.logprobs.map(logprobs).unwrap_or_default(),
        refusal: refusal.unwrap_or_default(),
    };
    (delta != wire::Delta { index, ..wire::Delta::default() }).then_some(delta)
}

/// How a choice ended; `None` while it has not.
pub(super) fn finish(choice: &ChunkChoice) -> Option<wire::Finish> {
    let word = choice.finish_reason.clone()?;
    let reason = match word.as_str() {
        "stop" => wire::FinishReason::Stop,
        "length" => wire::FinishReason::Length,
        "tool_calls" | "function_call" => wire::FinishReason::ToolCalls,
        "content_filter" => wire::FinishReason::ContentFilter,
        "repetition" => wire::FinishReason::Repetition,
        _ => wire::FinishReason::Other,
    };
    let stopped_by = match &choice.stop_reason {
        Some(Value::String(text)) => Some(StoppedBy::Text(text.clone())),
        Some(Value::Number(id)) => id.as_i64().map(StoppedBy::TokenId),
        _ => None,
    };
    Some(wire::Finish { index: choice.index.unwrap_or(0), reason: reason.into(), word, stopped_by })
}

fn logprobs(logprobs: ChunkLogprobs) -> Vec<wire::TokenLogprob> {
    if let Some(content) = logprobs.content {
        let entries: Vec<EngineLogprob> = serde_json::from_str(content.get()).unwrap_or_default();
        return entries.into_iter().map(chat_logprob).collect();
    }
    let mut probabilities = logprobs.token_logprobs.unwrap_or_default().into_iter();
    let mut tops = logprobs.top_logprobs.unwrap_or_default().into_iter();
    let tokens = logprobs.tokens.unwrap_or_default().into_iter();
    let of_text = tokens.map(|token| {
        let top = tops.next().flatten().unwrap_or_default().into_iter();
        let alternatives =
            top.map(|(token, logprob)| wire::Alternative { token, logprob: logprob.as_f64().unwrap_or(0.0), bytes: Bytes::new() });
        // The first token of a prompt has no probability.
        wire::TokenLogprob {
            token,
            logprob: probabilities.next().flatten().unwrap_or(0.0),
            bytes: Bytes::new(),
            alternatives: alternatives.collect(),
        }
    });
    of_text.collect()
}

fn chat_logprob(of: EngineLogprob) -> wire::TokenLogprob {
    let alternatives = of.top_logprobs.unwrap_or_default().into_iter();
    let alternatives = alternatives.map(|other| wire::Alternative {
        token: other.token,
        logprob: other.logprob.unwrap_or(0.0),
        bytes: other.bytes.unwrap_or_default().into(),
    });
    wire::TokenLogprob {
        token: of.token,
        logprob: of.logprob.unwrap_or(0.0),
        bytes: of.bytes.unwrap_or_default().into(),
        alternatives: alternatives.collect(),
    }
}

#[cfg(test)]
mod tests;
