//! Conversations of one turn or several, each equal for every target.

use std::sync::Arc;
use std::time::Duration;

/// One conversation.
///
/// The next turn is sent when the previous one has been answered and its pause is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// Kind within the workload (`short`, `long answer`); figures are also given per kind.
    pub kind: &'static str,
    /// When the session begins after the start of the load; `None` means as soon as a client of a
    /// closed loop is free.
    pub begins: Option<Duration>,
    /// Beginning that many sessions share, if they do: a system prompt.
    pub system: Option<Arc<str>>,
    /// Turns, at least one.
    pub turns: Vec<Turn>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    pub says: Arc<str>,
    pub most_tokens: u32,
    /// How long the user thinks before this turn; zero for the first turn.
    pub pause: Duration,
}
