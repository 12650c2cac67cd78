//! One bundle on its way from an agent. Pieces come in order, each once; anything else breaks it. Reads no clock.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

/// Without a piece for this long the agent is gone, or has lost the order.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);

/// A piece of a bundle.
#[derive(Debug)]
pub struct FilesPiece {
    /// Where it begins.
    pub offset: u64,
    /// Or why the agent cannot send them.
    pub content: Result<Bytes, String>,
}

/// What has come of a bundle so far.
#[derive(Debug)]
pub(super) struct Transfer {
    /// How long it will be.
    bytes: usize,
    content: Vec<u8>,
    last_part: Instant,
}

/// Why a transfer cannot go on.
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
    /// Nothing has come. The memory is only reserved: pages that are not written cost nothing.
    pub(super) fn new(bytes: usize, now: Instant) -> Self {
        Self { bytes, content: Vec::with_capacity(bytes), last_part: now }
    }

    /// Takes a piece; `true` when it was the last one.
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

    /// Whether nothing more is expected of it.
    pub(super) fn has_stalled(&self, now: Instant) -> bool {
        now.duration_since(self.last_part) >= STALL_TIMEOUT
    }

    /// What has come.
    pub(super) fn into_content(self) -> Vec<u8> {
        self.content
    }
}

#[cfg(test)]
mod tests;
