//! The router's own answers in the engines' style, on the routes that both have and in the dialect
//! of the requested API.

use hostler_api::Route;
use hostler_proto::lane::ROUTER_SERVER;
use http::header::{self, HeaderMap, HeaderValue};
use http::{Request, Response, StatusCode};
use serde::Deserialize;

use super::error_forms::messages_error_type;
use super::reply::{EdgeBody, error, json, no_route};
use crate::access_log::REQUEST_ID;

/// The parts of a request that the router's own answer needs.
#[derive(Debug)]
pub(super) struct LocalReplyContext {
    request_id: Option<HeaderValue>,
    /// Errors take the form of Anthropic's Messages API.
    is_messages_api: bool,
}

impl LocalReplyContext {
    pub(super) fn from_request<B>(request: &Request<B>) -> Self {
        Self {
            request_id: request.headers().get(REQUEST_ID).cloned(),
            is_messages_api: request.uri().path().starts_with(Route::Messages.path()),
        }
    }

    /// Adds the headers of every engine's answer to the router's own. An engine's answer is left as
    /// it is.
    pub(super) fn add_common_headers(self, response: Response<EdgeBody>) -> Response<EdgeBody> {
        if !matches!(response.body(), EdgeBody::Local(_) | EdgeBody::Held(_) | EdgeBody::File(_)) {
            return response;
        }
        let failed = response.status().is_client_error() || response.status().is_server_error();
        let mut response = if self.is_messages_api && failed { to_messages_error(response) } else { response };
        let headers = response.headers_mut();
        if let Some(id) = self.request_id {
            headers.insert(REQUEST_ID, id);
        }
        // An agent that is told to attach to this router as to an engine refuses.
        headers.insert(header::SERVER, HeaderValue::from_static(ROUTER_SERVER));
        // Without this, a cache could serve the answer to pages of other origins.
        headers.entry(header::VARY).or_insert(HeaderValue::from_static("Origin"));
        response
    }
}

/// The answer to a path that is not passed on: 404, or 405 for a wrong method.
pub(super) fn not_proxied_reply(path: &str) -> Response<EdgeBody> {
    match path {
        _ if is_public(path) => {
            let mut response = json(StatusCode::METHOD_NOT_ALLOWED, r#"{"detail":"Method Not Allowed"}"#);
            response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET"));
            response
        }
        _ => match base_url_hint(path) {
            Some(hint) => error(StatusCode::NOT_FOUND, "NotFoundError", &format!("{path} is not found: {hint}")),
            None => no_route(),
        },
    }
}

/// Paths that need no key. Load balancers ask there whether the router can serve (vLLM's paths and
/// those of Kubernetes), and anybody may read the manual.
pub(super) fn is_public(path: &str) -> bool {
    matches!(Route::of(path), Route::Health | Route::Ping | Route::Healthz | Route::Readyz | Route::Livez | Route::OpenApi | Route::Docs)
}

/// Explains a base URL with too little or too much in it, from the resulting path. OpenAI's SDKs
/// want `/v1` in it; Anthropic's add it themselves.
pub(super) fn base_url_hint(path: &str) -> Option<&'static str> {
    match path {
        "/chat/completions"
        | "/completions"
        | "/responses"
        | "/embeddings"
        | "/models"
        | "/messages"
        | "/audio/transcriptions"
        | "/audio/translations" => Some("the base URL of OpenAI's SDKs ends with /v1"),
        _ if path.starts_with("/v1/v1/") => Some("/v1 is in it twice; the base URL of Anthropic's SDKs ends before it"),
        _ => None,
    }
}

/// Turns an error in OpenAI's form into one of the Messages API.
fn to_messages_error(mut response: Response<EdgeBody>) -> Response<EdgeBody> {
    #[derive(Deserialize)]
    struct Told {
        error: Error,
    }
    #[derive(Deserialize)]
    struct Error {
        message: String,
        r#type: String,
    }
    let EdgeBody::Local(Some(body)) = response.body() else { return response };
    let Ok(Told { error }) = serde_json::from_slice(body) else { return response };
    let kind = messages_error_type(response.status(), &error.r#type);
    let told = serde_json::json!({"type": "error", "error": {"type": kind, "message": error.message}});
    *response.body_mut() = EdgeBody::Local(Some(told.to_string().into()));
    response
}

/// Removes the engine's host, which the client cannot reach, from a redirect. Engines redirect a
/// path with an extra slash.
pub(super) fn make_location_relative(headers: &mut HeaderMap) {
    let path = |location: &HeaderValue| {
        let uri: http::Uri = location.to_str().ok()?.parse().ok()?;
        uri.authority()?;
        HeaderValue::from_str(uri.path_and_query()?.as_str()).ok()
    };
    if let Some(path) = headers.get(header::LOCATION).and_then(path) {
        headers.insert(header::LOCATION, path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(path: &str, headers: &[(&'static str, &'static str)]) -> Request<()> {
        let mut request = Request::builder().uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap()
    }

    fn text(response: &Response<EdgeBody>) -> &str {
        let EdgeBody::Local(Some(body)) = response.body() else { panic!("{response:?}") };
        std::str::from_utf8(body).unwrap()
    }

    #[test]
    fn a_local_error_has_its_clients_dialect_and_id() {
        let error = || super::super::reply::too_many_requests("full", 3);
        let openai = LocalReplyContext::from_request(&asked("/v1/chat/completions", &[("x-request-id", "r")])).add_common_headers(error());
        assert_eq!(text(&openai), r#"{"error":{"message":"full","type":"RateLimitError","param":null,"code":429}}"#);
        assert_eq!((&openai.headers()["x-request-id"], &openai.headers()["retry-after"]), (&"r".parse().unwrap(), &"3".parse().unwrap()));
        let anthropic = LocalReplyContext::from_request(&asked("/v1/messages/count_tokens", &[])).add_common_headers(error());
        assert_eq!(text(&anthropic), r#"{"type":"error","error":{"type":"rate_limit_error","message":"full"}}"#);
    }

    #[test]
    fn a_local_route_allows_only_its_methods() {
        let response = not_proxied_reply("/health");
        assert_eq!((response.status(), &response.headers()["allow"]), (StatusCode::METHOD_NOT_ALLOWED, &"GET".parse().unwrap()));
        assert_eq!(not_proxied_reply("/nothing").status(), StatusCode::NOT_FOUND);
    }

    #[test]
    fn a_wrong_sdk_base_url_is_recognized() {
        for (path, words) in [
            ("/chat/completions", "/chat/completions is not found: the base URL of OpenAI's SDKs ends with /v1"),
            ("/v1/v1/messages", "the base URL of Anthropic's SDKs ends before it"),
            ("/nothing", r#"{"detail":"Not Found"}"#),
        ] {
            let response = not_proxied_reply(path);
            assert_eq!(response.status(), StatusCode::NOT_FOUND);
            assert!(text(&response).contains(words), "{}", text(&response));
        }
    }

    #[test]
    fn a_redirect_names_no_host() {
        for (location, relative_to) in
            [("http://engine/v1/models?a=b", "/v1/models?a=b"), ("/v1/models", "/v1/models"), ("\u{7f}", "\u{7f}")]
        {
            let Ok(value) = HeaderValue::from_str(location) else { continue };
            let mut headers = HeaderMap::from_iter([(header::LOCATION, value)]);
            make_location_relative(&mut headers);
            assert_eq!(headers[header::LOCATION], relative_to);
        }
    }
}
