//! Reads the state of an engine from the error that it returns.

use std::borrow::Cow;

use serde::Deserialize;

use super::event::{EventFields, event_end};

/// How errors of a dead core begin. The second one is that of a stream of messages: vLLM 0.32 fails
/// to read the first one in the chat beneath, and Pydantic shows both ends of it.
const CORE_IS_DEAD: [&str; 2] = [
    "EngineCore encountered an issue",
    "2 validation errors for ChatCompletionStreamResponse\nmodel\n  Field required [type=missing, input_value={'error': {'message': 'En...",
];

/// An engine's error for a request that it takes after SIGTERM and never begins, in the words of
/// vLLM's executor.
const ENGINE_STOPS: &str = "cannot schedule new futures after shutdown";

/// How an engine ends that answers with an error. Any other internal error is the request's own,
/// whatever it repeats of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EngineEnd {
    /// The core has died. vLLM's Python front-end says so until it exits 2 to 5 s later; the Rust
    /// one breaks off.
    CoreDied,
    /// The engine is stopping, and has begun nothing of the request.
    Stopping,
}

impl EngineEnd {
    /// Reads an error, which is a plain answer or the first event of a stream.
    #[must_use]
    pub(crate) fn read(error: &[u8]) -> Option<Self> {
        let message = error_message(error)?;
        if CORE_IS_DEAD.iter().any(|begin| message.starts_with(begin)) {
            Some(Self::CoreDied)
        } else {
            (message == ENGINE_STOPS).then_some(Self::Stopping)
        }
    }
}

fn error_message(error: &[u8]) -> Option<Cow<'_, str>> {
    #[derive(Deserialize)]
    struct Error<'a> {
        #[serde(borrow)]
        error: Option<Said<'a>>,
        #[serde(borrow)]
        message: Option<Cow<'a, str>>,
    }
    #[derive(Deserialize)]
    struct Said<'a> {
        #[serde(borrow)]
        message: Cow<'a, str>,
    }
    let data = EventFields::parse(&error[..event_end(error).unwrap_or(error.len())]).data.unwrap_or(error);
    let Error { error, message } = serde_json::from_slice(data).ok()?;
    error.map(|error| error.message).or(message)
}

#[cfg(test)]
mod tests;
