//! Errors of single requests, in the exact words and format of vLLM 0.32.

use http::StatusCode;
use http::header::{ALLOW, HeaderValue};
use serde_json::value::RawValue;

use crate::engine::Refusal;
use crate::reply::{Reply, json};

/// An error answer. `kind` is the wire's `type`.
#[derive(Debug, PartialEq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) kind: &'static str,
    /// Word for the wire's `code`, as the Rust front-end has; `None` for the number of the status.
    pub(crate) code: Option<&'static str>,
    pub(crate) param: Option<String>,
    pub(crate) message: String,
}

/// Fault of the tool `at` this place.
#[derive(Debug, PartialEq)]
pub(crate) enum ToolFault {
    Kind { at: usize, kind: String },
    NoFunction { at: usize, fields: usize },
}

impl ApiError {
    /// Error for a value of the right type that is not possible.
    pub(crate) fn bad_value(field: &str, value: &str, message: &str) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "BadRequestError",
            code: None,
            param: Some(field.to_owned()),
            message: format!("{message} (parameter={field}, value={value})"),
        }
    }

    /// Error for a request that cannot be answered.
    pub(crate) fn refused(field: Option<&str>, message: &str) -> Self {
        let suffix = field.map_or(String::new(), |field| format!(" (parameter={field})"));
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "BadRequestError",
            code: None,
            param: field.map(str::to_owned),
            message: format!("{message}{suffix}"),
        }
    }

    /// Error for a chat that would have to end in two contradictory ways.
    pub(crate) fn contradictory_ending() -> Self {
        let message = "continue_final_message and add_generation_prompt are not compatible. Use continue_final_message when you want the model to continue the final message, and add_generation_prompt when you want to add a header that will prompt it to start a new assistant message instead.";
        Self::refused(None, message)
    }

    /// Error for a field of the wrong type; `error` is pydantic's name for it.
    pub(crate) fn wrong_type(field: &str, error: &str, message: &str, value: &RawValue) -> Self {
        Self::invalid(field, &format!("'type': '{error}', 'loc': 'body.{field}', 'msg': '{message}', 'input': {}", python(value)))
    }

    pub(crate) fn missing(field: &str) -> Self {
        Self::invalid(field, &format!("'type': 'missing', 'loc': 'body.{field}', 'msg': 'Field required', 'input': '<dict>'"))
    }

    fn invalid(field: &str, details: &str) -> Self {
        Self::several_invalid(field, &[details.to_owned()])
    }

    /// Error for a field with several faults, in pydantic's words.
    fn several_invalid(field: &str, faults: &[String]) -> Self {
        let count = if faults.len() == 1 { "1 validation error".to_owned() } else { format!("{} validation errors", faults.len()) };
        let faults: String = faults.iter().map(|fault| format!("\n  {{{fault}}}")).collect();
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "Bad Request",
            code: None,
            param: Some(format!("body.{field}")),
            message: format!("{count}:{faults}"),
        }
    }

    /// Error of the Python front-end for tools of a chat that are none; a fault for each.
    pub(crate) fn no_functions(faults: &[ToolFault]) -> Self {
        let details = |fault: &ToolFault| match fault {
            ToolFault::Kind { at, kind } => format!(
                "'type': 'literal_error', 'loc': 'body.tools.{at}.type', 'msg': \"Input should be 'function'\", 'input': {}, 'ctx': {{'expected': \"'function'\"}}",
                python_text(kind)
            ),
            ToolFault::NoFunction { at, fields } => format!(
                "'type': 'missing', 'loc': 'body.tools.{at}.function', 'msg': 'Field required', 'input': '<dict of {fields} items>'"
            ),
        };
        let first = match faults.first() {
            Some(ToolFault::NoFunction { at, .. }) => format!("tools.{at}.function"),
            Some(ToolFault::Kind { at, .. }) => format!("tools.{at}.type"),
            None => "tools".to_owned(),
        };
        Self::several_invalid(&first, &faults.iter().map(details).collect::<Vec<_>>())
    }

    /// Error of the Rust front-end.
    pub(crate) fn of_rust(param: Option<&str>, message: &str) -> Self {
        let kind = "invalid_request_error";
        Self { status: StatusCode::BAD_REQUEST, kind, code: Some(kind), param: param.map(str::to_owned), message: message.to_owned() }
    }

    /// Error of the Rust front-end for a body that it cannot read; `words` end with the position.
    pub(crate) fn unreadable_for_rust(is_json: bool, words: &str) -> Self {
        let cause =
            if is_json { "Failed to deserialize the JSON body into the target type" } else { "Failed to parse the request body as JSON" };
        Self { code: Some("json_parse_error"), ..Self::of_rust(None, &format!("{cause}: {words}")) }
    }

    /// Error for a body that is not a JSON object.
    pub(crate) fn bad_json(body: &[u8], error: &serde_json::Error) -> Self {
        let words = error.to_string();
        let position = json_position(body, error);
        let reason = if words.contains("`:`") {
            "Expecting ':' delimiter"
        } else if words.contains("`,` or") {
            "Expecting ',' delimiter"
        } else if words.contains("key must be") || words.contains("trailing comma") {
            "Expecting property name enclosed in double quotes"
        } else if words.contains("parsing a string") {
            "Unterminated string starting at"
        } else if words.contains("trailing characters") {
            "Extra data"
        } else {
            "Expecting value"
        };
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "Bad Request",
            code: None,
            param: Some(format!("body.{position}")),
            message: format!(
                "1 validation error:\n  {{'type': 'json_invalid', 'loc': 'body.{position}', 'msg': 'JSON decode error', 'input': '<dict of 0 items>', 'ctx': {{'error': {}}}}}",
                python_text(reason)
            ),
        }
    }

    pub(crate) fn unknown_model(model: &str, served: &[String]) -> Self {
        Self {
            status: StatusCode::NOT_FOUND,
            kind: "NotFoundError",
            code: None,
            param: Some("model".to_owned()),
            message: format!("The model `{model}` does not exist. Valid aliases: {}.", served.join(", ")),
        }
    }

    /// Error of routes that `--enable-scale-out` turns on.
    pub(crate) fn no_scale_out() -> Self {
        Self {
            status: StatusCode::FORBIDDEN,
            kind: "PermissionDeniedError",
            code: None,
            param: None,
            message: "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.".to_owned(),
        }
    }

    pub(crate) fn engine_failed() -> Self {
        Self::internal("EngineCore encountered an issue. See stack trace (above) for the root cause.")
    }

    pub(crate) fn internal(message: &str) -> Self {
        Self {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            kind: "InternalServerError",
            code: None,
            param: None,
            message: message.to_owned(),
        }
    }

    pub(crate) fn reply(&self) -> Reply {
        let param = self.param.as_ref().map_or("null".to_owned(), |param| json_string(param));
        let message = json_string(&self.message);
        let kind = self.kind;
        let code = self.code.map_or_else(|| self.status.as_u16().to_string(), json_string);
        json(self.status, format!(r#"{{"error":{{"message":{message},"type":"{kind}","param":{param},"code":{code}}}}}"#))
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Busy => Self {
                status: StatusCode::SERVICE_UNAVAILABLE,
                kind: "Service Unavailable",
                code: None,
                param: None,
                message: "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
                    .to_owned(),
            },
            Refusal::Stopped => Self::internal("cannot schedule new futures after shutdown"),
            Refusal::Unsatisfiable(why) => Self::refused(None, &format!("Grammar error: {why}")),
        }
    }
}

/// Error for a response that is not kept here, or cannot be cancelled.
pub(crate) fn no_response(status: StatusCode, message: String) -> ApiError {
    ApiError { status, kind: "invalid_request_error", code: None, param: Some("response_id".to_owned()), message }
}

/// Checks that the content type of a body is JSON.
pub(crate) fn check_type(content_type: &str) -> Result<(), ApiError> {
    let named = content_type.split(';').next().unwrap_or_default();
    if named.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed".to_owned();
    Err(ApiError { status: StatusCode::BAD_REQUEST, kind: "Bad Request", code: None, param: None, message })
}

/// Error 404 for a named thing that does not exist.
pub(crate) fn not_found_error(message: String) -> ApiError {
    ApiError { status: StatusCode::NOT_FOUND, kind: "NotFoundError", code: None, param: None, message }
}

pub(crate) fn not_found() -> Reply {
    json(StatusCode::NOT_FOUND, r#"{"detail":"Not Found"}"#)
}

/// Answer to a known path with a method that it does not have.
pub(crate) fn wrong_method(allowed: &'static str) -> Reply {
    let mut reply = json(StatusCode::METHOD_NOT_ALLOWED, r#"{"detail":"Method Not Allowed"}"#);
    reply.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
    reply
}

/// Formats a string as JSON.
pub(crate) fn json_string(text: &str) -> String {
    serde_json::to_string(text).expect("a string is always valid JSON")
}

/// Offset at which a body stops being JSON. Serde names the line and the column of the last byte it
/// read.
fn json_position(body: &[u8], error: &serde_json::Error) -> usize {
    let before = error.line().saturating_sub(1);
    let lines = body.split_inclusive(|byte| *byte == b'\n').take(before);
    let offset = lines.map(<[u8]>::len).sum::<usize>() + error.column();
    if error.is_eof() { offset } else { offset.saturating_sub(1) }
}

/// A JSON value as Python prints it in vLLM's validation errors; containers are shortened to their
/// sizes.
fn python(value: &RawValue) -> String {
    match serde_json::from_str(value.get()) {
        Ok(serde_json::Value::String(text)) => python_text(&text),
        Ok(serde_json::Value::Bool(true)) => "True".to_owned(),
        Ok(serde_json::Value::Bool(false)) => "False".to_owned(),
        Ok(serde_json::Value::Array(items)) => format!("'<list of {} items>'", items.len()),
        Ok(serde_json::Value::Object(items)) => format!("'<dict of {} items>'", items.len()),
        _ => value.get().to_owned(),
    }
}

/// A string in the form of Python's `repr`, in the cases that matter here.
fn python_text(text: &str) -> String {
    if text.contains('\'') && !text.contains('"') {
        format!("\"{text}\"")
    } else {
        format!("'{}'", text.replace('\\', r"\\").replace('\'', r"\'").replace('\n', r"\n"))
    }
}
