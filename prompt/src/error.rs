//! What can go wrong with a request; it lies below all that reads one.

/// Why there are no tokens for a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The template refused the conversation; an engine answers 400.
    #[error("the chat template refused: {0}")]
    Template(String),
    /// The tokenizer failed.
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
    /// More text than is encoded here.
    #[error("{bytes} bytes of text; at most {most} are encoded")]
    TooLong {
        /// Of this request.
        bytes: usize,
        /// The limit.
        most: usize,
    },
    /// A chat, but the model has no chat template.
    #[error("the model has no chat template")]
    NotChat,
    /// The request asks for something that only its engine can do.
    #[error("only an engine can encode a request with {0}")]
    Unsupported(&'static str),
    /// No engine takes this request.
    #[error("the request is not valid: {0}")]
    Invalid(String),
}
