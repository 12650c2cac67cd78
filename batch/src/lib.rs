//! Sends the requests of a file to an OpenAI endpoint and writes their answers to another. The `input` is checked whole before anything is
//! sent; the `drive` has each request answered by a `sender`, which tries again as `retry` decides; the `journal` keeps each answer at once,
//! so that a batch that was killed goes on; at the end its answers become the output, in the order of the input.

mod args;
mod drive;
mod error;
mod input;
mod journal;
mod output_line;
pub mod progress;
mod request_line;
mod retry;
mod sender;

pub use args::BatchArgs;
pub use drive::{Batch, Summary};
pub use error::{BatchError, EXIT_CODES};
