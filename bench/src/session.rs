//! What is asked: conversations of one turn or several, each the same whichever target it is had with.

use std::sync::Arc;
use std::time::Duration;

/// One conversation. The next turn is asked when the previous one has been answered and its pause
/// is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// Its kind within the workload (`short`, `long answer`); figures are also given per kind.
    pub kind: &'static str,
    /// When it begins after the start of the load; `None` means as soon as a client of a closed
    /// loop is free.
    pub begins: Option<Duration>,
    /// What many sessions share at their beginning, if they do: a system prompt.
    pub system: Option<Arc<str>>,
    /// At least one.
    pub turns: Vec<Turn>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    pub says: Arc<str>,
    pub most_tokens: u32,
    /// How long the user thinks before it is asked; zero for the first turn.
    pub pause: Duration,
}
