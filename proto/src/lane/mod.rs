//! Shared parts of both ends of a lane: the outbox that batches frames, the inbox that holds one
//! request's incoming body, and byte credit.
//!
//! Nothing here waits on its own or starts a task: frames are pushed, polled and popped, so that
//! any interleaving can be tested. The ends themselves (which open or serve ids) are the router's
//! `lanes` and the agent's `uplink`.

mod credit;
mod head;
mod inbox;
mod outbox;

pub use credit::Credit;
pub use head::{Fault, Header, ROUTER_SERVER, RequestHead, ResponseHead};
pub use inbox::{ConsumeOutcome, Inbox, InlineConsumer, StreamFault};
pub use outbox::Outbox;

use crate::agent::v1::frame::Kind;
use crate::agent::v1::{self as wire, End, Frame};

/// Most body bytes in one frame: small enough that a large body does not delay its neighbours'
/// events.
pub const MAX_BODY_BYTES: usize = 64 * 1024;

/// Body bytes that may be sent before the first credit, each way and per request.
///
/// A stalled reader makes the receiving end hold at most this much. At 10 ms of round trip one
/// stream can run at 25 MB/s, a thousand times the need of tokens.
pub const WINDOW_BYTES: usize = 256 * 1024;

/// Longest message of a fault. Hostler's own longest, a hang's cause, has some 450.
const MAX_FAULT_CHARACTERS: usize = 600;

impl Frame {
    #[must_use]
    pub fn new(id: u64, kind: Kind) -> Self {
        Self { id, kind: Some(kind) }
    }

    /// Frame that ends a body, complete if `fault` is `None`.
    #[must_use]
    pub fn end(id: u64, broken: Option<&StreamFault>) -> Self {
        let end = match broken {
            None => End::default(),
            Some(broken) => End { fault: broken.fault.to_wire().into(), message: broken.message.clone() },
        };
        Self::new(id, Kind::End(end))
    }
}

impl End {
    /// Outcome of the body; `Err` if it will never be complete.
    ///
    /// The message is the other side's, on one line of bounded length, because clients and logs get
    /// it.
    ///
    /// # Errors
    /// The fault in the frame.
    pub fn outcome(self) -> Result<(), StreamFault> {
        let message: String = self.message.chars().take(MAX_FAULT_CHARACTERS).map(|c| if c.is_control() { ' ' } else { c }).collect();
        match wire::Fault::try_from(self.fault).map(Fault::from_wire) {
            Ok(None) => Ok(()),
            Ok(Some(fault)) => Err(StreamFault { fault, message }),
            Err(_) => Err(StreamFault { fault: Fault::Protocol, message: format!("the other side reported an unknown fault: {message}") }),
        }
    }
}

/// Whether a piece of a body has only comments of an event stream.
///
/// Engines send them to keep the connection of a waiting request alive
/// (`--sse-keep-alive-interval`).
#[must_use]
pub fn is_keep_alive_comment(piece: &[u8]) -> bool {
    piece.starts_with(b":") && piece.split(|byte| *byte == b'\n').all(|line| line.is_empty() || line == b"\r" || line.starts_with(b":"))
}

#[cfg(test)]
mod tests;
