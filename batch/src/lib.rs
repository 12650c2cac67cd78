//! Batches: the requests of a file go to an OpenAI endpoint, and their answers to another file.
//!
//! The input is checked whole before anything is sent. The `drive` gets each request answered by a
//! `sender`. The journal keeps each answer at once, so that a killed batch can continue. At the end
//! its answers become the output, in the order of the input. The crate `batch_file` has these
//! files.

mod args;
mod drive;
mod error;
pub mod progress;
mod sender;

pub use args::BatchArgs;
pub use drive::{Batch, Summary};
pub use error::{BatchError, EXIT_CODES};
