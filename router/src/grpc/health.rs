//! `grpc.health.v1`: whether a request could be served now, for load balancers and orchestrators, which have no keys.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, stream};
use hostler_proto::inference::v1::inference_server::SERVICE_NAME;
use tokio::time::sleep;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use crate::edge::Edge;

/// How often the fleet is looked at for whoever watches it.
const LOOK: Duration = Duration::from_millis(200);

/// See the module.
#[derive(Debug, Clone)]
pub(super) struct Health(pub(super) Arc<Edge>);

impl Health {
    /// Whether `service` serves: the whole, which has no name, or the one service that there is.
    fn status(&self, service: &str) -> ServingStatus {
        if !matches!(service, "" | SERVICE_NAME) {
            return ServingStatus::ServiceUnknown;
        }
        let edge = &self.0;
        let serves = !edge.shutdown.is_draining() && edge.dispatch.fleet.view().replicas.iter().any(|replica| replica.is_ready());
        if serves { ServingStatus::Serving } else { ServingStatus::NotServing }
    }
}

fn response(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

#[tonic::async_trait]
impl health_server::Health for Health {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        let service = request.into_inner().service;
        match self.status(&service) {
            ServingStatus::ServiceUnknown => Err(Status::not_found(format!("no service is called {service:?}; there is {SERVICE_NAME}"))),
            status => Ok(Response::new(response(status))),
        }
    }

    /// Tells each change. It ends soon after drain has begun: a connection that is watched for ever would keep the router from leaving.
    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (health, service) = (self.clone(), request.into_inner().service);
        let changes = stream::unfold(None, move |told| {
            let (health, service) = (health.clone(), service.clone());
            async move {
                loop {
                    let status = health.status(&service);
                    if told != Some(status) {
                        return Some((Ok(response(status)), Some(status)));
                    }
                    if health.0.shutdown.is_draining() {
                        return None;
                    }
                    sleep(LOOK).await;
                }
            }
        });
        Ok(Response::new(Box::pin(changes)))
    }
}
