//! `grpc.health.v1`: whether a request could be served now. Load balancers and orchestrators ask
//! without keys.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, stream};
use hostler_proto::inference::v1::inference_server::SERVICE_NAME;
use tokio::time::{Instant, sleep};
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use crate::inbound::Edge;
use crate::tenant_pool::PoolShare;

/// How often the fleet's state is checked for health watchers.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The largest message of a health check: the name of a service.
pub(super) const MAX_MESSAGE_BYTES: usize = 1024;

/// How long one call lasts. A client that wants to watch longer calls again.
const MAX_WATCH_TIME: Duration = Duration::from_secs(3600);

/// Most simultaneous calls of `Watch`. A client that checks health has one for each of its
/// connections. Those without a key are together one tenant.
pub(crate) const MAX_WATCHES: usize = 1024;

#[derive(Debug, Clone)]
pub(super) struct HealthEndpoint(pub(super) Arc<Edge>);

impl HealthEndpoint {
    /// Whether `service` serves. The empty name means the whole router.
    fn status(&self, service: &str) -> ServingStatus {
        if !matches!(service, "" | SERVICE_NAME) {
            return ServingStatus::ServiceUnknown;
        }
        let edge = &self.0;
        let serves = !edge.is_closing() && edge.dispatch.fleet.view().replicas.iter().any(|replica| replica.is_ready());
        if serves { ServingStatus::Serving } else { ServingStatus::NotServing }
    }
}

/// Yields each change of what `look` returns, until that is `None` or time is up.
fn changes(look: impl FnMut() -> Option<ServingStatus>, place: PoolShare) -> impl Stream<Item = Result<HealthCheckResponse, Status>> {
    let until = Instant::now() + MAX_WATCH_TIME;
    stream::unfold((None, look, place), move |(reported, mut look, place)| async move {
        while Instant::now() < until {
            let status = look()?;
            if reported != Some(status) {
                return Some((Ok(response(status)), (Some(status), look, place)));
            }
            sleep(POLL_INTERVAL).await;
        }
        None
    })
}

fn response(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

#[tonic::async_trait]
impl health_server::Health for HealthEndpoint {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        let service = request.into_inner().service;
        match self.status(&service) {
            ServingStatus::ServiceUnknown => Err(Status::not_found(format!("no service is called {service:?}; there is {SERVICE_NAME}"))),
            status => Ok(Response::new(response(status))),
        }
    }

    /// Yields each change. The stream ends soon after the drain has begun; a watched connection
    /// would otherwise keep the router from leaving.
    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let caller = self.0.keys.authenticate(request.metadata().as_ref()).ok();
        let mut place = self.0.health_watches.share(caller.and_then(|caller| caller.tenant_hash()).unwrap_or_default(), 1.0);
        if !place.grow_to(1, MAX_WATCHES) {
            return Err(Status::resource_exhausted(format!(
                "of {MAX_WATCHES} calls of Watch, your share is open: call Check now and then, or show a key"
            )));
        }
        let (health, service) = (self.clone(), request.into_inner().service);
        // A watcher that comes during the drain learns so before the end.
        let mut is_last = false;
        let look = move || {
            let ended = std::mem::replace(&mut is_last, health.0.shutdown.is_draining());
            (!ended).then(|| health.status(&service))
        };
        Ok(Response::new(Box::pin(changes(look, place))))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use futures_util::StreamExt;

    use super::*;
    use crate::tenant_pool::TenantPool;

    #[tokio::test(start_paused = true)]
    async fn a_health_watch_sends_changes_and_ends_in_time() {
        let places = TenantPool::new(MAX_WATCHES);
        let mut place = places.share(0, 1.0);
        assert!(place.grow_to(1, MAX_WATCHES));
        let serves = Arc::new(AtomicBool::new(false));
        let look = {
            let serves = serves.clone();
            move || Some(if serves.load(Ordering::Relaxed) { ServingStatus::Serving } else { ServingStatus::NotServing })
        };
        let begun = Instant::now();
        let mut watch = Box::pin(changes(look, place));
        assert_eq!(watch.next().await.unwrap().unwrap(), response(ServingStatus::NotServing));
        serves.store(true, Ordering::Relaxed);
        assert_eq!(watch.next().await.unwrap().unwrap(), response(ServingStatus::Serving));
        assert!(watch.next().await.is_none());
        assert!(begun.elapsed() >= MAX_WATCH_TIME && begun.elapsed() < MAX_WATCH_TIME + POLL_INTERVAL);
        drop(watch);
        assert_eq!(places.taken(), 0);
    }
}
