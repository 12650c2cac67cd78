//! From a request to the tokens its engine will see, exactly, for models with a Hugging Face tokenizer. The router calls it on a bounded
//! pool of CPU threads; nothing here waits, and nothing here reads a file or the network.
//!
//! What must be equal to the engine's own work is the chat template (`template`), what the engine does to messages before the template
//! sees them (`messages`) and the tokenizer (`tokens`). Engines differ in details between releases, and more between their two front-ends
//! ([`Dialect`]); therefore an encoder is believed once [`proof`] has compared it with an engine that has the same files and front-end, and of
//! the [`PromptForms`] of prompts that they agreed about.
//!
//! Left to the engine, as errors: templates that a request brings, templates with `%` between texts, chats of models in the harmony format,
//! truncation to a length that only the engine knows.

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
