//! The client's side of HTTP/1.1 where an event has to cost little: one wake, one read, no task and no buffer for a connection that waits (decision 11).
//! The agent reads engines' answers with it and `hostler bench` its targets'. What is sent, and which connections are kept, is theirs.

mod connection;
mod framing;
mod head;

pub use connection::{Connection, Stream};
pub use framing::Framing;
pub use head::BodyFraming;
pub use httparse::Header;

/// Why there is no answer, or no more of it.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error("connection closed before message completed")]
    Closed,
    /// The answer is not HTTP/1.1, or is ambiguous.
    #[error("the answer is malformed: {0}")]
    Malformed(&'static str),
}
