//! The router's end of the lanes: opens requests towards an agent, delivers their answers, and
//! cancels requests that nobody wants any more.
//!
//! A lane is driven from outside: `receive` with each batch that came, `outbox` for frames to send,
//! `mark_lost` when its stream has ended.

mod lane_set;

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hostler_proto::agent::v1::frame::Kind;
use hostler_proto::agent::v1::{Cancel, Frame, FrameBatch};
use hostler_proto::lane::{Inbox, InlineConsumer, MAX_BODY_BYTES, Outbox, RequestHead, ResponseHead, StreamFault, WINDOW_BYTES};
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use rustc_hash::FxHashMap;

pub use lane_set::{Lanes, Tickets};

/// A lane: its open requests, and the frames that wait to leave.
#[derive(Debug)]
pub struct Lane {
    outbox: Arc<Outbox>,
    state: Mutex<LaneState>,
    unknown_frames: Counter,
}

#[derive(Debug, Default)]
struct LaneState {
    requests: FxHashMap<u64, LaneRequest>,
    is_lost: bool,
}

/// The lane's side of one open request.
#[derive(Debug)]
struct LaneRequest {
    inbox: Arc<Inbox<ResponseHead>>,
    /// The part of the body that has no credit yet.
    unsent_body: Bytes,
}

impl Lane {
    /// Frames for unknown ids are counted in `unknown_frames`.
    #[must_use]
    pub fn new(unknown_frames: Counter) -> Arc<Self> {
        Arc::new(Self { outbox: Arc::default(), state: Mutex::default(), unknown_frames })
    }

    #[must_use]
    pub fn outbox(&self) -> &Arc<Outbox> {
        &self.outbox
    }

    /// Sends a request under `id`, which must be new to the lane.
    ///
    /// # Errors
    /// If the lane is lost.
    pub fn open(self: &Arc<Self>, id: u64, head: RequestHead, body: Bytes) -> Result<Exchange, StreamFault> {
        let inbox = Arc::new(Inbox::default());
        let mut open = self.state.lock();
        if open.is_lost {
            return Err(StreamFault::lane_lost());
        }
        self.outbox.push(Frame::new(id, Kind::Request(head.into())));
        let unsent_body = self.send_body(id, body, WINDOW_BYTES);
        open.requests.insert(id, LaneRequest { inbox: inbox.clone(), unsent_body });
        Ok(Exchange { id, lane: self.clone(), inbox })
    }

    pub fn receive(&self, batch: FrameBatch) {
        let mut frames = batch.frames.into_iter().peekable();
        while let Some(Frame { id, kind }) = frames.next() {
            // Release the lock while a piece of a body is consumed, which may write to the client.
            let mut open = self.state.lock();
            let (Some(call), Some(kind)) = (open.requests.get_mut(&id), kind) else {
                self.unknown_frames.inc();
                continue;
            };
            match kind {
                Kind::Body(bytes) => {
                    let inbox = call.inbox.clone();
                    drop(open);
                    // The last event of a stream, its `[DONE]` line and the end of the answer
                    // become one write to the client instead of three.
                    if frames.peek().is_some_and(|next| next.id == id && matches!(next.kind, Some(Kind::Body(_) | Kind::End(_)))) {
                        inbox.push_body_before_more(bytes, id, &self.outbox);
                    } else {
                        inbox.push_body(bytes, id, &self.outbox);
                    }
                }
                Kind::Response(head) => call.inbox.set_head(head.into()),
                Kind::Credit(bytes) => {
                    let unsent = std::mem::take(&mut call.unsent_body);
                    if !unsent.is_empty() {
                        call.unsent_body = self.send_body(id, unsent, bytes as usize);
                    }
                }
                Kind::End(end) => {
                    call.inbox.end(end.outcome());
                    open.requests.remove(&id);
                }
                Kind::Request(_) | Kind::Cancel(_) => {
                    call.inbox.end(Err(StreamFault::protocol("the agent sent a frame that only a router sends")));
                }
            }
        }
    }

    /// Marks the lane lost because its stream has ended. Open requests break for this reason, and
    /// later ones are refused.
    pub fn mark_lost(&self, loss: &StreamFault) {
        let calls = {
            let mut open = self.state.lock();
            open.is_lost = true;
            std::mem::take(&mut open.requests)
        };
        self.outbox.close();
        calls.into_values().for_each(|call| call.inbox.end(Err(loss.clone())));
    }

    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.state.lock().is_lost
    }

    #[must_use]
    pub fn open_request_count(&self) -> usize {
        self.state.lock().requests.len()
    }

    /// Sends as much of `body` as `credit` allows, with the end after the last byte. Returns the
    /// rest.
    fn send_body(&self, id: u64, mut body: Bytes, mut credit: usize) -> Bytes {
        while !body.is_empty() && credit > 0 {
            let piece = body.split_to(body.len().min(credit).min(MAX_BODY_BYTES));
            credit -= piece.len();
            self.outbox.push(Frame::new(id, Kind::Body(piece)));
        }
        if body.is_empty() {
            self.outbox.push(Frame::end(id, None));
        }
        body
    }
}

/// A request and its answer. Dropping it before the answer has ended cancels the request at the
/// agent.
#[derive(Debug)]
pub struct Exchange {
    id: u64,
    lane: Arc<Lane>,
    inbox: Arc<Inbox<ResponseHead>>,
}

impl Exchange {
    /// The answer's head; `Err` if it will never come.
    pub fn poll_head(&self, context: &Context<'_>) -> Poll<Result<ResponseHead, StreamFault>> {
        self.inbox.poll_head(context)
    }

    /// Whether the answer is complete and all of it has been read.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.inbox.is_finished()
    }

    /// Lets `consumer` take the body's pieces while none waits to be read, until `detach`.
    pub fn attach(&self, consumer: Arc<dyn InlineConsumer>) {
        self.inbox.attach(consumer);
    }

    /// See [`Exchange::attach`].
    pub fn detach(&self) {
        self.inbox.detach();
    }

    /// The next bytes of the answer's body, `None` at its end.
    pub fn poll_body(&self, context: &Context<'_>) -> Poll<Result<Option<Bytes>, StreamFault>> {
        self.inbox.poll_body(context, self.id, &self.lane.outbox)
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        let left_open = self.lane.state.lock().requests.remove(&self.id);
        if left_open.is_some() && !self.lane.outbox.withdraw(self.id) {
            self.lane.outbox.push(Frame::new(self.id, Kind::Cancel(Cancel {})));
        }
    }
}

#[cfg(test)]
mod tests;
