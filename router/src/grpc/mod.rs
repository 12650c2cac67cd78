//! `hostler.inference.v1.Inference`: translates typed messages to the engine's JSON and back.
//!
//! The translated requests enter the fleet like all others. Health and reflection are beside it.
//! The edge calls the functions here for gRPC requests.

mod answer;
mod deadline;
mod engine;
mod health;
mod json;
mod message_size;
mod models;
mod place;
mod reflection;
mod request;
pub(crate) mod status;
mod stream;

use std::sync::Arc;

use hostler_proto::inference::v1 as wire;
use hostler_proto::inference::v1::inference_server::{self, Inference, InferenceServer};
use http::{HeaderMap, Method, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use parking_lot::Mutex;
use tokio::time::{Instant, timeout};
use tokio_util::task::AbortOnDropHandle;
use tonic::body::Body;
use tonic::{Code, Request, Status};
use tonic_health::pb::health_server::{self, HealthServer};
use tower::ServiceExt;

use crate::access_log::AccessEntry;
use crate::dispatch::Answer;
use crate::inbound::{BodyReadError, BodyReservation, Edge, InboundRequest, Prepared, Rejection, SHORT_BODY_BYTES};
use crate::keys::Caller;
use crate::placement::PlacementDecision;
use deadline::Deadline;
pub(crate) use health::MAX_WATCHES;
use message_size::check_message_size;
use request::EngineRequest;
use stream::GenerateEvents;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Service {
    /// Health checks need no key.
    Health,
    /// Each request is one message, which is read whole first.
    Inference,
    /// Reflection, and everything unknown.
    Other,
}

/// How often the bytes of a message are held while it becomes a request. A packed token id takes at
/// least one byte, four in memory and two as JSON.
const DECODING_COPIES: usize = 6;

/// The methods of the service.
const METHODS: [&str; 6] = ["Generate", "GenerateStream", "Embed", "ListModels", "Place", "Release"];

impl Service {
    pub(crate) fn of(path: &str) -> Self {
        match path.strip_prefix('/').and_then(|path| path.split_once('/')) {
            Some((health_server::SERVICE_NAME, _)) => Self::Health,
            Some((inference_server::SERVICE_NAME, method)) if METHODS.contains(&method) => Self::Inference,
            _ => Self::Other,
        }
    }
}

/// Answers a health check. Its caller has shown no key, so its message must be small, must come
/// within the time of a head, and takes nothing of the body memory.
pub(crate) async fn answer_health_check(edge: Arc<Edge>, request: http::Request<Incoming>) -> Response<Body> {
    let limit = edge.config.header_timeout;
    let server = HealthServer::new(health::HealthEndpoint(edge)).max_decoding_message_size(health::MAX_MESSAGE_BYTES);
    match timeout(limit, server.oneshot(request)).await {
        Ok(Ok(response)) => response,
        Err(_) => {
            Status::deadline_exceeded(format!("the message of a health check did not arrive within {} s", limit.as_secs_f64())).into_http()
        }
    }
}

/// Answers reflection and unknown services.
pub(crate) async fn answer_reflection(request: http::Request<Body>) -> Response<Body> {
    let Ok(response) = reflection::REFLECTION.clone().oneshot(request).await;
    response
}

/// Answers a call whose message has been read.
pub(crate) async fn answer_inference(edge: Arc<Edge>, message: InboundRequest) -> Response<Body> {
    let InboundRequest { method, path, headers, body, mut reservation, caller, log_entry, received_at } = message;
    let message_bytes = body.len();
    if let Err(refused) = count_message(&mut reservation, &body) {
        return refused.into_http();
    }
    let mut request = http::Request::new(Body::new(Full::new(body)));
    *request.method_mut() = method;
    *request.uri_mut() = path.into();
    *request.headers_mut() = headers.clone();
    let most = edge.config.max_body_bytes;
    let deadline = Deadline::from_headers(&headers, received_at);
    let call =
        InferenceCall { edge, caller, headers, message_bytes, reservation: Mutex::new(reservation), log_entry, received_at, deadline };
    let answering = InferenceServer::new(call).max_decoding_message_size(most).oneshot(request);
    if message_bytes <= SHORT_BODY_BYTES {
        let Ok(response) = answering.await;
        return response;
    }
    // The server decodes the message in the task that polls it, which must not be the connection's.
    match AbortOnDropHandle::new(tokio::spawn(answering)).await {
        Ok(Ok(response)) => response,
        Err(_) => Status::internal("the message cannot be decoded").into_http(),
    }
}

/// Counts a message as the most that is held while it becomes a request.
fn count_message(reservation: &mut BodyReservation, message: &[u8]) -> Result<(), Status> {
    if message.len() <= SHORT_BODY_BYTES {
        return Ok(());
    }
    check_message_size(message)?;
    let counted = reservation.count_copies(DECODING_COPIES, message.len());
    counted.map_err(|full| status::body_error(&BodyReadError::MemoryFull(full)))
}

/// A call: its caller, how it came, and how long it may take.
#[derive(Debug)]
struct InferenceCall {
    edge: Arc<Edge>,
    caller: Caller,
    headers: HeaderMap,
    message_bytes: usize,
    /// The message's reservation, until a request is made of it.
    reservation: Mutex<BodyReservation>,
    log_entry: AccessEntry,
    received_at: Instant,
    deadline: Deadline,
}

impl InferenceCall {
    /// The request in the engine's form, checked and admitted.
    async fn prepare(
        &self,
        make: impl FnOnce(HeaderMap) -> Result<EngineRequest, Status> + Send + 'static,
    ) -> Result<Result<Prepared, Rejection>, Status> {
        let (headers, caller, log_entry) = (self.headers.clone(), self.caller.clone(), self.log_entry.clone());
        let (reservation, received_at) = (self.reservation.lock().take(), self.received_at);
        let read = move |edge: &Edge| {
            Ok(make(headers).map(|EngineRequest { path, headers, body }| {
                let path = http::uri::PathAndQuery::from_static(path);
                edge.prepare(InboundRequest { method: Method::POST, path, headers, body, reservation, caller, log_entry, received_at })
            }))
        };
        match self.edge.read_on_pool((self.message_bytes, &self.caller), read).await {
            Ok(made) => made,
            Err(rejection) => Ok(Err(rejection)),
        }
    }

    /// The placement as the caller may see it.
    fn placement(&self, decision: &PlacementDecision) -> wire::Placement {
        answer::placement(decision, self.edge.shows_caches_to(&self.caller))
    }

    async fn submit(&self, make: impl FnOnce(HeaderMap) -> Result<EngineRequest, Status> + Send + 'static) -> Result<Answer, Status> {
        let prepared = self.prepare(make).await?;
        let answer = self.edge.send(prepared, &self.caller, &self.log_entry).await.map_err(|rejection| status::rejection(&rejection))?;
        if answer.head.status != 200 {
            self.log_entry.record_refusal("engine");
        }
        Ok(answer)
    }

    async fn with_deadline<T>(&self, future: impl Future<Output = Result<T, Status>>) -> Result<tonic::Response<T>, Status> {
        let kept = self.deadline.apply(future).await;
        kept.map(tonic::Response::new).inspect_err(|status| {
            if status.code() == Code::DeadlineExceeded {
                self.log_entry.record_refusal("deadline");
            }
        })
    }
}

#[tonic::async_trait]
impl Inference for InferenceCall {
    type GenerateStreamStream = GenerateEvents;

    async fn generate(&self, request: Request<wire::GenerateRequest>) -> Result<tonic::Response<wire::GenerateResponse>, Status> {
        let generated = async {
            let answer = self.submit(|headers| request::generate_request(request.into_inner(), headers, false)).await?;
            let placement = self.placement(&answer.decision);
            Ok(answer::generate_response(answer::parse_answer(answer).await?, placement))
        };
        self.with_deadline(generated).await
    }

    async fn generate_stream(&self, request: Request<wire::GenerateRequest>) -> Result<tonic::Response<GenerateEvents>, Status> {
        let begun = async {
            let mut answer = self.submit(|headers| request::generate_request(request.into_inner(), headers, true)).await?;
            if answer.head.status == 200 {
                let placement = self.placement(&answer.decision);
                return Ok(GenerateEvents::new(answer.body, placement, self.deadline, self.log_entry.clone()));
            }
            let body = answer::read_body(&mut answer.body).await?;
            Err(status::engine_refusal(answer.head.status, &answer.head.headers, &body))
        };
        self.with_deadline(begun).await
    }

    async fn embed(&self, request: Request<wire::EmbedRequest>) -> Result<tonic::Response<wire::EmbedResponse>, Status> {
        let embedded = async {
            let answer = self.submit(|headers| request::embed_request(request.into_inner(), headers)).await?;
            let placement = self.placement(&answer.decision);
            Ok(answer::embed_response(answer::parse_answer(answer).await?, placement))
        };
        self.with_deadline(embedded).await
    }

    async fn list_models(&self, _: Request<wire::ListModelsRequest>) -> Result<tonic::Response<wire::ListModelsResponse>, Status> {
        let models = models::list(&self.edge.dispatch.fleet.view(), &self.caller);
        Ok(tonic::Response::new(wire::ListModelsResponse { models }))
    }

    async fn place(&self, request: Request<wire::PlaceRequest>) -> Result<tonic::Response<wire::PlaceResponse>, Status> {
        let mut place_request = request.into_inner();
        let generation =
            place_request.request.take().ok_or_else(|| status::invalid_field("request", "say which request is to be placed"))?;
        let lasts = place::booking_time(place_request.hold.as_ref())?;
        let placed = async {
            let prepared = self.prepare(|headers| request::generate_request(generation, headers, false)).await?;
            let reserved = self.edge.reserve(prepared, &self.caller, &self.log_entry).await;
            let (reserved, permit) = reserved.map_err(|rejection| status::rejection(&rejection))?;
            let placement = self.placement(&reserved.decision);
            let tells = place_request.candidates && self.edge.shows_caches_to(&self.caller);
            Ok(place::place_response(reserved, permit, &self.edge.bookings, &self.caller, (placement, lasts, tells)))
        };
        self.with_deadline(placed).await
    }

    async fn release(&self, request: Request<wire::ReleaseRequest>) -> Result<tonic::Response<wire::ReleaseResponse>, Status> {
        place::release(&self.edge.bookings, &self.caller, &request.into_inner().booking)?;
        Ok(tonic::Response::new(wire::ReleaseResponse {}))
    }
}

#[cfg(test)]
mod tests {
    use hostler_proto::inference::v1::DESCRIPTORS;
    use prost::Message;
    use prost_types::FileDescriptorSet;

    use super::*;

    #[test]
    fn the_services_methods_match_the_contract() {
        let files = FileDescriptorSet::decode(DESCRIPTORS).unwrap().file;
        let services = files.iter().filter(|file| file.package() == "hostler.inference.v1").flat_map(|file| &file.service);
        let methods: Vec<&str> = services.flat_map(|service| &service.method).map(|method| method.name()).collect();
        assert_eq!(methods, METHODS);
        let path = |method: &str| format!("/hostler.inference.v1.Inference/{method}");
        assert!(METHODS.iter().all(|method| Service::of(&path(method)) == Service::Inference));
        assert_eq!(Service::of(&path("Nothing")), Service::Other);
    }
}
