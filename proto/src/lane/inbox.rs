//! The receiving half of one request: its head, its body as far as it has come and not been read, and how it ended.

use std::task::{Context, Poll, Waker};

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;

use super::{Outbox, WINDOW_BYTES};
use crate::agent::v1::frame::Kind;
use crate::agent::v1::{Fault, Frame};

/// Why a body will never be complete.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Broken {
    /// Whose fault it is.
    pub fault: Fault,
    /// One sentence for people.
    pub message: String,
}

impl Broken {
    /// The lane, and with it the connection to the agent, is gone.
    #[must_use]
    pub fn lane_lost() -> Self {
        Self { fault: Fault::LaneLost, message: "the connection to the node was lost".into() }
    }

    /// The other side broke the contract.
    #[must_use]
    pub fn protocol(message: &str) -> Self {
        Self { fault: Fault::Protocol, message: message.into() }
    }
}

/// Head, unread body and outcome of one request, as one end of a lane receives them. `H` is the head's type.
#[derive(Debug)]
pub struct Inbox<H>(Mutex<State<H>>);

#[derive(Debug)]
struct State<H> {
    head: Option<H>,
    /// What the reader gets next: a slice of the buffer that the lane was read into.
    first: Bytes,
    /// What came while `first` was unread, copied together: a slow reader must not hold a large read buffer for each small event.
    rest: BytesMut,
    /// Bytes read since the last credit.
    unannounced: usize,
    end: Option<Result<(), Broken>>,
    waker: Option<Waker>,
}

impl<H> Default for Inbox<H> {
    fn default() -> Self {
        Self(Mutex::new(State { head: None, first: Bytes::new(), rest: BytesMut::new(), unannounced: 0, end: None, waker: None }))
    }
}

impl<H> Inbox<H> {
    /// The head has come.
    pub fn head(&self, head: H) {
        self.change(|state| {
            if state.end.is_none() {
                state.head = Some(head);
            }
        });
    }

    /// A piece of the body has come. A sender that goes past its credit breaks the request.
    pub fn body(&self, bytes: Bytes) {
        self.change(|state| {
            if state.end.is_some() || bytes.is_empty() {
                return;
            }
            if state.first.len() + state.rest.len() + bytes.len() > WINDOW_BYTES {
                state.end = Some(Err(Broken::protocol("the other side sent more than it had credit for")));
            } else if state.first.is_empty() && state.rest.is_empty() {
                state.first = bytes;
            } else {
                state.rest.extend_from_slice(&bytes);
            }
        });
    }

    /// The body is complete, or will never be. Only the first call counts.
    pub fn end(&self, outcome: Result<(), Broken>) {
        self.change(|state| {
            state.end.get_or_insert(outcome);
        });
    }

    /// Whether `end` was called.
    pub fn has_ended(&self) -> bool {
        self.0.lock().end.is_some()
    }

    /// Whether the body is complete and all of it has been read.
    pub fn is_finished(&self) -> bool {
        let state = self.0.lock();
        state.end == Some(Ok(())) && state.first.is_empty() && state.rest.is_empty()
    }

    /// The head; `Err` when it will never come.
    pub fn poll_head(&self, context: &Context<'_>) -> Poll<Result<H, Broken>> {
        let mut state = self.0.lock();
        if let Some(head) = state.head.take() {
            return Poll::Ready(Ok(head));
        }
        match &state.end {
            Some(Err(broken)) => Poll::Ready(Err(broken.clone())),
            Some(Ok(())) => Poll::Ready(Err(Broken::protocol("the answer ended before it began"))),
            None => state.wait(context),
        }
    }

    /// The next piece of the body, then how it ended: what had come before a break is still delivered. Credit for what has been
    /// read leaves by `outbox`, in the name of request `id`.
    pub fn poll_body(&self, context: &Context<'_>, id: u64, outbox: &Outbox) -> Poll<Result<Option<Bytes>, Broken>> {
        let mut state = self.0.lock();
        let piece = if state.first.is_empty() { state.rest.split().freeze() } else { std::mem::take(&mut state.first) };
        if !piece.is_empty() {
            state.unannounced += piece.len();
            let credit = state.announce();
            drop(state);
            if credit > 0 {
                outbox.push(Frame::new(id, Kind::Credit(credit)));
            }
            return Poll::Ready(Ok(Some(piece)));
        }
        match &state.end {
            Some(Ok(())) => Poll::Ready(Ok(None)),
            Some(Err(broken)) => Poll::Ready(Err(broken.clone())),
            None => state.wait(context),
        }
    }

    fn change(&self, change: impl FnOnce(&mut State<H>)) {
        let waker = {
            let mut state = self.0.lock();
            change(&mut state);
            state.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }
}

impl<H> State<H> {
    /// Credit goes back half a window at a time, so that it costs one frame in 128 KiB.
    fn announce(&mut self) -> u32 {
        if self.unannounced < WINDOW_BYTES / 2 || self.end.is_some() {
            return 0;
        }
        u32::try_from(std::mem::take(&mut self.unannounced)).unwrap_or(u32::MAX)
    }

    fn wait<T>(&mut self, context: &Context<'_>) -> Poll<T> {
        self.waker = Some(context.waker().clone());
        Poll::Pending
    }
}
