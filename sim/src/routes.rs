//! Paths and methods: reads the request, hands it to the API, and gives every answer
//! the headers that uvicorn and vLLM add.

use std::time::Duration;

use bytes::Bytes;
use hostler_api::Route;
use http::header::{self, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, SERVER, VARY};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;

use crate::VLLM_VERSION;
use crate::api::{self, Api, ApiError, check_type, not_found, wrong_method};
use crate::faults::Fault;
use crate::mailbox::Finish;
use crate::metrics::render;
use crate::reply::{Reply, empty, json, whole};
use crate::tokens::{tokenizer_config_json, tokenizer_json};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Header that echoes the request's `traceparent`. vLLM reports it to its collector; the echo is
/// for tests.
const TRACE_PARENT_ECHO: HeaderName = HeaderName::from_static("x-sim-traceparent");

/// Largest accepted body. vLLM has no such bound; no test needs more.
const MOST_BODY_BYTES: usize = 64 << 20;

/// Why a request could not be read, which ends the connection.
type BodyError = Box<dyn std::error::Error + Send + Sync>;

/// Every path with its method, in the words of `allow`.
const ROUTES: &[(&str, &str)] = &[
    (Route::ChatCompletions.path(), "POST"),
    (Route::Completions.path(), "POST"),
    (Route::ChatRender.path(), "POST"),
    (Route::CompletionRender.path(), "POST"),
    (Route::Responses.path(), "POST"),
    (Route::Messages.path(), "POST"),
    (Route::CountTokens.path(), "POST"),
    (Route::Embeddings.path(), "POST"),
    (Route::Tokenize.path(), "POST"),
    (Route::Detokenize.path(), "POST"),
    (Route::Invocations.path(), "POST"),
    ("/reset_prefix_cache", "POST"),
    ("/sleep", "POST"),
    ("/wake_up", "POST"),
    ("/is_sleeping", "GET"),
    ("/collective_rpc", "POST"),
    (Route::LoadAdapter.path(), "POST"),
    (Route::UnloadAdapter.path(), "POST"),
    ("/sim/fault", "POST"),
    ("/sim/model/tokenizer.json", "GET"),
    ("/sim/model/tokenizer_config.json", "GET"),
    (Route::Models.path(), "GET"),
    (Route::Health.path(), "GET"),
    (Route::Ping.path(), "GET, POST"),
    (Route::Version.path(), "GET"),
    (Route::Load.path(), "GET"),
    ("/metrics", "GET"),
    ("/metrics/", "GET"),
];

/// Paths that vLLM's Rust front-end lacks, up to 0.33 at least, with everything below them.
const RUST_LACKS: [Route; 7] =
    [Route::Messages, Route::Responses, Route::Embeddings, Route::Invocations, Route::Ping, Route::ChatRender, Route::CompletionRender];

pub(crate) async fn answer(api: &Api, request: Request<Incoming>) -> Result<Reply, BodyError> {
    let given_id = request.headers().get(REQUEST_ID).cloned();
    let trace_parent = request.headers().get("traceparent").cloned();
    let origins = api.args.allowed_origins.as_ref();
    let origin = origins.and_then(|origins| origins.named(request.headers()));
    let mut reply = match preflight(request.method(), request.headers(), origin.is_some()).filter(|_| origins.is_some()) {
        Some(reply) => reply,
        None => route(api, request, given_id.as_ref()).await?,
    };
    let headers = reply.headers_mut();
    headers.extend(trace_parent.map(|parent| (TRACE_PARENT_ECHO, parent)));
    if let Some(origin) = origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    }
    if !api.args.sim_rust_front_end {
        headers.insert(SERVER, HeaderValue::from_static("uvicorn"));
        headers.insert(VARY, HeaderValue::from_static("Origin"));
    }
    if api.args.enable_request_id_headers {
        let id = given_id.unwrap_or_else(|| HeaderValue::from_str(&api::random_id(32)).expect("hexadecimal digits are valid in a header"));
        headers.insert(REQUEST_ID, id);
    }
    Ok(reply)
}

/// Answer to a page's preflight request, which reaches no route.
fn preflight(method: &Method, headers: &HeaderMap, is_allowed: bool) -> Option<Reply> {
    let method_requested = headers.get(header::ACCESS_CONTROL_REQUEST_METHOD).filter(|_| *method == Method::OPTIONS)?;
    let mut reply = match is_allowed {
        true => whole(StatusCode::OK, "text/plain; charset=utf-8", "OK"),
        false => whole(StatusCode::BAD_REQUEST, "text/plain; charset=utf-8", "Disallowed CORS origin"),
    };
    let answer_headers = reply.headers_mut();
    answer_headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, method_requested.clone());
    answer_headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    if let Some(names) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        answer_headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
    }
    Some(reply)
}

/// Whether a request carries the engine's key, if there is one.
fn has_key(key: Option<&str>, headers: &HeaderMap) -> bool {
    let given = || headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
    key.is_none_or(|key| given() == Some(key))
}

async fn route(api: &Api, request: Request<Incoming>, given_id: Option<&HeaderValue>) -> Result<Reply, BodyError> {
    let path = request.uri().path();
    if path.starts_with("/v1") && !has_key(api.args.api_key.as_deref(), request.headers()) {
        return Ok(json(StatusCode::UNAUTHORIZED, r#"{"error":"Unauthorized"}"#));
    }
    if api.args.sim_rust_front_end && RUST_LACKS.iter().any(|lacked| path.starts_with(lacked.path())) {
        return Ok(rust_not_found());
    }
    let below = path.strip_prefix(Route::Responses.path()).and_then(|rest| rest.strip_prefix('/'));
    if let Some(below) = below {
        return Ok(api::stored_response(api, request.method(), &percent_decode(below)));
    }
    let Some((path, allowed)) = ROUTES.iter().find(|(known, _)| *known == path && is_enabled(api, path)) else {
        return Ok(if api.args.sim_rust_front_end { rust_not_found() } else { not_found() });
    };
    if !allowed.split(", ").any(|method| method == request.method().as_str()) {
        // Name the first route of a path, as FastAPI does.
        return Ok(wrong_method(allowed.split(", ").next().unwrap_or(allowed)));
    }
    if request.method() == Method::GET || Route::of(path) == Route::Ping {
        return Ok(get(api, path, request.uri().query().unwrap_or_default()));
    }
    let query = request.uri().query().unwrap_or_default().to_owned();
    let content_type = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    let adapter = request.headers().get(api::ADAPTER).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let body = match Limited::new(request.into_body(), MOST_BODY_BYTES).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) if error.is::<LengthLimitError>() => {
            return Ok(json(StatusCode::PAYLOAD_TOO_LARGE, r#"{"detail":"Payload Too Large"}"#));
        }
        Err(error) => return Err(error),
    };
    let id = given_id.and_then(|id| id.to_str().ok());
    if is_client_route(path)
        && let Err(error) = check_type(&content_type)
    {
        return Ok(error.reply());
    }
    let (path, body) = match Route::of(path) {
        Route::Invocations => match api::parse_invocation(&body, adapter.as_deref()) {
            Ok(carried) => carried,
            Err(error) => return Ok(error.reply()),
        },
        _ => (*path, body),
    };
    Ok(post(api, (path, &query), &body, id).await.unwrap_or_else(|error| error.reply()))
}

/// Answer of vLLM's Rust front-end for a route that it does not have.
fn rust_not_found() -> Reply {
    let mut reply = empty();
    *reply.status_mut() = StatusCode::NOT_FOUND;
    reply
}

/// Whether a route checks the content type of a body.
fn is_client_route(path: &str) -> bool {
    path.starts_with("/v1/") || matches!(Route::of(path), Route::Tokenize | Route::Detokenize | Route::Invocations)
}

/// Whether a route is enabled. vLLM has some routes only if it was started for them.
fn is_enabled(api: &Api, path: &str) -> bool {
    match (Route::of(path), path) {
        (_, "/sleep" | "/wake_up" | "/is_sleeping" | "/collective_rpc") => api.args.sim_dev_mode,
        (Route::LoadAdapter | Route::UnloadAdapter, _) => api.args.sim_runtime_lora,
        _ => true,
    }
}

async fn post(api: &Api, (path, query): (&str, &str), body: &Bytes, id: Option<&str>) -> Result<Reply, ApiError> {
    if path.starts_with("/v1/") {
        apply_triggers(api, body)?;
    }
    match (Route::of(path), path) {
        (Route::ChatCompletions, _) => api::chat(api, body, id).await,
        (Route::Completions, _) => api::completions(api, body, id).await,
        (Route::ChatRender, _) => api::render_chat(api, body, id),
        (Route::CompletionRender, _) => api::render_completion(api, body, id),
        (Route::Responses, _) => api::responses(api, body, id).await,
        (Route::Messages, _) => api::messages(api, body, id).await,
        (Route::CountTokens, _) => api::count_tokens(api, body),
        (Route::Embeddings, _) => api::embeddings(api, body, id).await,
        (Route::Tokenize, _) => api::tokenize(api, body),
        (Route::Detokenize, _) => api::detokenize(api, body),
        (_, "/reset_prefix_cache") => {
            let success = api.core.reset_cache().await;
            Ok(json(StatusCode::OK, format!(r#"{{"success":{success}}}"#)))
        }
        (_, "/sleep") => Ok(api::sleep(api, query).await),
        (_, "/wake_up") => Ok(api::wake_up(api, query).await),
        (_, "/collective_rpc") => Ok(api::collective_rpc(api, body)),
        (Route::LoadAdapter, _) => api::load_adapter(api, body),
        (Route::UnloadAdapter, _) => api::unload_adapter(api, body),
        (_, "/sim/fault") => set_fault(api, body).await,
        _ => Ok(not_found()),
    }
}

fn get(api: &Api, path: &str, query: &str) -> Reply {
    match (Route::of(path), path) {
        (Route::Health | Route::Ping, _) => empty(),
        (Route::Version, _) => json(StatusCode::OK, format!(r#"{{"version":"{VLLM_VERSION}"}}"#)),
        (Route::Load, _) => {
            let counted = api.args.enable_server_load_tracking;
            let load = if counted { api.core.in_flight() } else { 0 };
            json(StatusCode::OK, format!(r#"{{"server_load":{load}}}"#))
        }
        (Route::Models, _) => api::models(api),
        (_, "/is_sleeping") => api::is_sleeping(api),
        (_, "/sim/model/tokenizer.json") => json(StatusCode::OK, tokenizer_json()),
        (_, "/sim/model/tokenizer_config.json") => json(StatusCode::OK, tokenizer_config_json()),
        _ => {
            let text = render(&api.core.metrics, &api.args, &requested_names(query));
            whole(StatusCode::OK, "text/plain; version=1.0.0; charset=utf-8", text)
        }
    }
}

/// Values of `name[]` in a query.
fn requested_names(query: &str) -> Vec<String> {
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let pairs = pairs.map(|(key, value)| (percent_decode(key), percent_decode(value)));
    pairs.filter(|(key, _)| key == "name[]").map(|(_, value)| value).collect()
}

/// Undoes percent encoding; invalid escapes stay unchanged.
fn percent_decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let digits = after.get(..2).filter(|_| first == b'%');
        let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        if let Some(byte) = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            bytes.push(byte);
            rest = &after[2..];
        } else {
            bytes.push(first);
            rest = after;
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Applies `--sim-die-on` and `--sim-err-on` to a request.
fn apply_triggers(api: &Api, body: &[u8]) -> Result<(), ApiError> {
    let contains = |text: &Option<String>| text.as_ref().is_some_and(|text| memchr::memmem::find(body, text.as_bytes()).is_some());
    if contains(&api.args.sim_die_on) {
        let (faults, delay) = (api.core.faults.clone(), Duration::from_millis(api.args.sim_die_on_ms));
        if delay.is_zero() {
            // Die at once, before a busy machine lets the engine answer anything.
            faults.set(Fault::Die);
        } else {
            api.deaths.lock().spawn(async move {
                tokio::time::sleep(delay).await;
                faults.set(Fault::Die);
            });
        }
    }
    // This is vLLM's answer to a schema that refers to itself.
    if contains(&api.args.sim_err_on) { Err(ApiError::internal("maximum recursion depth exceeded")) } else { Ok(()) }
}

async fn set_fault(api: &Api, body: &[u8]) -> Result<Reply, ApiError> {
    let fault: Fault = serde_json::from_slice(body).map_err(|error| ApiError::bad_json(body, &error))?;
    tracing::info!(?fault, "a fault is set");
    api.core.faults.set(fault);
    if fault == Fault::ErrorEvent {
        api.core.end_all(Finish::Error).await;
    }
    Ok(json(StatusCode::OK, "{}"))
}
