//! Streams that outlive their engine (docs/decisions/0022). Pure.
//!
//! `inbound` asks which requests may be resumed. `direct_writing` has a stream's tokens recorded,
//! and its continuation rewritten in the stream's own form or a replay compared with it (`replay`).
//! `dispatch` sends the request for the rest, or the same request again.

mod continuation;
mod engine_check;
mod event_form;
mod known_tokens;
mod memory;
mod plan;
mod replay;
#[cfg(test)]
pub(crate) mod samples;
mod sampling;
mod token_fields;
mod token_record;

pub(crate) use continuation::{Continuation, SEAM};
pub(crate) use engine_check::check_engine;
pub(crate) use known_tokens::{ContinuationRequest, KnownTokens};
pub(crate) use memory::RecordMemory;
pub(crate) use plan::ResumePlan;
#[cfg(test)]
pub(crate) use replay::samples as replay_samples;
pub(crate) use replay::{
    KeptBody, ReplayApi, ReplayPlan, ReplayRecord, are_alike, check_message_request, check_replaying_engine, have_alike_tokens,
};
pub(crate) use sampling::{Sampling, StreamApi, ask_for_tokens, unasked_part, without_asking};
pub(crate) use token_record::TokenRecord;
