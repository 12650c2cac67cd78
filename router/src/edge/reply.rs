//! Answers that the router gives itself, in the form of OpenAI's API.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hostler_proto::lane::{Fault, StreamFault};
use http::header::{self, HeaderValue};
use http::{Request, Response, StatusCode, Version};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::timeout;

use super::error_forms::error_text;
use super::file_body::FileBody;
use super::held_stream::HeldStream;
use super::translation::TranslatedBody;
use crate::admission::{LimitExceeded, LimitKind};
use crate::direct_writing::DirectWriter;
use crate::dispatch::{Refusal, Relay};
use crate::inbound::{BodyReadError, InflateError, Rejection};
use crate::keys::Unauthenticated;

/// How much of a body that nobody reads is taken off, and for how long.
const MAX_DISCARDED_BYTES: usize = 8 * 1024 * 1024;
const DISCARD_TIMEOUT: Duration = Duration::from_secs(3);

/// A body of the edge: the router's own bytes, or an engine's answer passing through.
#[derive(Debug)]
pub(super) enum EdgeBody {
    /// The router's own bytes.
    Local(Option<Bytes>),
    /// An engine's answer.
    Relay(Box<Relay>),
    /// An engine's answer that has not begun.
    Held(Box<HeldStream>),
    /// An engine's events in the form of another API.
    Translated(Box<TranslatedBody>),
    Grpc(tonic::body::Body),
    /// The content of a file.
    File(Box<FileBody>),
}

impl EdgeBody {
    /// Allows an engine's events to be written to the client's connection as they come.
    pub(super) fn enable_direct_writing(&mut self, direct_writer: &Arc<DirectWriter>) {
        match self {
            Self::Relay(relay) => relay.enable_direct_writing(direct_writer.clone()),
            Self::Held(held) => held.enable_direct_writing(direct_writer.clone()),
            _ => {}
        }
    }
}

impl Body for EdgeBody {
    type Data = Bytes;
    type Error = StreamFault;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, StreamFault>>> {
        match self.get_mut() {
            Self::Local(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Relay(relay) => Pin::new(relay).poll_frame(context),
            Self::Held(held) => Pin::new(held).poll_frame(context),
            Self::Translated(body) => Pin::new(body).poll_frame(context),
            Self::File(file) => {
                file.poll_piece(context).map(|piece| piece.map(|piece| piece.map(Frame::data).map_err(|error| unreadable(&error))))
            }
            // A gRPC body always ends in a status, so this error never occurs.
            Self::Grpc(body) => Pin::new(body)
                .poll_frame(context)
                .map_err(|status| StreamFault { fault: Fault::EngineLost, message: status.message().to_owned() }),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Local(bytes) => bytes.is_none(),
            Self::Relay(relay) => relay.is_end_stream(),
            Self::Held(held) => held.is_end_stream(),
            Self::Translated(body) => body.is_end_stream(),
            Self::Grpc(body) => body.is_end_stream(),
            Self::File(file) => file.left() == 0,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Local(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Self::Relay(_) | Self::Held(_) | Self::Translated(_) => SizeHint::default(),
            Self::Grpc(body) => body.size_hint(),
            Self::File(file) => SizeHint::with_exact(file.left()),
        }
    }
}

/// The end of a body whose file cannot be read any more.
fn unreadable(error: &std::io::Error) -> StreamFault {
    StreamFault { fault: Fault::Protocol, message: format!("the file cannot be read: {error}") }
}

pub(super) fn json(status: StatusCode, body: impl Into<Bytes>) -> Response<EdgeBody> {
    let mut response = Response::new(EdgeBody::Local(Some(body.into())));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

pub(super) fn error(status: StatusCode, kind: &str, message: &str) -> Response<EdgeBody> {
    json(status, error_text(status, kind, message))
}

/// An error about one field of the request, in the form and with the words of engines.
fn field_error(status: StatusCode, kind: &str, field: &str, message: &str) -> Response<EdgeBody> {
    let body = serde_json::json!({"error": {"message": message, "type": kind, "param": field, "code": status.as_u16()}});
    json(status, body.to_string())
}

pub(super) fn bad_request(message: &str) -> Response<EdgeBody> {
    close_after(error(StatusCode::BAD_REQUEST, "BadRequestError", message))
}

/// Closes the connection after the answer. The request's end is in doubt, or its body is not waited
/// for.
pub(super) fn close_after(mut response: Response<EdgeBody>) -> Response<EdgeBody> {
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Answers a request whose body nobody reads.
///
/// Over HTTP/1 the answer announces that the connection closes; a client that is still sending
/// would otherwise find it closed under its next request. Over HTTP/2 the body is taken off first,
/// as far as it is short: curl 7.88 takes the reset of a stream that it is still sending for a
/// broken answer, and lost one refusal in five so.
pub(super) async fn refuse_unread(request: Box<Request<Incoming>>, response: Response<EdgeBody>) -> Response<EdgeBody> {
    if request.body().is_end_stream() {
        return response;
    }
    if request.version() == Version::HTTP_2 {
        let _ = timeout(DISCARD_TIMEOUT, discard(request.into_body())).await;
        return response;
    }
    close_after(response)
}

async fn discard(mut body: Incoming) {
    let mut left = MAX_DISCARDED_BYTES;
    while let Some(Ok(frame)) = body.frame().await {
        let taken = frame.data_ref().map_or(0, Bytes::len);
        if taken > left {
            return;
        }
        left -= taken;
    }
}

pub(super) fn no_route() -> Response<EdgeBody> {
    json(StatusCode::NOT_FOUND, r#"{"detail":"Not Found"}"#)
}

/// Refuses a route that would change one replica without the routers' knowledge.
pub(super) fn operators_only() -> Response<EdgeBody> {
    let message = "adapters are loaded and unloaded by operators: `hostler lora load NAME PATH` and `hostler lora unload NAME`";
    close_after(error(StatusCode::FORBIDDEN, "ForbiddenError", message))
}

pub(super) fn unauthenticated(why: &Unauthenticated) -> Response<EdgeBody> {
    let message = why.to_string();
    let body =
        serde_json::json!({"error": {"message": message, "type": "invalid_request_error", "param": null, "code": "invalid_api_key"}});
    let mut response = close_after(json(StatusCode::UNAUTHORIZED, body.to_string()));
    response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

/// The reply to a body that could not be read. The rest of the body is not waited for.
pub(super) fn unread_body(why: &BodyReadError) -> Response<EdgeBody> {
    let message = why.to_string();
    let error = |status, kind| self::error(status, kind, &message);
    close_after(match why {
        BodyReadError::TooLarge(_) | BodyReadError::Decompression(InflateError::TooLarge(_) | InflateError::Ratio(_)) => {
            error(StatusCode::PAYLOAD_TOO_LARGE, "RequestTooLargeError")
        }
        BodyReadError::TooSlow(_) => error(StatusCode::REQUEST_TIMEOUT, "TimeoutError"),
        BodyReadError::Broken(_) | BodyReadError::ForbiddenTrailer(_) | BodyReadError::Decompression(InflateError::Broken(_)) => {
            error(StatusCode::BAD_REQUEST, "BadRequestError")
        }
        BodyReadError::CompressionOff(_) | BodyReadError::UnknownCoding(_) => {
            let mut response = error(StatusCode::UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaTypeError");
            let accepted = if matches!(why, BodyReadError::UnknownCoding(_)) { "gzip, deflate, identity" } else { "identity" };
            response.headers_mut().insert(header::ACCEPT_ENCODING, HeaderValue::from_static(accepted));
            response
        }
        BodyReadError::MemoryFull(_) => too_many_requests(&message, 1),
    })
}

/// Explains a request that was not passed on, or found no answer.
pub(super) fn rejection(rejection: &Rejection) -> Response<EdgeBody> {
    match rejection {
        Rejection::Malformed(message) => error(StatusCode::BAD_REQUEST, "BadRequestError", message),
        Rejection::Forbidden(message) => error(StatusCode::FORBIDDEN, "PermissionDeniedError", message),
        Rejection::Limited(limited) => self::limited(limited),
        Rejection::Fleet(why) => refusal(why),
        Rejection::NoResponse(_) => field_error(StatusCode::NOT_FOUND, "invalid_request_error", "response_id", &rejection.to_string()),
    }
}

/// The status and body of a rejection, for a stream whose head is sent.
pub(super) fn rejection_words(rejection: &Rejection) -> (StatusCode, Bytes) {
    let response = self::rejection(rejection);
    let status = response.status();
    match response.into_body() {
        EdgeBody::Local(Some(words)) => (status, words),
        _ => (status, Bytes::new()),
    }
}

/// The reply if a limit of the caller or the router is reached. OpenAI's SDKs repeat such a request
/// unless they are told not to.
fn limited(limited: &LimitExceeded) -> Response<EdgeBody> {
    let kind = match limited.limit {
        LimitKind::Router => "RateLimitError",
        _ if limited.is_quota => "insufficient_quota",
        _ => "rate_limit_exceeded",
    };
    let mut response = error(StatusCode::TOO_MANY_REQUESTS, kind, &limited.message);
    if limited.is_quota {
        response.headers_mut().insert("x-should-retry", HeaderValue::from_static("false"));
    }
    match limited.retry_after {
        Some(seconds) => add_retry_after(response, seconds),
        None => response,
    }
}

pub(super) fn too_many_requests(message: &str, retry_after: u64) -> Response<EdgeBody> {
    add_retry_after(error(StatusCode::TOO_MANY_REQUESTS, "RateLimitError", message), retry_after)
}

fn refusal(refusal: &Refusal) -> Response<EdgeBody> {
    match refusal {
        Refusal::UnknownModel { .. } => {
            let body =
                serde_json::json!({"error": {"message": refusal.to_string(), "type": "NotFoundError", "param": "model", "code": 404}});
            json(StatusCode::NOT_FOUND, body.to_string())
        }
        Refusal::MissingRoute { .. } | Refusal::WithheldRoute { .. } => error(StatusCode::NOT_FOUND, "NotFoundError", &refusal.to_string()),
        Refusal::NotReady { retry_after, .. } | Refusal::Lost { retry_after, .. } => {
            add_retry_after(error(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailableError", &refusal.to_string()), *retry_after)
        }
        Refusal::Overloaded { retry_after, .. } => too_many_requests(&refusal.to_string(), *retry_after),
        // OpenAI's SDKs repeat neither this nor another 4xx, except 408, 409 and 429.
        Refusal::CrashSuspect(_) => error(StatusCode::UNPROCESSABLE_ENTITY, "request_kills_engines", &refusal.to_string()),
        Refusal::TooSlow(_) => error(StatusCode::GATEWAY_TIMEOUT, "TimeoutError", &refusal.to_string()),
    }
}

/// Seconds after which a client may retry if a full engine answered 503. Another engine may have
/// room then.
const ENGINE_FULL_RETRY_SECONDS: u64 = 1;

/// Tells the client of a full engine when to retry.
pub(super) fn add_retry_if_full(response: Response<EdgeBody>) -> Response<EdgeBody> {
    match response.status() {
        StatusCode::SERVICE_UNAVAILABLE => add_retry_after(response, ENGINE_FULL_RETRY_SECONDS),
        _ => response,
    }
}

/// Tells the client when to retry, unless an engine has. OpenAI's SDKs then wait this long instead
/// of guessing.
fn add_retry_after(mut response: Response<EdgeBody>, seconds: u64) -> Response<EdgeBody> {
    response.headers_mut().entry(header::RETRY_AFTER).or_insert(seconds.into());
    response
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::inbound::BodyMemoryFull;

    #[test]
    fn a_body_error_has_a_status_for_its_cause() {
        for (why, status) in [
            (BodyReadError::TooLarge(1), StatusCode::PAYLOAD_TOO_LARGE),
            (BodyReadError::Decompression(InflateError::Ratio(200)), StatusCode::PAYLOAD_TOO_LARGE),
            (BodyReadError::Decompression(InflateError::TooLarge(1)), StatusCode::PAYLOAD_TOO_LARGE),
            (BodyReadError::Decompression(InflateError::Broken("cut".into())), StatusCode::BAD_REQUEST),
            (BodyReadError::TooSlow(Duration::from_secs(1)), StatusCode::REQUEST_TIMEOUT),
            (BodyReadError::MemoryFull(BodyMemoryFull), StatusCode::TOO_MANY_REQUESTS),
            (BodyReadError::CompressionOff("gzip".into()), StatusCode::UNSUPPORTED_MEDIA_TYPE),
        ] {
            assert_eq!(unread_body(&why).status(), status, "{why}");
        }
        assert_eq!(unread_body(&BodyReadError::CompressionOff("gzip".into())).headers()[header::ACCEPT_ENCODING], "identity");
    }
}
