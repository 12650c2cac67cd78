//! The HTTP API that clients speak and engines answer: OpenAI's, and those that vLLM has beside it.
//! Router, agent, prompt reader and simulated engine share it. Pure: nothing here waits or knows a
//! fleet.

mod announced_model;
mod completion;
mod dialect;
mod path_alias;
mod routes;

pub use announced_model::{NAMES_FLAG, announced_card, given_model_names};
pub use completion::{ChunkChoice, ChunkFunction, ChunkLogprobs, ChunkMessage, ChunkToolCall, ChunkUsage, CompletionChunk, lenient};
pub use dialect::Dialect;
pub use path_alias::path_alias;
pub use routes::{Prompts, Route, ServedBy, Work};
