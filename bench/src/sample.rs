//! Result of one request.
//!
//! Times are measured from when the request was due, not from when it was sent. A load generator or
//! a target that falls behind delays requests, and real users would have waited that long.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

/// One request that ended, in any way.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    pub kind: &'static str,
    /// How much later the request was really sent: the generator's own lateness.
    ///
    /// A client of a closed loop is never late.
    pub late: Duration,
    /// Time from due to the first token; `None` if there was none, or the answer was not streamed.
    pub first: Option<Duration>,
    /// Time from when the request was due to its end.
    pub whole: Duration,
    /// Tokens of the prompt as the target counted them; 0 if it did not report them.
    pub prompt_tokens: u64,
    /// Prompt tokens that the target had cached; `None` if it did not report them.
    pub cached_tokens: Option<u64>,
    /// Tokens of the answer as the target counted them, otherwise events with text.
    pub output_tokens: u64,
    pub outcome: Outcome,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Complete,
    /// Answered with this status instead of 200.
    Status(u16),
    Unreachable,
    /// The connection failed or broke.
    Broken,
    /// Not complete within the time for one request.
    TooLate,
    /// A stream that ended without a finish reason or without `[DONE]`.
    Truncated,
    /// A stream that the engine aborted.
    Aborted,
    /// A stream that contained an error event.
    ErrorEvent,
}

impl Sample {
    /// Mean time between the tokens of the answer; `None` if there were fewer than two, or it did
    /// not come as a stream.
    #[must_use]
    pub fn tpot(&self) -> Option<Duration> {
        let gaps = u32::try_from(self.output_tokens.checked_sub(1)?).ok().filter(|gaps| *gaps > 0)?;
        Some(self.whole.saturating_sub(self.first?) / gaps)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Complete => to.write_str("complete"),
            Self::Status(status) => write!(to, "status {status}"),
            Self::Unreachable => to.write_str("unreachable"),
            Self::Broken => to.write_str("broken"),
            Self::TooLate => to.write_str("too late"),
            Self::Truncated => to.write_str("truncated"),
            Self::Aborted => to.write_str("aborted"),
            Self::ErrorEvent => to.write_str("error event"),
        }
    }
}
