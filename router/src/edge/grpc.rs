//! The entry for gRPC on the port of the other APIs, recognized by content type. All errors are
//! statuses, including those of the edge itself.

use std::sync::Arc;

use futures_util::StreamExt;
use http::header::{self, HeaderMap};
use http::{Request, Response, StatusCode, Version};
use http_body_util::{BodyStream, StreamBody};
use hyper::body::Incoming;
use tonic::body::Body;
use tonic::{Code, Status};

use super::reply::{self, EdgeBody};
use crate::access_log::AccessEntry;
use crate::grpc::{self, Service, status};
use crate::inbound::Edge;
use crate::keys::Unauthenticated;
use crate::outcome::RefusalReason;

/// The prefix of every gRPC content type.
const GRPC_CONTENT_TYPE: &str = "application/grpc";

pub(super) fn is_grpc(headers: &HeaderMap) -> bool {
    content_type(headers).starts_with(GRPC_CONTENT_TYPE)
}

fn content_type(headers: &HeaderMap) -> &str {
    headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Whether the messages are protocol buffers, the default of gRPC.
fn is_protobuf(headers: &HeaderMap) -> bool {
    let (kind, _) = content_type(headers).split_once(';').unwrap_or((content_type(headers), ""));
    matches!(kind.trim().strip_prefix(GRPC_CONTENT_TYPE), Some("" | "+proto"))
}

impl Edge {
    pub(super) async fn answer_grpc(self: &Arc<Self>, request: Box<Request<Incoming>>, entry: &AccessEntry) -> Response<EdgeBody> {
        if request.version() != Version::HTTP_2 || !is_protobuf(request.headers()) {
            self.dispatch.metrics.count_refusal(RefusalReason::Request);
            entry.record_refusal("malformed");
            let message = "gRPC is spoken here over HTTP/2 with `content-type: application/grpc`";
            return reply::close_after(reply::error(StatusCode::UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaTypeError", message));
        }
        self.answer_call(request, entry).await.unwrap_or_else(Status::into_http).map(EdgeBody::Grpc)
    }

    async fn answer_call(self: &Arc<Self>, request: Box<Request<Incoming>>, entry: &AccessEntry) -> Result<Response<Body>, Status> {
        let service = Service::of(request.uri().path());
        if service == Service::Health {
            return Ok(grpc::answer_health_check(self.clone(), *request).await);
        }
        let caller = self.keys.authenticate(request.headers()).map_err(|why| {
            self.dispatch.metrics.count_refusal(if why == Unauthenticated::Missing {
                RefusalReason::NoKey
            } else {
                RefusalReason::WrongKey
            });
            entry.record_refusal("unauthenticated");
            status::unauthenticated(&why)
        })?;
        entry.set_caller(&caller);
        if service == Service::Inference {
            let message = self.read_request(request, &caller, entry).await.map_err(|unread| {
                entry.record_refusal("unread");
                status::body_error(&unread)
            })?;
            let mut response = grpc::answer_inference(self.clone(), message).await;
            if let Some(rates) = self.admission.rate_limits(&caller) {
                rates.write_headers(response.headers_mut());
            }
            return Ok(response);
        }
        // Tools may keep such a call open, which must not delay the shutdown.
        let draining = self.shutdown.wait_drain();
        let request = request.map(|body| Body::new(StreamBody::new(BodyStream::new(body).take_until(Box::pin(draining)))));
        let response = grpc::answer_reflection(request).await;
        if Status::from_header_map(response.headers()).is_some_and(|status| status.code() == Code::Unimplemented) {
            self.dispatch.metrics.count_refusal(RefusalReason::NoRoute);
            entry.record_refusal("no_route");
        }
        Ok(response)
    }
}
