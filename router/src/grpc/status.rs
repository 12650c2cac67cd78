//! Why there is no answer, as gRPC tells it: a code, a sentence, and google.rpc details that programs can read.

use std::collections::HashMap;
use std::time::Duration;

use hostler_proto::lane::Header;
use hostler_proto::lane::Broken;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use super::engine::{EngineError, Refused};
use crate::dispatch::Refusal;
use crate::edge::{Declined, Unread};
use crate::keys::Unauthenticated;

/// Who names the reasons.
pub(super) const DOMAIN: &str = "hostler";

/// Bytes of a message: it travels in trailers, of which clients take 8 KiB and engines' messages may repeat the request.
const MOST_MESSAGE: usize = 1024;

/// Bytes of a value in the details, likewise.
const MOST_VALUE: usize = 256;

/// What an engine that is full says nothing about: when to come back.
const RETRY: Duration = Duration::from_secs(1);

/// A status of ours with its reason and what belongs to that.
pub(super) fn told(code: Code, reason: &str, message: &str, metadata: &[(&str, &str)]) -> Status {
    with(code, reason, message, metadata, |_| {})
}

/// The same after which trying again helps.
fn again(code: Code, reason: &str, message: &str, after: Duration) -> Status {
    with(code, reason, message, &[], |details| {
        details.set_retry_info(Some(after));
    })
}

/// A field of the request is wrong.
pub(super) fn wrong(field: &str, why: &str) -> Status {
    with(Code::InvalidArgument, "INVALID_FIELD", &format!("{field}: {why}"), &[("field", field)], |details| {
        details.add_bad_request_violation(cut(field, MOST_VALUE), cut(why, MOST_VALUE));
    })
}

fn with(code: Code, reason: &str, message: &str, metadata: &[(&str, &str)], more: impl FnOnce(&mut ErrorDetails)) -> Status {
    let metadata: HashMap<String, String> = metadata.iter().map(|(name, value)| ((*name).to_owned(), cut(value, MOST_VALUE))).collect();
    let mut details = ErrorDetails::with_error_info(reason, DOMAIN, metadata);
    more(&mut details);
    Status::with_error_details(code, cut(message, MOST_MESSAGE), details)
}

/// The beginning of a text that fits.
fn cut(text: &str, most: usize) -> String {
    if text.len() <= most { text.to_owned() } else { format!("{}…", &text[..text.floor_char_boundary(most)]) }
}

/// The caller is not known.
pub(crate) fn unauthenticated(why: &Unauthenticated) -> Status {
    told(Code::Unauthenticated, "UNAUTHENTICATED", &why.to_string(), &[])
}

/// The request's bytes did not arrive.
pub(crate) fn unread(why: &Unread) -> Status {
    let message = why.to_string();
    match why {
        Unread::TooLarge(most) => told(Code::ResourceExhausted, "MESSAGE_TOO_LARGE", &message, &[("max_bytes", &most.to_string())]),
        Unread::NoRoom(_) => again(Code::ResourceExhausted, "ROUTER_FULL", &message, RETRY),
        Unread::TooSlow(_) => told(Code::DeadlineExceeded, "MESSAGE_TOO_SLOW", &message, &[]),
        _ => told(Code::InvalidArgument, "MESSAGE_UNREADABLE", &message, &[]),
    }
}

/// The request found no engine's answer.
pub(super) fn declined(declined: &Declined) -> Status {
    let message = declined.to_string();
    match declined {
        Declined::Malformed(_) => told(Code::InvalidArgument, "MALFORMED", &message, &[]),
        Declined::Forbidden(_) => told(Code::PermissionDenied, "NOT_ALLOWED", &message, &[]),
        Declined::Limited(limited) => again(Code::ResourceExhausted, "LIMITED", &message, Duration::from_secs(limited.retry_after)),
        Declined::Fleet(refusal) => refused(refusal),
        Declined::NoResponse(_) => told(Code::NotFound, "RESPONSE_NOT_FOUND", &message, &[]),
    }
}

fn refused(refusal: &Refusal) -> Status {
    let message = refusal.to_string();
    match refusal {
        Refusal::UnknownModel { model, known } => told(Code::NotFound, "MODEL_NOT_FOUND", &message, &[("model", model), ("models", known)]),
        Refusal::NotReady(_) => again(Code::Unavailable, "NO_REPLICA_READY", &message, RETRY),
        Refusal::Lost { attempts, .. } => {
            with(Code::Unavailable, "ANSWER_LOST", &message, &[("attempts", &attempts.to_string())], |details| {
                details.set_retry_info(Some(RETRY));
            })
        }
        Refusal::TooSlow(_) => told(Code::DeadlineExceeded, "ENGINE_TOO_SLOW", &message, &[]),
        // Clients do not send it again by themselves, which is what matters.
        Refusal::CrashSuspect(_) => told(Code::FailedPrecondition, "REQUEST_KILLS_ENGINES", &message, &[]),
        Refusal::Overloaded { retry_after, .. } => {
            again(Code::ResourceExhausted, "OVERLOADED", &message, Duration::from_secs(*retry_after))
        }
    }
}

/// An answer that had begun has broken. What came of it is not the whole; nobody may take it for that.
pub(super) fn broken(broken: &Broken) -> Status {
    told(Code::Unavailable, "ANSWER_BROKEN", &format!("the answer broke after it had begun: {}", broken.message), &[])
}

/// The engine's answer is not what such an engine answers.
pub(super) fn not_understood(what: &str) -> Status {
    told(Code::Internal, "ANSWER_NOT_UNDERSTOOD", &format!("the engine's answer is not understood: {what}"), &[])
}

/// An engine's refusal, with its status code and headers.
pub(super) fn engine(http: u16, headers: &[Header], body: &[u8]) -> Status {
    let error = serde_json::from_slice::<Refused>(body).ok().and_then(Refused::into_error).unwrap_or_default();
    let after = headers.iter().find(|header| header.name.eq_ignore_ascii_case(b"retry-after"));
    let after = after.and_then(|header| std::str::from_utf8(&header.value).ok()?.trim().parse().ok());
    of_engine(http.into(), &error, after.map(Duration::from_secs))
}

/// An engine's error within a stream, which has begun with 200.
pub(super) fn in_stream(error: &EngineError) -> Status {
    of_engine(error.http().unwrap_or(500), error, None)
}

fn of_engine(http: u32, error: &EngineError, after: Option<Duration>) -> Status {
    let code = match http {
        400 | 422 => Code::InvalidArgument,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        // A model that is gone, and else a route that this engine does not have.
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
    with(code, "ENGINE_REFUSED", &message, &metadata, |details| {
        if matches!(http, 429 | 502 | 503) {
            details.set_retry_info(Some(after.unwrap_or(RETRY)));
        }
        if let (Code::InvalidArgument, Some(field)) = (code, error.param.as_deref()) {
            details.add_bad_request_violation(cut(field, MOST_VALUE), cut(&message, MOST_VALUE));
        }
    })
}

#[cfg(test)]
mod tests;
