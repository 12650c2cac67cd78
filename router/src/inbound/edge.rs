//! The state that all APIs of the edge share: settings, callers, memory, and the way to the fleet.

use std::sync::Arc;

use bytes::Bytes;
use hostler_boot::Shutdown;
use http::uri::PathAndQuery;
use http::{HeaderMap, Method, Request};
use hyper::body::Incoming;
use tokio::time::Instant;

use super::allowed_origins::AllowedOrigins;
use super::body::{BodyMemory, BodyReadError, read_body};
use super::headers::{Explanation, asks_explanation};
use super::isolation::Isolation;
use super::media::MediaHosts;
use super::request::{InboundRequest, Rejection};
use super::share::queue_share;
use crate::access_log::{AccessEntry, AccessLog};
use crate::admission::{Admission, LimitExceeded};
use crate::batches::Batches;
use crate::bookings::Bookings;
use crate::config::RouterConfig;
use crate::dispatch::Dispatch;
use crate::keys::{Caller, Keys};
use crate::outcome::RefusalReason;
use crate::response_affinity::ResponseAffinity;
use crate::succession::Succession;
use crate::tenant_pool::TenantPool;
use crate::thread_pool::ThreadPool;
use crate::traces::Traces;

#[derive(Debug)]
pub(crate) struct Edge {
    pub config: RouterConfig,
    pub keys: Keys,
    pub access_log: AccessLog,
    pub traces: Traces,
    /// The origins whose web pages may use the edge.
    pub allowed_origins: AllowedOrigins,
    pub media_hosts: MediaHosts,
    pub isolation: Option<Isolation>,
    pub admission: Admission,
    pub body_memory: BodyMemory,
    /// Threads that read long bodies.
    pub readers: ThreadPool,
    pub response_affinity: ResponseAffinity,
    pub dispatch: Arc<Dispatch>,
    pub health_watches: Arc<TenantPool>,
    pub bookings: Bookings,
    /// The files and batches of OpenAI's Batch API; none where it is off.
    pub batches: Option<Batches>,
    pub shutdown: Shutdown,
    pub succession: Succession,
}

impl Edge {
    /// Reads a request of `caller` to its end within the bounds of all bodies, and decompresses it.
    ///
    /// # Errors
    /// If the body cannot be read, which is counted.
    pub(crate) async fn read_request(
        &self,
        request: Box<Request<Incoming>>,
        caller: &Caller,
        log_entry: &AccessEntry,
    ) -> Result<InboundRequest, BodyReadError> {
        let received_at = Instant::now();
        let (head, body) = request.into_parts();
        let read = async {
            let mut reservation = self.body_memory.reserve(queue_share(caller, &head.headers, None, 0))?;
            Ok((read_body(&self.config, &mut reservation, &head.headers, body).await?, reservation))
        };
        let (body, reservation) =
            read.await.inspect_err(|_: &BodyReadError| self.dispatch.metrics.count_refusal(RefusalReason::Request))?;
        Ok(InboundRequest {
            method: head.method,
            path: head.uri.into_parts().path_and_query.unwrap_or_else(|| PathAndQuery::from_static("/")),
            headers: head.headers,
            body,
            reservation,
            caller: caller.clone(),
            log_entry: log_entry.clone(),
            received_at,
        })
    }

    /// A request that the router makes for a caller.
    ///
    /// # Errors
    /// If there is no memory for its body.
    pub(crate) fn own_request(
        &self,
        path: &PathAndQuery,
        headers: HeaderMap,
        body: Bytes,
        (caller, entry): (&Caller, &AccessEntry),
    ) -> Result<InboundRequest, BodyReadError> {
        let reservation = self.body_memory.reserve(queue_share(caller, &headers, None, body.len()))?;
        let (path, caller, log_entry) = (path.clone(), caller.clone(), entry.clone());
        Ok(InboundRequest { method: Method::POST, path, headers, body, reservation, caller, log_entry, received_at: Instant::now() })
    }

    /// Counts `bytes` of a request as memory of its caller until the last reference to them is
    /// gone.
    ///
    /// # Errors
    /// If there is no room for them.
    pub(crate) fn hold_memory(&self, request: &InboundRequest, bytes: Bytes) -> Result<Bytes, Rejection> {
        let share = queue_share(&request.caller, &request.headers, None, bytes.len());
        Ok(self.body_memory.reserve(share).map_err(LimitExceeded::from)?.wrap(bytes))
    }

    /// Whether clients should go elsewhere. Clients of a router that was replaced, or may be, need
    /// not know: they will reach its successor next.
    pub(crate) fn is_closing(&self) -> bool {
        self.shutdown.is_draining() && !self.succession.serves_connections()
    }

    /// Whether this router accepts no connections and answers one request on each that it has.
    pub(crate) fn is_left(&self) -> bool {
        self.shutdown.is_draining() && self.succession.serves_connections()
    }

    /// Whether a caller may learn how much of its prompts is cached. If tenants' caches are
    /// separate, only its own tenant's cache matters.
    pub(crate) fn shows_caches_to(&self, caller: &Caller) -> bool {
        self.isolation.is_some() || caller.sees_caches
    }

    /// How much an answer explains of its placement.
    pub(crate) fn explanation(&self, headers: &HeaderMap, caller: &Caller) -> Explanation {
        match (asks_explanation(headers), self.shows_caches_to(caller)) {
            (false, _) => Explanation::None,
            (true, false) => Explanation::WithoutCaches,
            (true, true) => Explanation::Whole,
        }
    }

    /// The names of the models that a caller may use, for an error message.
    pub(crate) fn known_models(&self, caller: &Caller) -> String {
        let view = self.dispatch.fleet.view();
        let known = view.models().into_iter().map(|model| model.id.as_str()).filter(|model| caller.may_use(model));
        known.collect::<Vec<_>>().join(", ")
    }
}
