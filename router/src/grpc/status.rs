//! Explains missing answers to gRPC clients: a code, a sentence, and google.rpc details for
//! programs.

use std::collections::HashMap;
use std::time::Duration;

use hostler_proto::lane::Header;
use hostler_proto::lane::StreamFault;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use super::engine::{EngineError, EngineRefusal};
use crate::dispatch::Refusal;
use crate::inbound::{BodyReadError, Rejection};
use crate::keys::Unauthenticated;

pub(super) const DOMAIN: &str = "hostler";

/// Longest message. It travels in trailers, of which clients take 8 KiB, and engines' messages may
/// repeat the request.
const MAX_MESSAGE_BYTES: usize = 1024;

/// Longest value in the details, for the same reason.
const MAX_VALUE_BYTES: usize = 256;

/// When to retry at a full engine, which does not say so itself.
const RETRY_DELAY: Duration = Duration::from_secs(1);

pub(super) fn with_reason(code: Code, reason: &str, message: &str, metadata: &[(&str, &str)]) -> Status {
    with_details(code, reason, message, metadata, |_| {})
}

/// A status for an error after which a retry helps.
fn retryable(code: Code, reason: &str, message: &str, after: Duration) -> Status {
    with_details(code, reason, message, &[], |details| {
        details.set_retry_info(Some(after));
    })
}

pub(super) fn invalid_field(field: &str, why: &str) -> Status {
    with_details(Code::InvalidArgument, "INVALID_FIELD", &format!("{field}: {why}"), &[("field", field)], |details| {
        details.add_bad_request_violation(truncate(field, MAX_VALUE_BYTES), truncate(why, MAX_VALUE_BYTES));
    })
}

fn with_details(code: Code, reason: &str, message: &str, metadata: &[(&str, &str)], more: impl FnOnce(&mut ErrorDetails)) -> Status {
    let metadata: HashMap<String, String> =
        metadata.iter().map(|(name, value)| ((*name).to_owned(), truncate(value, MAX_VALUE_BYTES))).collect();
    let mut details = ErrorDetails::with_error_info(reason, DOMAIN, metadata);
    more(&mut details);
    Status::with_error_details(code, truncate(message, MAX_MESSAGE_BYTES), details)
}

fn truncate(text: &str, most: usize) -> String {
    if text.len() <= most { text.to_owned() } else { format!("{}…", &text[..text.floor_char_boundary(most)]) }
}

pub(crate) fn unauthenticated(why: &Unauthenticated) -> Status {
    with_reason(Code::Unauthenticated, "UNAUTHENTICATED", &why.to_string(), &[])
}

pub(crate) fn body_error(why: &BodyReadError) -> Status {
    let message = why.to_string();
    match why {
        BodyReadError::TooLarge(most) => {
            with_reason(Code::ResourceExhausted, "MESSAGE_TOO_LARGE", &message, &[("max_bytes", &most.to_string())])
        }
        BodyReadError::MemoryFull(_) => retryable(Code::ResourceExhausted, "ROUTER_FULL", &message, RETRY_DELAY),
        BodyReadError::TooSlow(_) => with_reason(Code::DeadlineExceeded, "MESSAGE_TOO_SLOW", &message, &[]),
        _ => with_reason(Code::InvalidArgument, "MESSAGE_UNREADABLE", &message, &[]),
    }
}

pub(super) fn rejection(rejection: &Rejection) -> Status {
    let message = rejection.to_string();
    match rejection {
        Rejection::Malformed(_) => with_reason(Code::InvalidArgument, "MALFORMED", &message, &[]),
        Rejection::Forbidden(_) => with_reason(Code::PermissionDenied, "NOT_ALLOWED", &message, &[]),
        Rejection::Limited(limited) => with_details(Code::ResourceExhausted, "LIMITED", &message, &[], |details| {
            details.set_retry_info(limited.retry_after.map(Duration::from_secs));
        }),
        Rejection::Fleet(reason) => refusal(reason),
        Rejection::NoResponse(_) => with_reason(Code::NotFound, "RESPONSE_NOT_FOUND", &message, &[]),
    }
}

fn refusal(refusal: &Refusal) -> Status {
    let message = refusal.to_string();
    match refusal {
        Refusal::UnknownModel { model, known } => {
            with_reason(Code::NotFound, "MODEL_NOT_FOUND", &message, &[("model", model), ("models", known)])
        }
        Refusal::MissingRoute { .. } | Refusal::WithheldRoute { .. } => with_reason(Code::Unimplemented, "MISSING_ROUTE", &message, &[]),
        Refusal::NotReady { retry_after, .. } => {
            retryable(Code::Unavailable, "NO_REPLICA_READY", &message, Duration::from_secs(*retry_after))
        }
        Refusal::Lost { attempts, retry_after, .. } => {
            with_details(Code::Unavailable, "ANSWER_LOST", &message, &[("attempts", &attempts.to_string())], |details| {
                details.set_retry_info(Some(Duration::from_secs(*retry_after)));
            })
        }
        Refusal::TooSlow(_) => with_reason(Code::DeadlineExceeded, "ENGINE_TOO_SLOW", &message, &[]),
        // Clients do not retry this code by themselves, which is what matters.
        Refusal::CrashSuspect(_) => with_reason(Code::FailedPrecondition, "REQUEST_KILLS_ENGINES", &message, &[]),
        Refusal::Overloaded { retry_after, .. } => {
            retryable(Code::ResourceExhausted, "OVERLOADED", &message, Duration::from_secs(*retry_after))
        }
    }
}

/// The status for an answer that broke after it had begun. Nobody may take it for complete.
pub(super) fn broken_answer(broken: &StreamFault) -> Status {
    with_reason(Code::Unavailable, "ANSWER_BROKEN", &format!("the answer broke after it had begun: {}", broken.message), &[])
}

pub(super) fn unreadable_answer(what: &str) -> Status {
    with_reason(Code::Internal, "ANSWER_NOT_UNDERSTOOD", &format!("the engine's answer is not understood: {what}"), &[])
}

pub(super) fn engine_refusal(http: u16, headers: &[Header], body: &[u8]) -> Status {
    let error = serde_json::from_slice::<EngineRefusal>(body).ok().and_then(EngineRefusal::into_error).unwrap_or_default();
    let after = headers.iter().find(|header| header.name.eq_ignore_ascii_case(b"retry-after"));
    let after = after.and_then(|header| std::str::from_utf8(&header.value).ok()?.trim().parse().ok());
    engine_error(http.into(), &error, after.map(Duration::from_secs))
}

/// An engine's error within a stream that began with 200.
pub(super) fn engine_stream_error(error: &EngineError) -> Status {
    engine_error(error.http_status().unwrap_or(500), error, None)
}

fn engine_error(http: u32, error: &EngineError, after: Option<Duration>) -> Status {
    let code = match http {
        400 | 422 => Code::InvalidArgument,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        // `NotFoundError` is a missing model. Any other 404 is a route that this engine does not
        // have.
        404 if error.kind.as_deref() == Some("NotFoundError") => Code::NotFound,
        404 | 405 | 501 => Code::Unimplemented,
        408 | 504 => Code::DeadlineExceeded,
        409 => Code::Aborted,
        413 | 429 => Code::ResourceExhausted,
        500 => Code::Internal,
        502 | 503 => Code::Unavailable,
        _ => Code::Unknown,
    };
    let message = match (error.message.as_deref(), code) {
        (Some(message), Code::Unimplemented) => format!("the engine that serves this model does not offer it: {message}"),
        (Some(message), _) => message.to_owned(),
        (None, _) => format!("the engine answered {http}"),
    };
    let status = http.to_string();
    let mut metadata = vec![("http_status", status.as_str())];
    metadata.extend(error.kind.as_deref().map(|kind| ("type", kind)));
    with_details(code, "ENGINE_REFUSED", &message, &metadata, |details| {
        if matches!(http, 429 | 502 | 503) {
            details.set_retry_info(Some(after.unwrap_or(RETRY_DELAY)));
        }
        if let (Code::InvalidArgument, Some(field)) = (code, error.param.as_deref()) {
            details.add_bad_request_violation(truncate(field, MAX_VALUE_BYTES), truncate(&message, MAX_VALUE_BYTES));
        }
    })
}

#[cfg(test)]
mod tests;
