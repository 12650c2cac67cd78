//! Reads the engine's statements about an answer, from a whole answer or a stream's events, without
//! changing a byte.

mod answer_parser;
mod engine_error;
mod event;
mod line_buffer;
mod sse_scanner;
mod text_length;

pub use answer_parser::TokenUsage;
pub(crate) use answer_parser::{AnswerParser, FinishState};
pub(crate) use engine_error::EngineEnd;
pub(crate) use event::event_end;
pub use hostler_api::Dialect;
pub(crate) use line_buffer::LineBuffer;
pub(crate) use sse_scanner::ChunkOutcome;
pub use sse_scanner::SseScanner;
