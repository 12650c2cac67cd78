//! Tells a replica's streams that it leaves service or has fallen silent, and gives them turns to
//! move to another replica.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::futures::Notified;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Most streams of one replica that move at the same time. Each has its prompt and its answer so
/// far computed elsewhere, so hundreds at once would starve the streams there of tokens.
const MAX_MOVING: usize = 32;

/// Longest wait for a turn, after which a stream moves without one. PBS leaves six seconds in all.
const MAX_TURN_WAIT: Duration = Duration::from_secs(2);

/// The moves of one replica. Its streams hold this.
#[derive(Debug)]
pub(crate) struct StreamMoves {
    change: Notify,
    turns: Arc<Semaphore>,
    moved: AtomicU64,
}

impl Default for StreamMoves {
    fn default() -> Self {
        Self { change: Notify::new(), turns: Arc::new(Semaphore::new(MAX_MOVING)), moved: AtomicU64::new(0) }
    }
}

/// A stream's turn to move, until this is dropped.
#[derive(Debug)]
pub(crate) struct MoveTurn {
    _turn: Option<OwnedSemaphorePermit>,
}

impl StreamMoves {
    /// Ends once the replica begins to leave or falls silent. The first poll or `enable` registers
    /// the waiter.
    pub(crate) fn change(&self) -> Notified<'_> {
        self.change.notified()
    }

    /// Wakes the streams that wait for a change.
    pub(super) fn announce(&self) {
        self.change.notify_waiters();
    }

    pub(crate) async fn await_turn(&self) -> MoveTurn {
        let turn = timeout(MAX_TURN_WAIT, self.turns.clone().acquire_owned()).await;
        MoveTurn { _turn: turn.ok().and_then(Result::ok) }
    }

    pub(crate) fn record_move(&self) {
        self.moved.fetch_add(1, Ordering::Relaxed);
    }

    /// How many streams have moved away since the router knows the replica.
    #[must_use]
    pub(crate) fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn few_streams_move_at_once_and_none_waits_long() {
        let moves = StreamMoves::default();
        let mut turns = Vec::new();
        for _ in 0..MAX_MOVING {
            turns.push(moves.await_turn().await);
        }
        let begun = tokio::time::Instant::now();
        assert!(moves.await_turn().await._turn.is_none());
        assert_eq!(begun.elapsed(), MAX_TURN_WAIT);
        turns.pop();
        assert!(moves.await_turn().await._turn.is_some());
        assert_eq!(begun.elapsed(), MAX_TURN_WAIT);
    }
}
