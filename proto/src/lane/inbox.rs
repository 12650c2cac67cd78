//! Receiving half of one request: its head, the unread part of its body, and its outcome.

use std::fmt::Debug;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::{Bytes, BytesMut};
use parking_lot::{Mutex, MutexGuard};

use super::{Fault, Outbox, WINDOW_BYTES};
use crate::agent::v1::Frame;
use crate::agent::v1::frame::Kind;

/// Why a body will never be complete.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct StreamFault {
    pub fault: Fault,
    /// Message for people, in one sentence.
    pub message: String,
}

impl StreamFault {
    /// Fault of a lost lane, and so of the connection to the agent.
    #[must_use]
    pub fn lane_lost() -> Self {
        Self { fault: Fault::LaneLost, message: "the connection to the node was lost".into() }
    }

    /// Fault of the other side, which broke the contract.
    #[must_use]
    pub fn protocol(message: &str) -> Self {
        Self { fault: Fault::Protocol, message: message.into() }
    }
}

/// Consumer of body pieces on the lane's own task while the body's reader waits, so that passing
/// them on costs no wake-up.
pub trait InlineConsumer: Debug + Send + Sync {
    /// Takes a piece, or gives it back for the reader. Must not touch the inbox.
    fn consume(&self, piece: Bytes) -> ConsumeOutcome;
}

#[derive(Debug)]
pub enum ConsumeOutcome {
    /// The piece was passed on.
    Consumed,
    /// The piece was passed on, but the reader must run before the next one.
    ConsumedAndWake,
    /// The reader must take the piece.
    Declined(Bytes),
}

/// Head, unread body and outcome of one request, as one end of a lane receives them.
///
/// `H` is the head's type.
#[derive(Debug)]
pub struct Inbox<H>(Mutex<InboxState<H>>);

#[derive(Debug)]
struct InboxState<H> {
    head: Option<H>,
    /// Next piece for the reader: a slice of the buffer that the lane was read into.
    first: Bytes,
    /// Pieces that came while `first` was unread, copied together.
    ///
    /// A slow reader must not hold a large read buffer for each small event.
    rest: BytesMut,
    /// Bytes read since the last credit.
    uncredited_bytes: usize,
    end: Option<Result<(), StreamFault>>,
    waker: Option<Waker>,
    consumer: Option<Arc<dyn InlineConsumer>>,
    /// The reader has all pieces so far, and the inline consumer may take the next.
    inline_active: bool,
}

impl<H> Default for Inbox<H> {
    fn default() -> Self {
        Self(Mutex::new(InboxState {
            head: None,
            first: Bytes::new(),
            rest: BytesMut::new(),
            uncredited_bytes: 0,
            end: None,
            waker: None,
            consumer: None,
            inline_active: false,
        }))
    }
}

impl<H> Inbox<H> {
    /// Stores the head and wakes the reader.
    pub fn set_head(&self, head: H) {
        self.change(|state| {
            if state.end.is_none() {
                state.head = Some(head);
            }
        });
    }

    /// Adds a piece of the body.
    ///
    /// A sender that exceeds its credit breaks the request. Credit for a piece that is consumed
    /// inline leaves by `outbox` for request `id`.
    pub fn push_body(&self, bytes: Bytes, id: u64, outbox: &Outbox) {
        self.push_piece(bytes, false, id, outbox);
    }

    /// Like [`push_body`](Self::push_body), for a piece after which more of the body or its end
    /// follows at once.
    ///
    /// The piece is left for the reader, which is woken only after that, and so passes on
    /// everything together.
    pub fn push_body_before_more(&self, bytes: Bytes, id: u64, outbox: &Outbox) {
        self.push_piece(bytes, true, id, outbox);
    }

    fn push_piece(&self, bytes: Bytes, more: bool, id: u64, outbox: &Outbox) {
        let mut state = self.0.lock();
        if state.end.is_some() || bytes.is_empty() {
            // The reader may have been left asleep for this empty piece.
            return wake(state);
        }
        let length = bytes.len();
        let taken = match &state.consumer {
            Some(taker) if state.inline_active && !more => taker.consume(bytes),
            _ => ConsumeOutcome::Declined(bytes),
        };
        // No piece may overtake one that the reader has to handle.
        state.inline_active &= matches!(taken, ConsumeOutcome::Consumed);
        let ConsumeOutcome::Declined(bytes) = taken else {
            state.uncredited_bytes += length;
            let credit = state.take_credit();
            match taken {
                ConsumeOutcome::ConsumedAndWake => wake(state),
                _ => drop(state),
            }
            return grant(credit, id, outbox);
        };
        if state.first.len() + state.rest.len() + bytes.len() > WINDOW_BYTES {
            state.end = Some(Err(StreamFault::protocol("the other side sent more than it had credit for")));
        } else if state.first.is_empty() && state.rest.is_empty() {
            state.first = bytes;
        } else {
            state.rest.extend_from_slice(&bytes);
        }
        if !more || state.end.is_some() {
            wake(state);
        }
    }

    /// Ends the body, as complete or with a fault. Only the first call counts.
    pub fn end(&self, outcome: Result<(), StreamFault>) {
        self.change(|state| {
            state.end.get_or_insert(outcome);
        });
    }

    /// Gives `taker` the pieces that come while the reader waits, until `detach`.
    pub fn attach(&self, taker: Arc<dyn InlineConsumer>) {
        self.0.lock().consumer = Some(taker);
    }

    /// Gives all further pieces to the reader.
    pub fn detach(&self) {
        let mut state = self.0.lock();
        state.inline_active = false;
        state.consumer = None;
    }

    pub fn has_ended(&self) -> bool {
        self.0.lock().end.is_some()
    }

    /// Whether the body is complete and all of it has been read.
    pub fn is_finished(&self) -> bool {
        let state = self.0.lock();
        state.end == Some(Ok(())) && state.first.is_empty() && state.rest.is_empty()
    }

    /// Polls for the head; `Err` if it will never come.
    pub fn poll_head(&self, context: &Context<'_>) -> Poll<Result<H, StreamFault>> {
        let mut state = self.0.lock();
        if let Some(head) = state.head.take() {
            return Poll::Ready(Ok(head));
        }
        match &state.end {
            Some(Err(broken)) => Poll::Ready(Err(broken.clone())),
            Some(Ok(())) => Poll::Ready(Err(StreamFault::protocol("the answer ended before it began"))),
            None => state.wait(context),
        }
    }

    /// Polls for the next piece of the body, then for its outcome.
    ///
    /// Pieces from before a fault are still delivered. Credit for read pieces leaves by `outbox`
    /// for request `id`.
    pub fn poll_body(&self, context: &Context<'_>, id: u64, outbox: &Outbox) -> Poll<Result<Option<Bytes>, StreamFault>> {
        let mut state = self.0.lock();
        let piece = if state.first.is_empty() { state.rest.split().freeze() } else { std::mem::take(&mut state.first) };
        if !piece.is_empty() {
            state.inline_active = false;
            state.uncredited_bytes += piece.len();
            let credit = state.take_credit();
            drop(state);
            grant(credit, id, outbox);
            return Poll::Ready(Ok(Some(piece)));
        }
        match &state.end {
            Some(Ok(())) => Poll::Ready(Ok(None)),
            Some(Err(broken)) => Poll::Ready(Err(broken.clone())),
            None => {
                state.inline_active = state.consumer.is_some();
                state.wait(context)
            }
        }
    }

    fn change(&self, change: impl FnOnce(&mut InboxState<H>)) {
        let mut state = self.0.lock();
        change(&mut state);
        wake(state);
    }
}

/// Sends a credit frame, unless `credit` is 0.
fn grant(credit: u32, id: u64, outbox: &Outbox) {
    if credit > 0 {
        outbox.push(Frame::new(id, Kind::Credit(credit)));
    }
}

/// Wakes the reader. Releases the lock first, because the woken reader will want it.
fn wake<H>(mut state: MutexGuard<'_, InboxState<H>>) {
    let waker = state.waker.take();
    drop(state);
    waker.into_iter().for_each(Waker::wake);
}

impl<H> InboxState<H> {
    /// Takes the credit to return: half a window at a time, one frame per 128 KiB.
    fn take_credit(&mut self) -> u32 {
        if self.uncredited_bytes < WINDOW_BYTES / 2 || self.end.is_some() {
            return 0;
        }
        u32::try_from(std::mem::take(&mut self.uncredited_bytes)).unwrap_or(u32::MAX)
    }

    fn wait<T>(&mut self, context: &Context<'_>) -> Poll<T> {
        self.waker = Some(context.waker().clone());
        Poll::Pending
    }
}
