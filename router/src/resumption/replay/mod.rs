//! Resumes streams by sending their request again. The replay is compared with what the client has,
//! which is not sent twice.

mod choices;
mod engines;
mod event;
mod logprobs;
mod messages;
mod plan;
mod record;
mod rules;
#[cfg(test)]
pub(crate) mod samples;
mod transcript;

pub(crate) use engines::{are_alike, check_replaying_engine, have_alike_tokens};
pub(crate) use plan::{KeptBody, ReplayApi, ReplayPlan};
pub(crate) use record::ReplayRecord;
pub(crate) use rules::check_message_request;
