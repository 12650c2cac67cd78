//! One request: checked, routed, read, submitted, answered.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{self, HeaderMap};
use http::uri::PathAndQuery;
use http::{Method, Request, Response, StatusCode, Version};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use percent_encoding::percent_decode_str;
use tokio::time::{Instant, timeout};

use super::headers;
use super::reply::{self, EdgeBody};
use super::submit::Inquiry;
use crate::admission::Admission;
use crate::config::RouterConfig;
use crate::dispatch::{Dispatch, Refusal};
use crate::keys::{Caller, Keys};
use crate::metrics::Refused;

/// Paths of the engine that are passed on, besides everything under `/v1/` and `/v2/`. Others of its paths (metrics, sleep, weight
/// updates, profiling) are for whoever runs it.
const PASSED: [&str; 8] = ["/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank", "/version", "/invocations"];

/// What answering a request needs.
#[derive(Debug)]
pub struct Edge {
    /// The router's settings.
    pub config: RouterConfig,
    /// Who sends it?
    pub keys: Keys,
    /// May it enter?
    pub admission: Admission,
    /// Where does it go?
    pub dispatch: Dispatch,
}

impl Edge {
    /// Answers one request; `ambiguous` when its framing is.
    pub(super) async fn answer(self: Arc<Self>, request: Request<Incoming>, ambiguous: bool) -> Response<EdgeBody> {
        if let Err(message) = check_head(&request, ambiguous) {
            self.dispatch.metrics.refused(Refused::Request);
            return reply::bad_request(message);
        }
        let caller = match self.keys.authenticate(request.headers()) {
            Ok(caller) => caller,
            Err(error) => {
                self.dispatch.metrics.refused(Refused::Request);
                return reply::unauthenticated(&error);
            }
        };
        let path = request.uri().path();
        match (request.method(), path) {
            (&Method::GET, "/v1/models") => self.models(),
            (&Method::GET, path) if path.starts_with("/v1/models/") => {
                self.model(&percent_decode_str(&path["/v1/models/".len()..]).decode_utf8_lossy())
            }
            (&Method::GET, "/health") => self.health(),
            _ if is_operators(path) => reply::for_operators(),
            _ if path.starts_with("/v1/") || path.starts_with("/v2/") || PASSED.contains(&path) => self.pass(request, caller).await,
            _ => reply::no_route(),
        }
    }

    /// The models of the whole fleet, as engines describe them.
    fn models(&self) -> Response<EdgeBody> {
        let view = self.dispatch.fleet.view();
        let mut list = Vec::from(br#"{"object":"list","data":["#);
        for (index, model) in view.models().into_iter().enumerate() {
            list.extend_from_slice(if index > 0 { b"," } else { b"" });
            list.extend_from_slice(&model.card);
        }
        list.extend_from_slice(b"]}");
        reply::json(StatusCode::OK, list)
    }

    fn model(&self, id: &str) -> Response<EdgeBody> {
        let view = self.dispatch.fleet.view();
        let models = view.models();
        match models.iter().find(|model| model.id == id) {
            Some(model) => reply::json(StatusCode::OK, model.card.clone()),
            None => {
                let known = models.iter().map(|model| model.id.as_str()).collect::<Vec<_>>().join(", ");
                reply::refusal(&Refusal::UnknownModel { model: id.to_owned(), known })
            }
        }
    }

    /// For load balancers that know vLLM: 200 when a request could be served.
    fn health(&self) -> Response<EdgeBody> {
        let ready = self.dispatch.fleet.view().replicas.iter().any(crate::fleet::Replica::is_ready);
        let mut response = Response::new(EdgeBody::Own(None));
        *response.status_mut() = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        response
    }

    /// Passes a request to an engine and the engine's answer to the client.
    async fn pass(self: Arc<Self>, request: Request<Incoming>, caller: Caller) -> Response<EdgeBody> {
        let begun = Instant::now();
        let (head, body) = request.into_parts();
        let body = match self.read_body(&head.headers, body).await {
            Ok(body) => body,
            Err(response) => {
                self.dispatch.metrics.refused(Refused::Request);
                return *response;
            }
        };
        let path = head.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        let explain = head.headers.get(headers::EXPLAIN).is_some_and(|value| value == "1");
        let answer = match self.submit(Inquiry { method: head.method, path, headers: head.headers, body, caller, begun }).await {
            Ok(answer) => answer,
            Err(declined) => return reply::declined(&declined),
        };
        let mut response = Response::new(EdgeBody::Relay(Box::new(answer.body)));
        *response.status_mut() =
            u16::try_from(answer.head.status).ok().and_then(|code| StatusCode::from_u16(code).ok()).unwrap_or(StatusCode::BAD_GATEWAY);
        *response.headers_mut() = headers::incoming(answer.head.headers);
        headers::explain(response.headers_mut(), &answer.reason, explain);
        if response.status() == StatusCode::SERVICE_UNAVAILABLE { reply::retry_after(response) } else { response }
    }

    async fn read_body(&self, headers: &HeaderMap, body: Incoming) -> Result<Bytes, Box<Response<EdgeBody>>> {
        let most = self.config.max_body_bytes;
        let too_large = || {
            let message = format!("the request body is larger than the {most} bytes that router.max_body_bytes allows");
            Box::new(reply::last(reply::error(StatusCode::PAYLOAD_TOO_LARGE, "RequestTooLargeError", &message)))
        };
        let announced = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
        if announced.is_some_and(|length| length > most) {
            return Err(too_large());
        }
        match timeout(self.config.body_timeout, Limited::new(body, most).collect()).await {
            Ok(Ok(body)) => Ok(body.to_bytes()),
            Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
            Ok(Err(error)) => Err(Box::new(reply::bad_request(&format!("the request body could not be read: {error}")))),
            Err(_) => {
                let message = format!("the request body did not arrive within {} s", self.config.body_timeout.as_secs_f64());
                Err(Box::new(reply::last(reply::error(StatusCode::REQUEST_TIMEOUT, "TimeoutError", &message))))
            }
        }
    }
}

/// Routes of engines below `/v1/` that change what a replica serves. Engines undo percent encoding before they look.
fn is_operators(path: &str) -> bool {
    matches!(&*percent_decode_str(path).decode_utf8_lossy(), "/v1/load_lora_adapter" | "/v1/unload_lora_adapter")
}

/// What the HTTP library lets through although RFC 9112 has it refused.
fn check_head(request: &Request<Incoming>, ambiguous: bool) -> Result<(), &'static str> {
    if ambiguous {
        return Err("a request has either Content-Length or Transfer-Encoding, not both");
    }
    if request.version() != Version::HTTP_11 {
        return Ok(());
    }
    match request.headers().get_all(header::HOST).iter().count() {
        1 => Ok(()),
        0 => Err("an HTTP/1.1 request needs a Host header"),
        _ => Err("a request has one Host header, not several"),
    }
}
