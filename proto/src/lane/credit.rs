//! How many body bytes of one request may still be sent.

use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use super::WINDOW_BYTES;

/// The sending side's allowance; it begins with one window and grows by the other side's credit frames.
#[derive(Debug)]
pub struct Credit(Mutex<CreditState>);

#[derive(Debug)]
struct CreditState {
    available: usize,
    waker: Option<Waker>,
}

impl Default for Credit {
    fn default() -> Self {
        Self(Mutex::new(CreditState { available: WINDOW_BYTES, waker: None }))
    }
}

impl Credit {
    /// Takes up to `wanted` bytes of allowance; 0 when there is none.
    pub fn take(&self, wanted: usize) -> usize {
        let mut state = self.0.lock();
        let taken = wanted.min(state.available);
        state.available -= taken;
        taken
    }

    /// The other side has room for `bytes` more. More than a window at once is never available, whatever a peer grants.
    pub fn give(&self, bytes: u32) {
        let waker = {
            let mut state = self.0.lock();
            state.available = state.available.saturating_add(bytes as usize).min(WINDOW_BYTES);
            state.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    /// Ready with up to `wanted` (at least 1) bytes taken, as soon as there is allowance.
    pub fn poll_take(&self, context: &Context<'_>, wanted: usize) -> Poll<usize> {
        let mut state = self.0.lock();
        if state.available == 0 {
            state.waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        let taken = wanted.min(state.available);
        state.available -= taken;
        Poll::Ready(taken)
    }
}
