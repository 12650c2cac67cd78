//! The HTTP API that clients speak and engines answer: OpenAI's, and those that vLLM has beside it.
//! Router, agent, prompt reader and simulated engine share it. Pure: nothing here waits or knows a
//! fleet.

mod completion;
mod dialect;
mod path_alias;
mod routes;

pub use completion::{ChunkChoice, ChunkFunction, ChunkLogprobs, ChunkMessage, ChunkToolCall, ChunkUsage, CompletionChunk, lenient};
pub use dialect::Dialect;
pub use path_alias::path_alias;
pub use routes::{Prompts, Route, ServedBy, Work};
