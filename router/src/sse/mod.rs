//! Reads what an engine says of an answer, in a whole answer or in the events of a stream, without changing a byte of it.

mod answer_parser;
mod dialect;
mod engine_error;
mod event;
mod sse_scanner;
mod text_length;

pub use answer_parser::TokenUsage;
pub(crate) use answer_parser::{AnswerParser, FinishState};
pub use dialect::Dialect;
pub(crate) use engine_error::EngineEnd;
pub(crate) use event::event_end;
pub(crate) use sse_scanner::ChunkOutcome;
pub use sse_scanner::SseScanner;
