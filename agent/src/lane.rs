//! The agent's end of a lane: separates new requests from frames of running ones, and remembers
//! which ids are being served.
//!
//! Its owner drives it, as with the router's end: `receive` with each batch, `outbox` for outgoing
//! frames, `close` at the end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use hostler_proto::agent::v1::frame::Kind;
use hostler_proto::agent::v1::{Frame, FrameBatch};
use hostler_proto::lane::{Credit, Inbox, MAX_BODY_BYTES, Outbox, RequestHead, ResponseHead, StreamFault};
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use rustc_hash::FxHashMap;

/// One lane: the requests being served on it, and the frames that wait to leave.
#[derive(Debug)]
pub struct Lane {
    outbox: Arc<Outbox>,
    active: Mutex<FxHashMap<u64, Arc<LaneRequest>>>,
    unknown_frames: Counter,
}

#[derive(Debug, Default)]
struct LaneRequest {
    inbox: Inbox<()>,
    credit: Credit,
    cancel: CancelSignal,
}

/// Whether the router has cancelled.
///
/// A task checks this at each event, so the check must cost next to nothing.
#[derive(Debug, Default)]
struct CancelSignal {
    is_set: AtomicBool,
    task: AtomicWaker,
}

impl CancelSignal {
    fn set(&self) {
        self.is_set.store(true, Ordering::Release);
        self.task.wake();
    }

    fn poll(&self, context: &Context<'_>) -> Poll<()> {
        self.task.register(context.waker());
        if self.is_set.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
    }
}

#[derive(Debug)]
pub struct IncomingRequest {
    pub head: RequestHead,
    pub stream: RequestStream,
}

impl Lane {
    /// Creates a lane without requests, which counts frames with unknown ids in `unknown_frames`.
    #[must_use]
    pub fn new(unknown_frames: Counter) -> Arc<Self> {
        Arc::new(Self { outbox: Arc::default(), active: Mutex::default(), unknown_frames })
    }

    #[must_use]
    pub fn outbox(&self) -> &Arc<Outbox> {
        &self.outbox
    }

    /// Processes the frames that the router sent, and returns the requests that began.
    pub fn receive(self: &Arc<Self>, batch: FrameBatch) -> Vec<IncomingRequest> {
        let mut began = Vec::new();
        let mut running = self.active.lock();
        for Frame { id, kind } in batch.frames {
            let Some(kind) = kind else { continue };
            if let Kind::Request(head) = kind {
                let shared = Arc::<LaneRequest>::default();
                if running.insert(id, shared.clone()).is_some() {
                    tracing::error!(id, "a router used a request's id twice; the earlier request is lost");
                }
                began.push(IncomingRequest { head: head.into(), stream: RequestStream { id, lane: self.clone(), shared } });
                continue;
            }
            if matches!(kind, Kind::Cancel(_)) {
                // A cancel that crosses the answer's end is normal.
                if let Some(shared) = running.remove(&id) {
                    shared.cancel.set();
                }
                continue;
            }
            let Some(shared) = running.get(&id) else {
                self.unknown_frames.inc();
                continue;
            };
            match kind {
                Kind::Body(bytes) => shared.inbox.push_body(bytes, id, &self.outbox),
                Kind::End(end) => shared.inbox.end(end.outcome()),
                Kind::Credit(bytes) => shared.credit.grant(bytes),
                Kind::Request(_) | Kind::Cancel(_) | Kind::Response(_) => {
                    shared.inbox.end(Err(StreamFault::protocol("the router sent a frame that only an agent sends")));
                }
            }
        }
        began
    }

    /// Closes the lane: its stream has ended, so nobody reads its answers any more.
    pub fn close(&self) {
        self.outbox.close();
        let running = std::mem::take(&mut *self.active.lock());
        running.into_values().for_each(|shared| shared.cancel.set());
    }

    /// Interrupts every request being served, as a cancel does, but the router learns how each of
    /// them ends.
    pub fn interrupt(&self) {
        self.active.lock().values().for_each(|shared| shared.cancel.set());
    }

    #[must_use]
    pub fn active_requests(&self) -> usize {
        self.active.lock().len()
    }
}

/// One request being served: its body comes in, its answer goes out.
///
/// If it is dropped unfinished, the router learns that the answer is lost.
#[derive(Debug)]
pub struct RequestStream {
    id: u64,
    lane: Arc<Lane>,
    shared: Arc<LaneRequest>,
}

impl RequestStream {
    /// Resolves when the router cancels, or the lane interrupts.
    ///
    /// Only one task at a time may wait for this.
    pub async fn wait_cancelled(&self) {
        std::future::poll_fn(|context| self.shared.cancel.poll(context)).await;
    }

    #[must_use]
    pub fn body(&self) -> RequestBody {
        RequestBody { id: self.id, lane: self.lane.clone(), shared: self.shared.clone() }
    }

    pub fn send_head(&self, head: ResponseHead) {
        self.send_frame(Kind::Response(head.into()));
    }

    /// Sends a piece of the answer as soon as there is credit for it.
    pub async fn send_body(&self, mut bytes: Bytes) {
        while !bytes.is_empty() {
            let allowed = std::future::poll_fn(|context| self.poll_credit(context, bytes.len())).await;
            self.send_frame(Kind::Body(bytes.split_to(allowed)));
        }
    }

    /// Polls for credit for up to `requested` bytes, but no more than one frame carries.
    pub fn poll_credit(&self, context: &Context<'_>, requested: usize) -> Poll<usize> {
        self.shared.credit.poll_take(context, requested.min(MAX_BODY_BYTES))
    }

    /// Sends a frame of the answer for which credit was taken.
    pub fn send_frame(&self, kind: Kind) {
        self.lane.outbox.push(Frame::new(self.id, kind));
    }

    /// Ends the answer. A cancelled request sends nothing.
    pub fn end(self, outcome: &Result<(), StreamFault>) {
        self.finish(outcome.as_ref().err());
    }

    fn finish(&self, broken: Option<&StreamFault>) {
        if self.lane.active.lock().remove(&self.id).is_some() {
            self.lane.outbox.push(Frame::end(self.id, broken));
        }
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        // After `end` the id is gone and this does nothing.
        self.finish(Some(&StreamFault::protocol("the agent gave the request up")));
    }
}

/// Body of a request from the router, which returns credit as the engine reads it.
#[derive(Debug)]
pub struct RequestBody {
    id: u64,
    lane: Arc<Lane>,
    shared: Arc<LaneRequest>,
}

impl RequestBody {
    /// Next bytes; `None` at the end.
    pub fn poll_bytes(&self, context: &Context<'_>) -> Poll<Result<Option<Bytes>, StreamFault>> {
        self.shared.inbox.poll_body(context, self.id, &self.lane.outbox)
    }
}
