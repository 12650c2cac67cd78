//! A bundle on its way from an agent. Pieces come in order, each once; anything else breaks the
//! transfer. Reads no clock.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

/// Time without a piece after which the agent is gone or has lost the order.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct FilesPiece {
    /// The piece's offset within the bundle.
    pub offset: u64,
    /// The bytes, or why the agent cannot send them.
    pub content: Result<Bytes, String>,
}

#[derive(Debug)]
pub(super) struct Transfer {
    bytes: usize,
    content: Vec<u8>,
    last_part: Instant,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TransferError {
    #[error("the agent cannot send them: {0}")]
    Refused(String),
    #[error("a piece begins at {offset}, but {expected} bytes have come")]
    Gap { offset: u64, expected: usize },
    #[error("a piece is empty, or goes beyond the {bytes} bytes that were announced")]
    Length { bytes: usize },
}

impl Transfer {
    /// Reserves memory without cost: pages that are not written cost nothing.
    pub(super) fn new(bytes: usize, now: Instant) -> Self {
        Self { bytes, content: Vec::with_capacity(bytes), last_part: now }
    }

    /// Adds a piece. Returns `true` if it was the last one.
    pub(super) fn append(&mut self, part: FilesPiece, now: Instant) -> Result<bool, TransferError> {
        let data = part.content.map_err(TransferError::Refused)?;
        if part.offset != self.content.len() as u64 {
            return Err(TransferError::Gap { offset: part.offset, expected: self.content.len() });
        }
        if data.is_empty() || data.len() > self.bytes - self.content.len() {
            return Err(TransferError::Length { bytes: self.bytes });
        }
        self.content.extend_from_slice(&data);
        self.last_part = now;
        Ok(self.content.len() == self.bytes)
    }

    /// Whether no more pieces are expected.
    pub(super) fn has_stalled(&self, now: Instant) -> bool {
        now.duration_since(self.last_part) >= STALL_TIMEOUT
    }

    /// The bytes so far.
    pub(super) fn into_content(self) -> Vec<u8> {
        self.content
    }
}

#[cfg(test)]
mod tests;
