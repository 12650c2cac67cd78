//! A request as dispatch has it: checked, admitted and translated, with all that one attempt after the other needs.

use std::sync::Arc;

use bytes::Bytes;
use hostler_proto::lane::RequestHead;
use tokio::time::Instant;

use super::Work;
use crate::access_log::AccessEntry;
use crate::placement::{PlacementRequest, QueueShare, QueueSlot};
use crate::response_affinity::{ResponseRecorder, ResponseReference};
use crate::resumption::{ReplayPlan, Sampling};
use crate::sse::Dialect;

/// A request as it will be sent, to one replica or several in turn.
#[derive(Debug)]
pub(crate) struct OutboundRequest {
    pub placement_request: PlacementRequest,
    /// The router's own number of it.
    pub id: u64,
    /// Position in the queue: a lower number goes first.
    pub priority: i32,
    /// The hash of its tenant's name, or of its key's where that has none; zero where there are no
    /// keys.
    pub tenant: u64,
    /// That name, or the key's id; empty where there are no keys.
    pub owner: Arc<str>,
    /// Whom it shares the queue with, and how much of the queue it takes.
    pub queue_share: QueueShare,
    /// Its place in the queue, taken as soon as it may have to wait.
    pub queue_slot: Option<QueueSlot>,
    pub client_id: Option<Arc<str>>,
    /// The replica's index and the estimates are filled in for each attempt.
    pub head: RequestHead,
    pub body: Bytes,
    pub dialect: Dialect,
    pub work: Work,
    pub log_entry: AccessEntry,
    pub referenced_response: ResponseReference,
    /// Records whose response the answer is, where the engine keeps it.
    pub stored_response: Option<ResponseRecorder>,
    /// What a continuation of its stream takes over, or why there is none. Its body asks for tokens if there may be one.
    pub sampling: Result<Box<Sampling>, &'static str>,
    /// How it is sent again where there is none and its answer is the same each time.
    pub replay: Option<Box<ReplayPlan>>,
    pub received_at: Instant,
}

impl OutboundRequest {
    /// The dialect of the event stream that its client surely waits for.
    pub(crate) fn awaited_stream(&self) -> Option<Dialect> {
        let is_awaited = self.placement_request.is_stream && self.work.generates() && self.dialect != Dialect::Other;
        is_awaited.then_some(self.dialect)
    }
}
