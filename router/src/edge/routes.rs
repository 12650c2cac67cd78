//! Checks, routes, reads, submits and answers a request.

use std::sync::Arc;

use super::api_docs;
use super::awaited_answer::{Awaited, held_reply};
use super::batch_routes::is_batch_route;
use super::chat_fallback::ChatFallback;
use super::framing::FramingFlaw;
use super::head_checks::check_head;
use super::local_replies;
use super::ollama;
use super::reply::{self, EdgeBody};
use crate::access_log::AccessEntry;
use crate::dispatch::{Answer, Refusal};
use crate::inbound::{Edge, Explanation, InboundRequest, PageAccess, Prepared, Rejection, allow_preflight, headers, is_preflight};
use crate::keys::{self, Caller, Unauthenticated};
use crate::outcome::RefusalReason;
use hostler_api::{Route, ServedBy};
use http::{Method, Request, Response, StatusCode};
use http_body::Body as _;
use hyper::body::Incoming;
use percent_encoding::percent_decode_str;

impl Edge {
    /// Answers one request. `flaw` is the flaw of its framing, if any. The request is boxed because
    /// each future on its way would otherwise have room for it twice.
    pub(super) async fn answer(self: Arc<Self>, mut request: Box<Request<Incoming>>, flaw: Option<FramingFlaw>) -> Response<EdgeBody> {
        let path = request.uri().path();
        // Load balancers ask every few seconds.
        let trace = if local_replies::is_public(path) { None } else { self.traces.begin(request.headers()) };
        let entry = self.access_log.start_entry(request.method(), request.uri().path_and_query(), request.headers(), trace);
        keys::mark_sensitive(request.headers_mut());
        let page = self.allowed_origins.check(request.headers());
        let is_ollamas = ollama::is_ollama_path(request.uri().path());
        let wanted = local_replies::LocalReplyContext::from_request(&request);
        let response = wanted.add_common_headers(self.check_and_route(request, flaw, &entry).await);
        let mut response = if is_ollamas { ollama::translate_error(response) } else { response };
        page.mark(response.headers_mut());
        if let Some(id) = entry.request_id().filter(|_| !response.headers().contains_key(headers::ID_HEADER)) {
            headers::add_id(response.headers_mut(), id);
        }
        entry.set_status(response.status().as_u16(), response.body().size_hint().exact());
        response
    }

    async fn check_and_route(
        self: Arc<Self>,
        request: Box<Request<Incoming>>,
        flaw: Option<FramingFlaw>,
        entry: &AccessEntry,
    ) -> Response<EdgeBody> {
        if let Err(message) = flaw.map_or_else(|| check_head(&request), |flaw| Err(flaw.message())) {
            self.dispatch.metrics.count_refusal(RefusalReason::Request);
            entry.record_refusal("malformed");
            return reply::refuse_unread(request, reply::bad_request(message)).await;
        }
        // Browsers send no key with a preflight.
        if is_preflight(request.method(), request.headers())
            && let access = self.allowed_origins.check(request.headers())
            && access != PageAccess::Unasked
        {
            return self.answer_preflight(request, &access, entry).await;
        }
        if super::grpc::is_grpc(request.headers()) {
            // Boxed: the futures of gRPC and Ollama are larger than a proxied request's, and every
            // request would reserve room for them.
            return Box::pin(self.answer_grpc(request, entry)).await;
        }
        let caller = match self.keys.authenticate(request.headers()) {
            Ok(caller) => caller,
            Err(_) if local_replies::is_public(request.uri().path()) => return self.answer_public(Route::of(request.uri().path())),
            Err(error) => {
                self.dispatch.metrics.count_refusal(if error == Unauthenticated::Missing {
                    RefusalReason::NoKey
                } else {
                    RefusalReason::WrongKey
                });
                entry.record_refusal("unauthenticated");
                return reply::refuse_unread(request, reply::unauthenticated(&error)).await;
            }
        };
        entry.set_caller(&caller);
        let mut response = self.route(request, &caller, entry).await;
        if let Some(rates) = self.admission.rate_limits(&caller) {
            rates.write_headers(response.headers_mut());
        }
        response
    }

    /// Tells a browser what a page may send, if anything.
    async fn answer_preflight(&self, request: Box<Request<Incoming>>, access: &PageAccess, entry: &AccessEntry) -> Response<EdgeBody> {
        if *access == PageAccess::Denied {
            self.dispatch.metrics.count_refusal(RefusalReason::Request);
            entry.record_refusal("origin");
            let message = "pages of this origin may not use this: whoever runs the router lists those that may in router.allowed_origins";
            return reply::refuse_unread(request, reply::error(StatusCode::FORBIDDEN, "PermissionDeniedError", message)).await;
        }
        let mut response = Response::new(EdgeBody::Local(None));
        *response.status_mut() = StatusCode::NO_CONTENT;
        allow_preflight(request.headers(), response.headers_mut());
        response
    }

    /// Dispatches the request of a known caller by its method and path.
    async fn route(self: &Arc<Self>, request: Box<Request<Incoming>>, caller: &Caller, entry: &AccessEntry) -> Response<EdgeBody> {
        let path = request.uri().path();
        let route = Route::of(path);
        match (request.method(), route) {
            (&Method::GET, Route::Models) => self.list_models(caller),
            (&Method::GET, Route::Model) => {
                let id = &path[Route::Models.path().len() + 1..];
                self.show_model(caller, &percent_decode_str(id).decode_utf8_lossy(), entry)
            }
            (&Method::GET, _) if local_replies::is_public(path) => self.answer_public(route),
            (&Method::POST, Route::Ping) => self.answer_public(route),
            (&Method::GET, Route::Load) => self.report_load(),
            _ if is_batch_route(route) => Box::pin(self.answer_batch_api(route, request, caller, entry)).await,
            _ if route.served_by() == ServedBy::Operators => reply::operators_only(),
            _ if ollama::is_ollama_path(path) => Box::pin(self.answer_ollama(request, caller, entry)).await,
            _ if is_proxied(path) => self.proxy(request, caller, entry).await,
            _ => {
                self.dispatch.metrics.count_refusal(RefusalReason::NoRoute);
                let refused = local_replies::not_proxied_reply(path);
                reply::refuse_unread(request, refused).await
            }
        }
    }

    /// The models of the whole fleet that this caller may use, as engines describe them.
    fn list_models(&self, caller: &Caller) -> Response<EdgeBody> {
        let view = self.dispatch.fleet.view();
        let mut list = Vec::from(br#"{"object":"list","data":["#);
        for (index, model) in view.models().into_iter().filter(|model| caller.may_use(&model.id)).enumerate() {
            list.extend_from_slice(if index > 0 { b"," } else { b"" });
            list.extend_from_slice(&model.card);
        }
        list.extend_from_slice(b"]}");
        reply::json(StatusCode::OK, list)
    }

    fn show_model(&self, caller: &Caller, id: &str, entry: &AccessEntry) -> Response<EdgeBody> {
        let view = self.dispatch.fleet.view();
        let models = view.models();
        match models.iter().find(|model| model.id == id && caller.may_use(id)) {
            Some(model) => reply::json(StatusCode::OK, model.card.clone()),
            None => self.refuse(Refusal::UnknownModel { model: id.to_owned(), known: self.known_models(caller) }, entry),
        }
    }

    /// Refuses a request for which no replica was sought.
    pub(super) fn refuse(&self, refusal: Refusal, entry: &AccessEntry) -> Response<EdgeBody> {
        let rejection = Rejection::Fleet(refusal);
        self.count_rejection(&rejection, entry);
        reply::rejection(&rejection)
    }

    /// `/livez`: 200 while the router runs. Other probes: 200 when a request could be served.
    fn answer_public(&self, route: Route) -> Response<EdgeBody> {
        if matches!(route, Route::OpenApi | Route::Docs) {
            return api_docs::answer(route, self.keys.are_required());
        }
        let serves = route == Route::Livez || self.dispatch.fleet.view().replicas.iter().any(|replica| replica.is_ready());
        let mut response = Response::new(EdgeBody::Local(None));
        *response.status_mut() = if serves { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        response
    }

    /// The requests of all routers in flight on all replicas, in the form of an engine's `/load`.
    fn report_load(&self) -> Response<EdgeBody> {
        let in_flight: u64 = self.dispatch.fleet.view().replicas.iter().map(|replica| u64::from(replica.load.in_flight)).sum();
        reply::json(StatusCode::OK, serde_json::json!({"server_load": in_flight}).to_string())
    }

    async fn proxy(self: &Arc<Self>, request: Box<Request<Incoming>>, caller: &Caller, entry: &AccessEntry) -> Response<EdgeBody> {
        match self.read_request(request, caller, entry).await {
            Ok(inbound) => self.answer_inbound(inbound, caller, entry).await,
            Err(unread) => reply::unread_body(&unread),
        }
    }

    /// Answers a request that was read, or that the router makes itself.
    pub(super) async fn answer_inbound(
        self: &Arc<Self>,
        inbound: InboundRequest,
        caller: &Caller,
        entry: &AccessEntry,
    ) -> Response<EdgeBody> {
        if let Some(route) = ChatFallback::from_request(&inbound.method, inbound.path.path())
            && self.may_lack_route(route.route()).await
        {
            return Box::pin(self.answer_on_any_route(route, inbound)).await;
        }
        let explanation = self.explanation(&inbound.headers, caller);
        let is_invocation = Route::of(inbound.path.path()) == Route::Invocations && inbound.method == Method::POST;
        let lacks_route = is_invocation && self.may_lack_route(Route::Invocations).await;
        let prepared = self
            .read_on_pool((inbound.body.len(), caller), move |edge| {
                edge.prepare(if lacks_route { inbound.unwrap_invocation()? } else { inbound })
            })
            .await;
        self.answer_prepared(prepared, caller, entry, explanation).await
    }

    /// Answers with an engine's answer.
    pub(super) async fn answer_prepared(
        self: &Arc<Self>,
        prepared: Result<Prepared, Rejection>,
        caller: &Caller,
        entry: &AccessEntry,
        explanation: Explanation,
    ) -> Response<EdgeBody> {
        let dialect = prepared.as_ref().ok().and_then(|(outgoing, _)| outgoing.awaited_stream());
        match self.await_answer(prepared, caller, entry, dialect).await {
            Awaited::Answered(answered) => {
                answered.map_or_else(|rejection| reply::rejection(&rejection), |answer| self.pass_on(answer, explanation))
            }
            Awaited::Held(stream, id) => held_reply(stream, id),
        }
    }

    /// Whether a replica of any model lacks this route.
    async fn may_lack_route(&self, route: Route) -> bool {
        // Until the first agents are here, nobody knows.
        self.dispatch.await_startup_grace(None).await;
        self.dispatch.fleet.view().may_lack_route(None, route)
    }

    /// An engine's answer as the client gets it.
    fn pass_on(&self, mut answer: Answer, explanation: Explanation) -> Response<EdgeBody> {
        let is_event_stream = answer.body.is_event_stream();
        answer.body.send_keep_alives(self.config.stream_keepalive);
        let mut response = Response::new(EdgeBody::Relay(answer.body));
        *response.status_mut() = StatusCode::from_u16(answer.head.status).unwrap_or(StatusCode::BAD_GATEWAY);
        *response.headers_mut() = headers::headers_for_client(answer.head.headers);
        if response.status().is_redirection() {
            local_replies::make_location_relative(response.headers_mut());
        }
        if is_event_stream {
            headers::disable_buffering(response.headers_mut());
        }
        headers::add_placement_headers(response.headers_mut(), &answer.decision, explanation);
        reply::add_retry_if_full(response)
    }
}

/// Whether a path is proxied: those of engines, and everything below `/v1/` and `/v2/`. The
/// engine's other paths (metrics, sleep, weight updates, profiling) are for operators. Engines
/// redirect from the same path with a slash.
fn is_proxied(path: &str) -> bool {
    let is_engines = |path: &str| {
        let route = Route::of(path);
        route.served_by() == ServedBy::Engine && !route.path().is_empty()
    };
    let is_versioned = path.starts_with("/v1/") || path.starts_with("/v2/");
    let is_redirected = |path: &str| is_engines(path) || path == "/health";
    (is_versioned && local_replies::base_url_hint(path).is_none()) || is_engines(path) || path.strip_suffix('/').is_some_and(is_redirected)
}
