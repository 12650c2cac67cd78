//! The HTTP API that clients speak and engines answer: OpenAI's, and those that vLLM has beside it.
//! Router, agent, prompt reader and simulated engine share it. Pure: nothing here waits or knows a
//! fleet.

mod dialect;
mod routes;

pub use dialect::Dialect;
pub use routes::{Prompts, Route, ServedBy, Work};
