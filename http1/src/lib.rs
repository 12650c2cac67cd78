//! The client's side of HTTP/1.1 with little cost per event: one wake, one read, no task and no
//! buffer for a connection that waits (decision 11).
//!
//! The agent uses it for engines' answers and `hostler bench` for its targets'. Both decide
//! themselves about requests and kept connections.

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
