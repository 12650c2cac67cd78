//! Credit: the number of body bytes of one request that may still be sent.

use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use super::WINDOW_BYTES;

/// Body bytes that the sender may still send: one window at first, plus the other side's credit
/// frames.
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
    /// Takes up to `wanted` bytes of credit, and returns 0 if there is none.
    pub fn try_take(&self, wanted: usize) -> usize {
        let mut state = self.0.lock();
        let taken = wanted.min(state.available);
        state.available -= taken;
        taken
    }

    /// Adds `bytes` of credit, capped at one window whatever the peer grants.
    pub fn grant(&self, bytes: u32) {
        let waker = {
            let mut state = self.0.lock();
            state.available = state.available.saturating_add(bytes as usize).min(WINDOW_BYTES);
            state.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    /// Ready with up to `wanted` bytes of credit (at least 1), as soon as there is any.
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
