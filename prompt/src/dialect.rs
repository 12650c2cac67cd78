//! The front-end whose rules turn the messages of a request into the input of a chat template.

/// HTTP front-end of an engine. vLLM has two, and they prepare messages in different ways.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// Python front-end, which all engines have.
    #[default]
    Python,
    /// Rust front-end, as `vllm-rs` of 0.32 works.
    ///
    /// Texts of a message are joined without a line end, tool calls have their fields in another
    /// order and keep arguments that are not objects, unknown fields are left out, and `developer`
    /// stays.
    Rust,
}

impl Dialect {
    pub const ALL: [Self; 2] = [Self::Python, Self::Rust];

    /// Dialect of a front-end by the word that agents use for it.
    ///
    /// Without a word it is the Python one.
    #[must_use]
    pub fn from_front_end(word: &str) -> Self {
        if word == "rust" { Self::Rust } else { Self::Python }
    }
}
