//! What all APIs of the edge share: settings, callers, memory, and the way to the fleet. Each adds what it does with it.

use bytes::Bytes;
use hostler_boot::Shutdown;
use http::header::HeaderMap;
use http_body::Body;

use super::allowed_origins::AllowedOrigins;
use super::body::{BodyMemory, BodyReadError, BodyReservation, read_body};
use super::isolation::Isolation;
use super::media::MediaHosts;
use super::share::queue_share;
use crate::access_log::AccessLog;
use crate::admission::Admission;
use crate::bookings::Bookings;
use crate::config::RouterConfig;
use crate::dispatch::Dispatch;
use crate::health_watches::HealthWatchPermits;
use crate::keys::{Caller, Keys};
use crate::response_affinity::ResponseAffinity;

#[derive(Debug)]
pub(crate) struct Edge {
    pub config: RouterConfig,
    pub keys: Keys,
    pub access_log: AccessLog,
    /// Which web pages may send it?
    pub allowed_origins: AllowedOrigins,
    pub media_hosts: MediaHosts,
    pub isolation: Option<Isolation>,
    pub admission: Admission,
    pub body_memory: BodyMemory,
    pub response_affinity: ResponseAffinity,
    pub dispatch: Dispatch,
    pub health_watches: HealthWatchPermits,
    pub bookings: Bookings,
    pub shutdown: Shutdown,
}

impl Edge {
    /// Reads and decompresses a request's body within the bounds of all bodies; returns it with its
    /// memory reservation.
    pub(crate) async fn read_body_bytes<B>(
        &self,
        caller: &Caller,
        headers: &HeaderMap,
        body: B,
    ) -> Result<(Bytes, BodyReservation), BodyReadError>
    where
        B: Body<Data = Bytes> + Unpin,
        B::Error: std::fmt::Display,
    {
        let mut reservation = self.body_memory.reserve(queue_share(caller, headers, None, 0))?;
        let body = read_body(&self.config, &mut reservation, headers, body).await?;
        Ok((body, reservation))
    }

    /// The names of the models that a caller may use, for an error message.
    pub(crate) fn known_models(&self, caller: &Caller) -> String {
        let view = self.dispatch.fleet.view();
        let known = view.models().into_iter().map(|model| model.id.as_str()).filter(|model| caller.may_use(model));
        known.collect::<Vec<_>>().join(", ")
    }
}
