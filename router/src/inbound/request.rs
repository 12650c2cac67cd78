//! A request on its way into the fleet, and why it may not get there.

use bytes::Bytes;
use http::Method;
use http::header::{self, HeaderMap, HeaderValue};
use http::uri::PathAndQuery;
use tokio::time::Instant;

use super::body::BodyReservation;
use super::invocation;
use crate::access_log::AccessEntry;
use crate::admission::{LimitExceeded, LimitKind};
use crate::dispatch::Refusal;
use crate::keys::Caller;
use crate::outcome::RefusalReason;

/// A request in an engine's own API, and who sends it.
#[derive(Debug)]
pub(crate) struct InboundRequest {
    pub(crate) method: Method,
    pub(crate) path: PathAndQuery,
    /// As the client sent them; hop-by-hop headers are removed later.
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// The memory taken as the client's body came, also for a body that the router made of it.
    pub(crate) reservation: BodyReservation,
    pub(crate) caller: Caller,
    pub(crate) log_entry: AccessEntry,
    pub(crate) received_at: Instant,
}

impl InboundRequest {
    /// Makes it a request for another path, with a JSON body that the router makes of the client's.
    pub(crate) fn replace_body(&mut self, path: &'static str, body: String) {
        self.path = PathAndQuery::from_static(path);
        self.body = body.into();
        // They speak of the client's body and of what it makes of the answer's.
        self.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        self.headers.remove(header::ACCEPT);
        self.headers.remove(header::ACCEPT_ENCODING);
    }

    /// An invocation as the chat or the completion that it carries; any other request as it is.
    pub(crate) fn unwrap_invocation(mut self) -> Self {
        let Some((route, body)) = invocation::carried_request(self.path.path(), &self.headers, &self.body) else { return self };
        self.path = PathAndQuery::from_static(route);
        self.body = body.into();
        self.headers.remove(invocation::ADAPTER_HEADER);
        self
    }
}

/// Why a request got no engine's answer. Each API reports it in its own form.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Rejection {
    #[error("{0}")]
    Malformed(String),
    #[error("{0}")]
    Forbidden(String),
    #[error(transparent)]
    Limited(#[from] LimitExceeded),
    #[error(transparent)]
    Fleet(#[from] Refusal),
    /// It names a response that its caller does not have.
    #[error("Response with id '{0}' not found.")]
    NoResponse(String),
}

impl Rejection {
    pub(super) fn refusal_reason(&self) -> RefusalReason {
        match self {
            Self::Malformed(_)
            | Self::Forbidden(_)
            | Self::NoResponse(_)
            | Self::Fleet(Refusal::UnknownModel { .. } | Refusal::MissingRoute { .. }) => RefusalReason::Request,
            Self::Limited(limited) if limited.limit != LimitKind::Router => RefusalReason::Limit,
            Self::Limited(_) | Self::Fleet(Refusal::Overloaded { .. }) => RefusalReason::Full,
            Self::Fleet(Refusal::CrashSuspect(_)) => RefusalReason::CrashSuspect,
            Self::Fleet(_) => RefusalReason::Fleet,
        }
    }

    pub(super) fn as_str(&self) -> &'static str {
        match self {
            Self::Malformed(_) => "malformed",
            Self::Forbidden(_) => "forbidden",
            Self::Limited(_) => "limited",
            Self::Fleet(refusal) => refusal.as_str(),
            Self::NoResponse(_) => "no_response",
        }
    }
}
