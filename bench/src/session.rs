//! What is asked: conversations of one turn or several, each the same whichever target it is had with.

use std::sync::Arc;
use std::time::Duration;

/// One conversation. Its turns follow each other; the next is asked when the one before has been answered and its pause is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// The kind of it within its workload (`short`, `long answer`), by which figures are also told apart.
    pub kind: &'static str,
    /// When it begins after the start of the load; `None` when a client of a closed loop is free.
    pub begins: Option<Duration>,
    /// What many sessions share at their beginning, if they do: a system prompt.
    pub system: Option<Arc<str>>,
    /// At least one.
    pub turns: Vec<Turn>,
}

/// One question, and how long its answer may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// What the user says.
    pub says: Arc<str>,
    /// Tokens of the answer at most.
    pub most_tokens: u32,
    /// How long the user thinks before it is asked; zero for the first turn.
    pub pause: Duration,
}
