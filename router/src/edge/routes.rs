//! One request: checked, routed, read, submitted, answered.

use std::sync::Arc;

use hostler_boot::Shutdown;
use http::uri::PathAndQuery;
use http::{Method, Request, Response, StatusCode};
use http_body::Body as _;
use hyper::body::Incoming;
use percent_encoding::percent_decode_str;
use tokio::time::Instant;

use super::access::{AccessLog, Entry};
use super::body::Reading;
use super::framing::Flaw;
use super::head::check_head;
use super::headers;
use super::isolation::Isolation;
use super::media::MediaHosts;
use super::ollama;
use super::own;
use super::reply::{self, EdgeBody};
use super::submit::Inquiry;
use crate::admission::Admission;
use crate::config::RouterConfig;
use crate::dispatch::{Dispatch, Refusal};
use crate::grpc::{Bookings, Watches};
use crate::keys::{self, Caller, Keys, Unauthenticated};
use crate::metrics::RefusalReason;
use crate::sticky::Sticky;

/// Paths of the engine that are passed on, besides everything under `/v1/` and `/v2/`. Others of its paths (metrics, sleep, weight
/// updates, profiling) are for whoever runs it.
const PASSED: [&str; 14] = [
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/generative_scoring",
    "/inference/v1/generate",
    "/cohere/v2/chat",
    "/cohere/v2/chat/render",
    "/version",
    "/invocations",
    // Without a slash they are the router's own; with one, engines say where to go instead.
    "/health/",
];

/// What answering a request needs.
#[derive(Debug)]
pub struct Edge {
    /// The router's settings.
    pub config: RouterConfig,
    /// Who sends it?
    pub keys: Keys,
    /// Where is it written down?
    pub access: AccessLog,
    /// What may engines fetch for it?
    pub media: MediaHosts,
    /// How is it kept apart from other tenants' requests, if it is?
    pub isolation: Option<Isolation>,
    /// May it enter?
    pub admission: Admission,
    /// Is there memory for what it sends?
    pub reading: Reading,
    /// Which engine keeps what it speaks of?
    pub sticky: Sticky,
    /// Where does it go?
    pub dispatch: Dispatch,
    /// Is there a place for who watches its health?
    pub watches: Watches,
    /// What do callers send themselves?
    pub bookings: Bookings,
    /// Does the router go on?
    pub shutdown: Shutdown,
}

impl Edge {
    /// Answers one request; `flaw` is what is wrong with its framing. The request is in a box because each future on its way would have room
    /// for it twice.
    pub(super) async fn answer(self: Arc<Self>, mut request: Box<Request<Incoming>>, flaw: Option<Flaw>) -> Response<EdgeBody> {
        let entry = self.access.begin(request.method(), request.uri().path_and_query(), request.headers());
        keys::hide(request.headers_mut());
        // For whoever reads the request, by whatever API.
        request.extensions_mut().insert(entry.clone());
        let is_ollamas = ollama::is_ours(request.uri().path());
        let wanted = own::Wanted::of(&request);
        let response = wanted.dress(self.answered(request, flaw, &entry).await);
        let response = if is_ollamas { ollama::retold(response) } else { response };
        entry.status(response.status().as_u16(), response.body().size_hint().exact());
        response
    }

    async fn answered(self: Arc<Self>, request: Box<Request<Incoming>>, flaw: Option<Flaw>, entry: &Entry) -> Response<EdgeBody> {
        if let Err(message) = flaw.map_or_else(|| check_head(&request), |flaw| Err(flaw.message())) {
            self.dispatch.metrics.count_refusal(RefusalReason::Request);
            entry.refused("malformed");
            return reply::bad_request(message);
        }
        if super::grpc::is_grpc(request.headers()) {
            // Its future is larger than that of `pass`, which would pay for it with every request; and so is that of `ollama`.
            return Box::pin(self.grpc(*request, entry)).await;
        }
        let caller = match self.keys.authenticate(request.headers()) {
            Ok(caller) => caller,
            // Load balancers have no key.
            Err(_) if matches!(request.uri().path(), "/health" | "/ping") => return self.health(),
            Err(error) => {
                self.dispatch.metrics.count_refusal(if error == Unauthenticated::Missing { RefusalReason::NoKey } else { RefusalReason::WrongKey });
                entry.refused("unauthenticated");
                return reply::unread(request.body(), reply::unauthenticated(&error));
            }
        };
        entry.caller(&caller);
        let asking = caller.clone();
        let mut response = Arc::clone(&self).routed(request, caller).await;
        if let Some(rates) = self.admission.rate_limits(&asking) {
            rates.write_headers(response.headers_mut());
        }
        response
    }

    /// Has the request of a known caller answered, by its method and path.
    async fn routed(self: Arc<Self>, request: Box<Request<Incoming>>, caller: Caller) -> Response<EdgeBody> {
        let path = request.uri().path();
        match (request.method(), path) {
            (&Method::GET, "/v1/models") => self.models(&caller),
            (&Method::GET, path) if path.starts_with("/v1/models/") && path != "/v1/models/" => {
                self.model(&caller, &percent_decode_str(&path["/v1/models/".len()..]).decode_utf8_lossy())
            }
            (&Method::GET, "/health" | "/ping") | (&Method::POST, "/ping") => self.health(),
            _ if is_operators(path) => reply::for_operators(),
            _ if ollama::is_ours(path) => Box::pin(self.ollama(*request, caller)).await,
            _ if path.starts_with("/v1/") || path.starts_with("/v2/") || is_passed(path) => self.pass(request, caller).await,
            _ => reply::unread(request.body(), own::elsewhere(path)),
        }
    }

    /// The models of the whole fleet that this caller may use, as engines describe them.
    fn models(&self, caller: &Caller) -> Response<EdgeBody> {
        let view = self.dispatch.fleet.view();
        let mut list = Vec::from(br#"{"object":"list","data":["#);
        for (index, model) in view.models().into_iter().filter(|model| caller.may_use(&model.id)).enumerate() {
            list.extend_from_slice(if index > 0 { b"," } else { b"" });
            list.extend_from_slice(&model.card);
        }
        list.extend_from_slice(b"]}");
        reply::json(StatusCode::OK, list)
    }

    fn model(&self, caller: &Caller, id: &str) -> Response<EdgeBody> {
        let view = self.dispatch.fleet.view();
        let models = view.models();
        match models.iter().find(|model| model.id == id && caller.may_use(id)) {
            Some(model) => reply::json(StatusCode::OK, model.card.clone()),
            None => reply::refusal(&Refusal::UnknownModel { model: id.to_owned(), known: self.known_to(caller) }),
        }
    }

    /// The names of the models that a caller may use, for a sentence.
    pub(super) fn known_to(&self, caller: &Caller) -> String {
        let view = self.dispatch.fleet.view();
        let known = view.models().into_iter().map(|model| model.id.as_str()).filter(|model| caller.may_use(model));
        known.collect::<Vec<_>>().join(", ")
    }

    /// For load balancers that know vLLM: 200 when a request could be served.
    fn health(&self) -> Response<EdgeBody> {
        let ready = self.dispatch.fleet.view().replicas.iter().any(|replica| replica.is_ready());
        let mut response = Response::new(EdgeBody::Own(None));
        *response.status_mut() = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        response
    }

    /// Passes a request to an engine and the engine's answer to the client.
    async fn pass(self: Arc<Self>, request: Box<Request<Incoming>>, caller: Caller) -> Response<EdgeBody> {
        let begun = Instant::now();
        let (mut head, body) = request.into_parts();
        let entry = head.extensions.remove::<Entry>().unwrap_or_default();
        let body = match self.read_body(&caller, &head.headers, body).await {
            Ok(body) => body,
            Err(response) => {
                self.dispatch.metrics.count_refusal(RefusalReason::Request);
                return *response;
            }
        };
        let path = head.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        let explain = head.headers.get(headers::EXPLAIN).is_some_and(|value| value == "1");
        let answer = match self.submit(Inquiry { method: head.method, path, headers: head.headers, body, caller, entry, begun }).await {
            Ok(answer) => answer,
            Err(declined) => return reply::declined(&declined),
        };
        let mut response = Response::new(EdgeBody::Relay(answer.body));
        *response.status_mut() =
            StatusCode::from_u16(answer.head.status).unwrap_or(StatusCode::BAD_GATEWAY);
        *response.headers_mut() = headers::incoming(answer.head.headers);
        if response.status().is_redirection() {
            own::relative(response.headers_mut());
        }
        headers::explain(response.headers_mut(), &answer.decision, explain);
        if response.status() == StatusCode::SERVICE_UNAVAILABLE { reply::retry_after(response) } else { response }
    }
}

/// Engines redirect from the same path with a slash.
fn is_passed(path: &str) -> bool {
    PASSED.contains(&path) || path.strip_suffix('/').is_some_and(|path| PASSED.contains(&path))
}

/// Routes of engines below `/v1/` that change what a replica serves.
fn is_operators(path: &str) -> bool {
    matches!(path, "/v1/load_lora_adapter" | "/v1/unload_lora_adapter")
}
