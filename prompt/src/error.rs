//! Errors of a request. This module is below all modules that read one.

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The template refused the conversation, as an engine would with 400.
    #[error("the chat template refused: {0}")]
    Template(String),
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
    #[error("{bytes} bytes of text; at most {most} are encoded")]
    TooLong { bytes: usize, most: usize },
    #[error("the model has no chat template")]
    NotChat,
    /// Only the engine itself can encode such a request.
    #[error("only an engine can encode a request with {0}")]
    Unsupported(&'static str),
    /// No engine accepts this request.
    #[error("the request is not valid: {0}")]
    Invalid(String),
}
