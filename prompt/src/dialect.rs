//! Whose rules turn the messages of a request into what a chat template sees.

/// The HTTP front-end of an engine. vLLM has two, and they prepare messages in different ways.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// The one in Python, which all engines have.
    #[default]
    Python,
    /// The one in Rust, as `vllm-rs` of 0.32 does it: texts of a message are joined without a line
    /// end, tool calls have their fields in another order and keep arguments that are no object,
    /// unknown fields are left out, and `developer` stays.
    Rust,
}

impl Dialect {
    pub const ALL: [Self; 2] = [Self::Python, Self::Rust];

    /// The dialect of a front-end by the word that agents use for it. Without a word it is the
    /// Python one.
    #[must_use]
    pub fn from_front_end(word: &str) -> Self {
        if word == "rust" { Self::Rust } else { Self::Python }
    }
}
