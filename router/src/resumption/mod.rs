//! Streams that outlive their engine (docs/decisions/0022). Pure: `inbound` asks which requests may be resumed, `direct_writing` has the tokens of a
//! stream remembered and those of its continuation told in its own form, `dispatch` sends the continuation.

mod continuation;
mod engine_check;
mod event_form;
mod known_tokens;
mod memory;
#[cfg(test)]
pub(crate) mod samples;
mod sampling;
mod token_fields;
mod token_record;

pub(crate) use continuation::{Continuation, SEAM};
pub(crate) use engine_check::check_engine;
pub(crate) use known_tokens::{ContinuationRequest, KnownTokens};
pub(crate) use memory::RecordMemory;
pub(crate) use sampling::{Sampling, StreamApi, ask_for_tokens, unasked_part, without_asking};
pub(crate) use token_record::TokenRecord;
