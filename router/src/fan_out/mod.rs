//! Requests of several answers at engines that give one: vLLM's Rust front-end takes a single
//! prompt and a single choice.
//!
//! The request is split into one for each answer. All go to one replica, which has the prompt
//! cached after the first. Their answers are merged into the one that the Python front-end would
//! give.

mod exchange;
mod merge;
mod plan;

pub(crate) use exchange::AnswerExchange;
pub(crate) use plan::{FanOut, FanOutForm};
