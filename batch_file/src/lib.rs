//! The files of a batch in OpenAI's format, for `hostler batch` and the router's Batch API.
//!
//! The `input` is checked whole before anything is sent. `retry` decides whether an answer is
//! final. The `journal` keeps each final answer at once, so that a killed batch can continue. Its
//! lines become the output, in the order of the input. Everything here blocks, and nothing waits
//! for a network.

mod error;
mod input;
mod journal;
mod output_line;
mod request_line;
mod retry;

pub use error::FileError;
pub use input::{Input, InputBounds, InputProblems, LineProblem};
pub use journal::Journal;
pub use output_line::{Answer, Outcome, OutputLine, error_message, write as write_output};
pub use request_line::{LineError, MAX_BODY_BYTES, RequestLine, parse as parse_request};
pub use retry::{Attempts, Judgement};

/// Priority of requests that set none. Interactive requests, which have 0, go first.
pub const PRIORITY: i32 = 100;
