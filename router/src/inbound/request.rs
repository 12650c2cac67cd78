//! A request on its way into the fleet, and why it may not get there.

use bytes::Bytes;
use http::Method;
use http::header::HeaderMap;
use http::uri::PathAndQuery;
use tokio::time::Instant;

use super::body::BodyReservation;
use crate::access_log::AccessEntry;
use crate::admission::{LimitExceeded, LimitKind};
use crate::dispatch::Refusal;
use crate::keys::Caller;
use crate::outcome::RefusalReason;

/// A request for an engine, in the engine's own API, and who sends it.
#[derive(Debug)]
pub(crate) struct InboundRequest {
    pub(crate) method: Method,
    pub(crate) path: PathAndQuery,
    /// As the client sent them; those of one connection are left out on the way.
    pub(crate) headers: HeaderMap,
    /// Complete.
    pub(crate) body: Bytes,
    /// What the body took as it came; `None` for one that was made here.
    pub(crate) reservation: Option<BodyReservation>,
    pub(crate) caller: Caller,
    /// Its line in the access log.
    pub(crate) log_entry: AccessEntry,
    /// When it came.
    pub(crate) received_at: Instant,
}

/// Why a request got no engine's answer. Each API tells it in its own form.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Rejection {
    /// It cannot be understood.
    #[error("{0}")]
    Malformed(String),
    /// Its caller may not send it.
    #[error("{0}")]
    Forbidden(String),
    /// Its caller, or the router, has too much in flight.
    #[error(transparent)]
    Limited(#[from] LimitExceeded),
    /// The fleet cannot answer it.
    #[error(transparent)]
    Fleet(#[from] Refusal),
    /// It names a response that its caller does not have.
    #[error("Response with id '{0}' not found.")]
    NoResponse(String),
}

impl Rejection {
    /// How it is counted.
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

    /// The word for it in the access log.
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
