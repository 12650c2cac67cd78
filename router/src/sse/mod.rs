//! Reads what an engine says of an answer, in a whole answer or in the events of a stream, without changing a byte of it.

mod answer_parser;
mod sse_scanner;

pub use answer_parser::TokenUsage;
pub(crate) use answer_parser::{AnswerParser, FinishState};
pub(crate) use sse_scanner::{ChunkOutcome, event_end, is_engine_death, is_engine_stopping};
pub use sse_scanner::{Dialect, SseScanner};
