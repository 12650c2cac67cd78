//! A request on its way into the fleet, and why it may not get there.

use bytes::Bytes;
use hostler_api::Route;
use hostler_prompt::check_tree_size;
use http::Method;
use http::header::{self, HeaderMap, HeaderValue};
use http::uri::PathAndQuery;
use tokio::time::Instant;

use super::body::{BodyReservation, SHORT_BODY_BYTES};
use super::invocation;
use crate::access_log::AccessEntry;
use crate::admission::{LimitExceeded, LimitKind, Permit};
use crate::dispatch::{OutboundRequest, Refusal};
use crate::keys::Caller;
use crate::outcome::RefusalReason;

/// How often the bytes of a body are held while it is translated.
const TRANSLATION_COPIES: usize = 3;

/// A request in an engine's own API, and its caller.
#[derive(Debug)]
pub(crate) struct InboundRequest {
    pub(crate) method: Method,
    pub(crate) path: PathAndQuery,
    /// Headers as the client sent them. Hop-by-hop headers are removed later.
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// The memory taken as the client's body came, which also covers a body that the router made of
    /// it.
    pub(crate) reservation: BodyReservation,
    pub(crate) caller: Caller,
    pub(crate) log_entry: AccessEntry,
    pub(crate) received_at: Instant,
}

impl InboundRequest {
    /// Turns this into a request for another route, with a JSON body that the router made of the
    /// client's.
    pub(crate) fn replace_body(&mut self, route: Route, body: String) {
        self.path = PathAndQuery::from_static(route.path());
        self.body = body.into();
        // These headers describe the client's body and the answer that it accepts.
        self.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        self.headers.remove(header::ACCEPT);
        self.headers.remove(header::ACCEPT_ENCODING);
    }

    /// Counts the most memory that a body takes while it is translated: itself, its values, and the
    /// result. A short body takes too little to be counted.
    ///
    /// # Errors
    /// If there is no room for it, or it has more values than are read.
    pub(crate) fn count_translation(&mut self) -> Result<(), Rejection> {
        let bytes = self.body.len();
        if bytes <= SHORT_BODY_BYTES {
            return Ok(());
        }
        check_tree_size(&self.body).map_err(|many| Rejection::Malformed(many.to_string()))?;
        Ok(self.reservation.count_copies(TRANSLATION_COPIES, bytes).map_err(LimitExceeded::from)?)
    }

    /// The chat or completion that an invocation carries. Any other request stays as it is.
    ///
    /// # Errors
    /// If there is no room for it.
    pub(crate) fn unwrap_invocation(mut self) -> Result<Self, Rejection> {
        self.count_translation()?;
        if let Some((route, body)) = invocation::carried_request(Route::of(self.path.path()), &self.headers, &self.body) {
            self.path = PathAndQuery::from_static(route.path());
            self.body = body.into();
            self.headers.remove(invocation::ADAPTER_HEADER);
        }
        Ok(self)
    }
}

/// A request that was checked and admitted, as it will be sent.
pub(crate) type Prepared = (Box<OutboundRequest>, Permit);

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
    /// The request names a response that its caller does not have.
    #[error("Response with id '{0}' not found.")]
    NoResponse(String),
}

impl Rejection {
    pub(super) fn refusal_reason(&self) -> RefusalReason {
        match self {
            Self::Malformed(_)
            | Self::Forbidden(_)
            | Self::NoResponse(_)
            | Self::Fleet(Refusal::UnknownModel { .. } | Refusal::MissingRoute { .. } | Refusal::WithheldRoute { .. }) => {
                RefusalReason::Request
            }
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
