//! A request in dispatch: checked, admitted, translated, with everything its attempts need.

use std::sync::Arc;

use bytes::Bytes;
use hostler_proto::lane::RequestHead;
use tokio::time::Instant;

use super::Work;
use crate::access_log::AccessEntry;
use crate::fan_out::FanOut;
use crate::placement::{PlacementRequest, QueueShare, QueueSlot};
use crate::response_affinity::{ResponseRecorder, ResponseReference};
use crate::resumption::ResumePlan;
use crate::sse::Dialect;

/// A request to be sent to one replica, or to several in turn.
#[derive(Debug)]
pub(crate) struct OutboundRequest {
    pub placement_request: PlacementRequest,
    /// The router's own number for the request.
    pub id: u64,
    /// Position in the queue: lower goes first.
    pub priority: i32,
    /// Hash of the owner's name; zero without keys.
    pub tenant: u64,
    /// The tenant's name, or the key's own if it has no tenant; empty without keys.
    pub owner: Arc<str>,
    /// The tenant and weight by which requests share the queue, and how much of it this one takes.
    pub queue_share: QueueShare,
    /// The request's place in the queue, taken as soon as it may have to wait.
    pub queue_slot: Option<QueueSlot>,
    pub client_id: Option<Arc<str>>,
    /// The replica's index and the estimates are filled in for each attempt.
    pub head: RequestHead,
    pub body: Bytes,
    /// The request as several, for engines that give one answer at a time.
    pub fan_out: Option<FanOut>,
    pub dialect: Dialect,
    pub work: Work,
    pub log_entry: AccessEntry,
    pub referenced_response: ResponseReference,
    /// Records whose response the answer is, if the engine stores it.
    pub stored_response: Option<ResponseRecorder>,
    /// How its stream goes on if its engine is lost.
    pub resume_plan: ResumePlan,
    pub received_at: Instant,
}

impl OutboundRequest {
    /// The dialect of the event stream that the client surely waits for.
    pub(crate) fn awaited_stream(&self) -> Option<Dialect> {
        let is_awaited = self.placement_request.is_stream && self.work.generates() && self.dialect != Dialect::Other;
        is_awaited.then_some(self.dialect)
    }
}
