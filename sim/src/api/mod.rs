//! HTTP API of vLLM: the content of requests (`fields`, `options`, `prompt`), the format of
//! answers, and the errors.
//!
//! Key order and spacing of every answer are vLLM's.

mod answer;
mod chat;
mod completions;
mod embeddings;
mod errors;
mod fields;
mod invocation;
mod logprobs;
mod messages;
mod models;
mod operate;
mod options;
mod prompt;
mod render;
mod responses;
mod rust_events;
mod structured_outputs;
#[cfg(test)]
mod tests;
mod tokenize;
mod tool_call;

pub(crate) use chat::chat;
pub(crate) use completions::completions;
pub(crate) use embeddings::embeddings;
pub(crate) use errors::{ApiError, check_type, not_found, wrong_method};
pub(crate) use invocation::{ADAPTER, parse_invocation};
pub(crate) use messages::{count_tokens, messages};
pub(crate) use models::models;
pub(crate) use operate::{collective_rpc, is_sleeping, load_adapter, sleep, unload_adapter, wake_up};
pub(crate) use render::{render_chat, render_completion};
pub(crate) use responses::{responses, stored_response};
pub(crate) use tokenize::{detokenize, tokenize};

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use parking_lot::Mutex;
use tokio::task::JoinSet;

use crate::adapters::Adapters;
use crate::args::EngineArgs;
use crate::engine::EngineHandle;
use crate::response_store::ResponseStore;

#[derive(Debug)]
pub(crate) struct Api {
    pub(crate) args: Arc<EngineArgs>,
    pub(crate) core: EngineHandle,
    pub(crate) adapters: Adapters,
    pub(crate) stored: ResponseStore,
    /// Number of requests without a seed that the Rust front-end has taken.
    pub(crate) unseeded: AtomicU64,
    /// Scheduled deaths; they end with the engine.
    pub(crate) deaths: Mutex<JoinSet<()>>,
    /// When the engine became ready, in seconds since 1970.
    pub(crate) created: u64,
}

/// Seconds since 1970, for `created`.
pub(crate) fn unix_seconds() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap_or_default().as_secs()
}

/// An id of `digits` random hexadecimal digits, at most 32.
pub(crate) fn random_id(digits: usize) -> String {
    let mut id = format!("{:032x}", fastrand::u128(..));
    id.truncate(digits);
    id
}
