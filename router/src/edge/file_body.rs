//! The content of a file as an answer's body, read as its client takes it.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::Stream;
use tokio_util::io::ReaderStream;

/// Bytes that are read at a time.
const PIECE_BYTES: usize = 64 * 1024;

#[derive(Debug)]
pub(super) struct FileBody {
    pieces: ReaderStream<tokio::fs::File>,
    /// Bytes that are still to come.
    left: u64,
}

impl FileBody {
    /// The content of a file of so many bytes.
    pub(super) fn new(file: std::fs::File, bytes: u64) -> Self {
        Self { pieces: ReaderStream::with_capacity(tokio::fs::File::from_std(file), PIECE_BYTES), left: bytes }
    }

    pub(super) fn left(&self) -> u64 {
        self.left
    }

    /// The next piece; `None` at the end.
    pub(super) fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        let piece = ready!(Pin::new(&mut self.pieces).poll_next(context));
        if let Some(Ok(piece)) = &piece {
            self.left = self.left.saturating_sub(piece.len() as u64);
        }
        Poll::Ready(piece)
    }
}
