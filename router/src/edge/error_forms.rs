//! Errors in the forms of the APIs, as the body of an answer or as an event of a stream.

use bytes::Bytes;
use http::StatusCode;
use serde::Deserialize;

use crate::sse::Dialect;

/// The body of an error in OpenAI's form.
pub(super) fn error_text(status: StatusCode, kind: &str, message: &str) -> String {
    serde_json::json!({"error": {"message": message, "type": kind, "param": null, "code": status.as_u16()}}).to_string()
}

/// The Messages API's name of an error. Engines write their `own` names here, which are those of
/// OpenAI's API. Errors that only a router reports have Anthropic's names.
pub(super) fn messages_error_type(status: StatusCode, own: &str) -> &str {
    match status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        408 | 504 => "timeout_error",
        _ => own,
    }
}

/// Converts an error that was a whole answer to an event of a stream.
pub(super) fn retell_error(dialect: Dialect, status: StatusCode, error: &[u8]) -> Bytes {
    #[derive(Deserialize)]
    struct Told {
        error: serde_json::Map<String, serde_json::Value>,
    }
    let Ok(Told { error }) = serde_json::from_slice(error) else {
        return dialect.error_event(&String::from_utf8_lossy(error));
    };
    let (kind, message) = (error.get("type"), error.get("message"));
    let (event, data) = match dialect {
        Dialect::OpenAi | Dialect::Other => ("", serde_json::json!({"error": error})),
        Dialect::Responses => {
            ("event: error\n", serde_json::json!({"type": "error", "code": kind, "message": message, "param": error.get("param")}))
        }
        Dialect::Anthropic => {
            let kind = messages_error_type(status, kind.and_then(|kind| kind.as_str()).unwrap_or("api_error"));
            ("event: error\n", serde_json::json!({"type": "error", "error": {"type": kind, "message": message}}))
        }
    };
    format!("{event}data: {data}\n\n").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_after_the_head_has_the_apis_form() {
        let full = br#"{"error":{"message":"full","type":"RateLimitError","param":null,"code":429}}"#;
        for (dialect, told) in [
            (Dialect::OpenAi, r#"data: {"error":{"code":429,"message":"full","param":null,"type":"RateLimitError"}}"#),
            (
                Dialect::Responses,
                "event: error\ndata: {\"code\":\"RateLimitError\",\"message\":\"full\",\"param\":null,\"type\":\"error\"}",
            ),
            (Dialect::Anthropic, "event: error\ndata: {\"error\":{\"message\":\"full\",\"type\":\"rate_limit_error\"},\"type\":\"error\"}"),
        ] {
            let event = String::from_utf8(retell_error(dialect, StatusCode::TOO_MANY_REQUESTS, full).to_vec()).unwrap();
            let (told, event) = (told.rsplit_once("data: ").unwrap(), event.rsplit_once("data: ").unwrap());
            let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
            assert_eq!((told.0, json(told.1)), (event.0, json(event.1.strip_suffix("\n\n").unwrap())));
        }
        let odd = retell_error(Dialect::OpenAi, StatusCode::BAD_GATEWAY, b"<html>\n\nno JSON");
        assert_eq!(odd, Dialect::OpenAi.error_event("<html>\n\nno JSON"));
    }
}
