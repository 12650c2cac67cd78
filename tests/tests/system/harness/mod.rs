//! Parts of the system tests: fleets in this process, the program as a separate process, clients,
//! and waiting.

mod admin;
mod client;
mod collector;
mod engines;
mod fleet;
mod program;
mod scene;
mod wait;

pub(crate) use admin::{Admin, Seen};
pub(crate) use client::{Answer, Answering, Endpoint, channel, exchange, json_request, raw};
pub(crate) use collector::{Collected, Collector};
pub(crate) use fleet::{Fleet, RunningRouter, Setup, attach, link};
pub(crate) use program::{
    Ended, Program, Workplace, hostler, is_alive, kill_group, session_of, signal, signal_group, signal_session, state_of,
};
pub(crate) use scene::Scene;
pub(crate) use wait::{DEADLINE, soon, until};

use serde_json::{Value, json};

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_hostler-under-test");

/// Model of simulated engines unless another is named.
pub(crate) const MODEL: &str = "simulated";

/// A chat request of `tokens` tokens.
pub(crate) fn chat(tokens: usize) -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": "Tell me about engines."}], "max_tokens": tokens})
}

/// A chat request of `tokens` tokens as an event stream.
pub(crate) fn chat_stream(tokens: usize) -> Value {
    let mut body = chat(tokens);
    body["stream"] = true.into();
    body
}

/// A stream that is not resumed when its engine is lost: it has a stop string, and sampling without
/// a seed.
pub(crate) fn unresumed_stream(tokens: usize) -> Value {
    let mut body = chat_stream(tokens);
    body["stop"] = "never said".into();
    body
}

/// Route of chats.
pub(crate) const CHAT: &str = "/v1/chat/completions";
