//! Answers that the router gives itself, in the form of OpenAI's API.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hostler_proto::lane::{Broken, Fault};
use http::header::{self, HeaderValue};
use http::{Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use super::ollama::Retold;
use super::outlet::Outlet;
use super::submit::Declined;
use crate::admission::{LimitKind, LimitExceeded};
use crate::dispatch::{Refusal, Relay};
use crate::keys::Unauthenticated;

/// A body of the edge: our own bytes, or an engine's answer passing through.
#[derive(Debug)]
pub(super) enum EdgeBody {
    /// Ours.
    Own(Option<Bytes>),
    /// An engine's.
    Relay(Box<Relay>),
    /// An engine's answer in the words of Ollama's API.
    Retold(Box<Retold>),
    /// Messages of gRPC.
    Grpc(tonic::body::Body),
}

impl EdgeBody {
    /// An engine's events may be written to the client's connection as they come.
    pub(super) fn through(&mut self, outlet: &Arc<Outlet>) {
        if let Self::Relay(relay) = self {
            relay.enable_direct_writing(outlet.clone());
        }
    }
}

impl Body for EdgeBody {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        match self.get_mut() {
            Self::Own(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Relay(relay) => Pin::new(relay).poll_frame(context),
            Self::Retold(retold) => Pin::new(retold).poll_frame(context),
            // It ends in a status in any case, and so never with this error.
            Self::Grpc(body) => Pin::new(body)
                .poll_frame(context)
                .map_err(|status| Broken { fault: Fault::EngineLost, message: status.message().to_owned() }),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Own(bytes) => bytes.is_none(),
            Self::Relay(relay) => relay.is_end_stream(),
            Self::Retold(retold) => retold.is_end_stream(),
            Self::Grpc(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Own(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Self::Relay(_) | Self::Retold(_) => SizeHint::default(),
            Self::Grpc(body) => body.size_hint(),
        }
    }
}

/// A JSON answer.
pub(super) fn json(status: StatusCode, body: impl Into<Bytes>) -> Response<EdgeBody> {
    let mut response = Response::new(EdgeBody::Own(Some(body.into())));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// An error in OpenAI's form.
pub(super) fn error(status: StatusCode, kind: &str, message: &str) -> Response<EdgeBody> {
    let body = serde_json::json!({"error": {"message": message, "type": kind, "param": null, "code": status.as_u16()}});
    json(status, body.to_string())
}

/// An error that a field of the request has made, in the form and with the words of engines.
fn about(status: StatusCode, kind: &str, field: &str, message: &str) -> Response<EdgeBody> {
    let body = serde_json::json!({"error": {"message": message, "type": kind, "param": field, "code": status.as_u16()}});
    json(status, body.to_string())
}

/// A request that cannot be understood.
pub(super) fn bad_request(message: &str) -> Response<EdgeBody> {
    last(error(StatusCode::BAD_REQUEST, "BadRequestError", message))
}

/// An answer after which the connection is closed: where the request ends is in doubt, or its body is not waited for.
pub(super) fn last(mut response: Response<EdgeBody>) -> Response<EdgeBody> {
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// An answer to a request whose body nobody reads. Where there is one, the connection is closed, and says so: a client that is still sending
/// it would else find the connection gone under its next request.
pub(super) fn unread(body: &Incoming, response: Response<EdgeBody>) -> Response<EdgeBody> {
    if body.is_end_stream() { response } else { last(response) }
}

/// The form in which engines refuse a path.
pub(super) fn no_route() -> Response<EdgeBody> {
    json(StatusCode::NOT_FOUND, r#"{"detail":"Not Found"}"#)
}

/// A route that would change one replica behind the back of all routers.
pub(super) fn for_operators() -> Response<EdgeBody> {
    let message = "adapters are loaded and unloaded by operators: `hostler lora load NAME PATH` and `hostler lora unload NAME`";
    last(error(StatusCode::FORBIDDEN, "ForbiddenError", message))
}

/// A request whose sender is not known.
pub(super) fn unauthenticated(why: &Unauthenticated) -> Response<EdgeBody> {
    let message = why.to_string();
    let body =
        serde_json::json!({"error": {"message": message, "type": "invalid_request_error", "param": null, "code": "invalid_api_key"}});
    let mut response = last(json(StatusCode::UNAUTHORIZED, body.to_string()));
    response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

/// Why a request was not passed on, or found no answer.
pub(super) fn declined(declined: &Declined) -> Response<EdgeBody> {
    match declined {
        Declined::Malformed(message) => error(StatusCode::BAD_REQUEST, "BadRequestError", message),
        Declined::Forbidden(message) => error(StatusCode::FORBIDDEN, "PermissionDeniedError", message),
        Declined::Limited(limited) => self::limited(limited),
        Declined::Fleet(why) => refusal(why),
        Declined::NoResponse(_) => about(StatusCode::NOT_FOUND, "invalid_request_error", "response_id", &declined.to_string()),
    }
}

/// A caller, or the router, has reached a limit. OpenAI's SDKs send a request again unless they are told not to.
fn limited(limited: &LimitExceeded) -> Response<EdgeBody> {
    let mut response = too_many(&limited.message, limited.retry_after);
    if limited.limit != LimitKind::Router {
        let kind = if limited.is_quota() { "insufficient_quota" } else { "rate_limit_exceeded" };
        let headers = std::mem::take(response.headers_mut());
        response = error(StatusCode::TOO_MANY_REQUESTS, kind, &limited.message);
        *response.headers_mut() = headers;
    }
    if limited.is_quota() {
        response.headers_mut().insert("x-should-retry", HeaderValue::from_static("false"));
    }
    response
}

/// Too much at once; after so many seconds it may be tried again.
pub(super) fn too_many(message: &str, retry_after: u64) -> Response<EdgeBody> {
    let mut response = error(StatusCode::TOO_MANY_REQUESTS, "RateLimitError", message);
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(retry_after));
    response
}

/// Why no engine has answered.
pub(super) fn refusal(refusal: &Refusal) -> Response<EdgeBody> {
    match refusal {
        Refusal::UnknownModel { .. } => {
            let body =
                serde_json::json!({"error": {"message": refusal.to_string(), "type": "NotFoundError", "param": "model", "code": 404}});
            json(StatusCode::NOT_FOUND, body.to_string())
        }
        Refusal::NotReady(_) | Refusal::Lost { .. } => {
            retry_after(error(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailableError", &refusal.to_string()))
        }
        Refusal::Overloaded { retry_after, .. } => too_many(&refusal.to_string(), *retry_after),
        // OpenAI's SDKs send neither this nor another 4xx again, but for 408, 409 and 429.
        Refusal::CrashSuspect(_) => error(StatusCode::UNPROCESSABLE_ENTITY, "request_kills_engines", &refusal.to_string()),
        Refusal::TooSlow(_) => error(StatusCode::GATEWAY_TIMEOUT, "TimeoutError", &refusal.to_string()),
    }
}

/// Tells the client when to come back, unless an engine has: OpenAI's SDKs then wait this long instead of guessing.
pub(super) fn retry_after(mut response: Response<EdgeBody>) -> Response<EdgeBody> {
    response.headers_mut().entry(header::RETRY_AFTER).or_insert(HeaderValue::from_static("1"));
    response
}
