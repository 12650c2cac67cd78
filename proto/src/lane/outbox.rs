//! Frames that wait to leave on one lane.
//!
//! The lane's task takes all ready frames as one batch. So a step of the engine, which gives an
//! event to each of its streams, costs one message. The outbox needs no bound of its own: credit
//! bounds bodies, and the number of requests bounds the other frames.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures_util::Stream;
use parking_lot::Mutex;
use prost::Message;

use crate::agent::v1::frame::Kind;
use crate::agent::v1::{Frame, FrameBatch};

/// Approximate limit of one batch in bytes, heads included; its last frame may exceed it.
///
/// A message of this size still leaves the connection's other lanes their turn.
const BATCH_BYTES: usize = 128 * 1024;

const BATCH_FRAMES: usize = 1024;

/// Frames that wait to leave on a lane, in order.
#[derive(Debug, Default)]
pub struct Outbox(Mutex<OutboxState>);

#[derive(Debug, Default)]
struct OutboxState {
    ready: VecDeque<Frame>,
    waker: Option<Waker>,
    closed: bool,
}

impl Outbox {
    /// Adds a frame. After `close` it is dropped, because the lane's requests already know.
    pub fn push(&self, frame: Frame) {
        let waker = {
            let mut state = self.0.lock();
            if state.closed {
                return;
            }
            state.ready.push_back(frame);
            state.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    /// Removes the queued frames of a request that nobody wants any more, so that its body is not
    /// kept for a slow peer.
    ///
    /// `true` if its head was among them: then the peer has never heard of the request.
    pub fn withdraw(&self, id: u64) -> bool {
        let mut state = self.0.lock();
        let mut unheard = false;
        state.ready.retain(|frame| {
            unheard |= frame.id == id && matches!(frame.kind, Some(Kind::Request(_)));
            frame.id != id
        });
        unheard
    }

    /// Stops sending; the stream of batches ends at once.
    pub fn close(&self) {
        let waker = {
            let mut state = self.0.lock();
            state.closed = true;
            state.ready.clear();
            state.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    /// Takes all ready frames, up to the size of one batch; `None` if there are none.
    pub fn take_batch(&self) -> Option<FrameBatch> {
        self.0.lock().take_batch()
    }

    /// Batches as a stream, for the lane's call. The stream ends after `close`.
    pub fn batches(self: &Arc<Self>) -> Batches {
        Batches(self.clone())
    }
}

impl OutboxState {
    fn take_batch(&mut self) -> Option<FrameBatch> {
        let mut frames = Vec::with_capacity(self.ready.len().min(BATCH_FRAMES));
        let mut bytes = 0;
        while frames.len() < BATCH_FRAMES && bytes < BATCH_BYTES {
            let Some(frame) = self.ready.pop_front() else { break };
            bytes += match &frame.kind {
                Some(Kind::Body(body)) => body.len(),
                _ => frame.encoded_len(),
            };
            frames.push(frame);
        }
        (!frames.is_empty()).then_some(FrameBatch { frames })
    }
}

#[derive(Debug)]
pub struct Batches(Arc<Outbox>);

impl Stream for Batches {
    type Item = FrameBatch;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<FrameBatch>> {
        let mut state = self.0.0.lock();
        if state.closed {
            return Poll::Ready(None);
        }
        let batch = state.take_batch();
        if batch.is_none() {
            state.waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(batch)
    }
}
