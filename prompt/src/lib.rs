//! Exact conversion of a request into the tokens its engine will see, for models with a Hugging
//! Face tokenizer.
//!
//! The router calls it on a bounded pool of CPU threads; nothing here waits, and nothing here reads
//! a file or the network.
//!
//! Three steps must equal the engine's own work: the chat template (`template`), the changes to
//! messages before the template sees them (`messages`) and the tokenizer (`tokens`). Engines differ
//! in details between releases, and more between their two front-ends ([`Dialect`]). An encoder is
//! therefore believed only once [`proof`] has compared it with an engine that has the same files
//! and front-end, and only for the [`PromptForms`] about which they agreed.
//!
//! Some requests are left to the engine, as errors: templates that a request brings, templates with
//! `%` between texts, chats of models in the harmony format, truncation to a length that only the
//! engine knows.

pub mod proof;

mod dialect;
mod encoder;
mod error;
mod files;
mod forms;
mod messages;
mod request;
mod template;
mod tokens;
mod tree_size;

pub use dialect::Dialect;
pub use encoder::{EncodedPrompt, Encoder, MAX_TEXT_BYTES};
pub use error::EncodeError;
pub use files::{FilesError, ModelFiles};
pub use forms::{PromptForm, PromptForms};
pub use request::PromptRequest;
pub use tokens::{ContinueReading, EncoderStats, Progress};
pub use tree_size::{TooManyValues, check_tree_size};

#[cfg(test)]
mod fixture;
