//! One request: checked, read, peeked at, admitted, dispatched.

use std::sync::Arc;

use bytes::Bytes;
use hostler_proto::agent::v1::RequestHead;
use http::header::{self, HeaderMap};
use http::{Method, Request, Response, StatusCode, Version};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use percent_encoding::percent_decode_str;
use tokio::time::{Instant, timeout};

use super::headers;
use super::peek::{Peek, peek};
use super::reply::{self, EdgeBody};
use crate::admission::Admission;
use crate::config::RouterConfig;
use crate::dispatch::{Dialect, Dispatch, Outgoing, Refusal};
use crate::metrics::Refused;
use crate::placement::Asked;

/// Paths of the engine that are passed on, besides everything under `/v1/` and `/v2/`. Others of its paths (metrics, sleep, weight
/// updates, profiling) are for whoever runs it.
const PASSED: [&str; 8] = ["/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank", "/version", "/invocations"];

/// What answering a request needs.
#[derive(Debug)]
pub struct Edge {
    /// The router's settings.
    pub config: RouterConfig,
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
        let path = request.uri().path();
        match (request.method(), path) {
            (&Method::GET, "/v1/models") => self.models(),
            (&Method::GET, path) if path.starts_with("/v1/models/") => {
                self.model(&percent_decode_str(&path["/v1/models/".len()..]).decode_utf8_lossy())
            }
            (&Method::GET, "/health") => self.health(),
            _ if is_operators(path) => reply::for_operators(),
            _ if path.starts_with("/v1/") || path.starts_with("/v2/") || PASSED.contains(&path) => self.pass(request).await,
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
    async fn pass(self: Arc<Self>, request: Request<Incoming>) -> Response<EdgeBody> {
        let begun = Instant::now();
        let Some(permit) = self.admission.admit() else {
            self.dispatch.metrics.refused(Refused::Full);
            let message = format!("{} requests are in flight here, the most that router.max_in_flight allows", self.config.max_in_flight);
            return reply::retry_after(reply::error(StatusCode::TOO_MANY_REQUESTS, "RateLimitError", &message));
        };
        let (head, body) = request.into_parts();
        let body = match self.read_body(&head.headers, body).await {
            Ok(body) => body,
            Err(response) => return self.refuse(*response),
        };
        let peek = match peeked(&head.headers, &body) {
            Ok(peek) => peek,
            Err(message) => return self.refuse(reply::error(StatusCode::BAD_REQUEST, "BadRequestError", &message)),
        };
        let explain = head.headers.get(headers::EXPLAIN).is_some_and(|value| value == "1");
        let outgoing = Outgoing {
            id: fastrand::u64(1..),
            priority: headers::priority(&head.headers).or(peek.priority).unwrap_or(0),
            tenant: headers::tenant(&head.headers, peek.user.as_deref()),
            client_id: headers::client_id(&head.headers),
            asked: Asked {
                model: peek.model.filter(|model| !model.is_empty()),
                path: head.uri.path().to_owned(),
                text: if computes_nothing(head.uri.path()) {
                    Vec::new()
                } else {
                    peek.text.into_iter().map(|text| body.slice_ref(text.as_bytes())).collect()
                },
                salt: peek.salt.unwrap_or_default(),
                most_output: if generates(head.uri.path()) { peek.most_output } else { Some(0) },
                streams: peek.stream,
                body: body.clone(),
            },
            dialect: Dialect::of(head.uri.path()),
            head: RequestHead {
                method: head.method.as_str().to_owned(),
                path: head.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned(),
                headers: headers::outgoing(&head.headers),
                body_bytes: body.len() as u64,
                guided: peek.guided,
                ..RequestHead::default()
            },
            body,
            begun,
        };
        match self.dispatch.send(outgoing, permit).await {
            Ok(answer) => {
                let mut response = Response::new(EdgeBody::Relay(Box::new(answer.body)));
                *response.status_mut() = u16::try_from(answer.head.status)
                    .ok()
                    .and_then(|code| StatusCode::from_u16(code).ok())
                    .unwrap_or(StatusCode::BAD_GATEWAY);
                *response.headers_mut() = headers::incoming(answer.head.headers);
                headers::explain(response.headers_mut(), &answer.reason, explain);
                if response.status() == StatusCode::SERVICE_UNAVAILABLE { reply::retry_after(response) } else { response }
            }
            Err(refusal) => {
                let reason = match refusal {
                    Refusal::UnknownModel { .. } => Refused::Request,
                    Refusal::Overloaded { .. } => Refused::Full,
                    Refusal::Poisonous(_) => Refused::Poison,
                    _ => Refused::Fleet,
                };
                self.dispatch.metrics.refused(reason);
                reply::refusal(&refusal)
            }
        }
    }

    fn refuse(&self, response: Response<EdgeBody>) -> Response<EdgeBody> {
        self.dispatch.metrics.refused(Refused::Request);
        response
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

/// Routes that ask the engine for nothing that its accelerator computes.
fn computes_nothing(path: &str) -> bool {
    matches!(path, "/tokenize" | "/detokenize" | "/version")
}

/// Routes whose answers are generated, a token a step.
fn generates(path: &str) -> bool {
    matches!(path, "/v1/chat/completions" | "/v1/completions" | "/v1/responses" | "/v1/messages")
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

/// What a JSON body says of the request. Bodies of other types are for the engine alone to understand.
fn peeked<'a>(headers: &HeaderMap, body: &'a Bytes) -> Result<Peek<'a>, String> {
    let content_type = headers.get(header::CONTENT_TYPE).map_or("", |value| value.to_str().unwrap_or_default());
    if body.is_empty() || !content_type.trim_start().to_ascii_lowercase().starts_with("application/json") {
        return Ok(Peek::default());
    }
    peek(body).map_err(|error| error.to_string())
}
