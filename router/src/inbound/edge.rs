//! What all APIs of the edge share: settings, callers, memory, and the way to the fleet. Each adds what it does with it.

use bytes::Bytes;
use hostler_boot::Shutdown;
use http::header::HeaderMap;
use http_body::Body;

use super::body::{Reading, Unread, read_body};
use super::isolation::Isolation;
use super::media::MediaHosts;
use super::share::guest;
use crate::access_log::AccessLog;
use crate::admission::Admission;
use crate::bookings::Bookings;
use crate::config::RouterConfig;
use crate::dispatch::Dispatch;
use crate::health_watches::Watches;
use crate::keys::{Caller, Keys};
use crate::sticky::Sticky;

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
    /// A request's body, decompressed, within the bounds that all bodies have.
    pub(crate) async fn read_whole<B>(&self, caller: &Caller, headers: &HeaderMap, body: B) -> Result<Bytes, Unread>
    where
        B: Body<Data = Bytes> + Unpin,
        B::Error: std::fmt::Display,
    {
        read_body(&self.config, self.reading.room(guest(caller, headers, None, 0))?, headers, body).await
    }

    /// The names of the models that a caller may use, for a sentence.
    pub(crate) fn known_to(&self, caller: &Caller) -> String {
        let view = self.dispatch.fleet.view();
        let known = view.models().into_iter().map(|model| model.id.as_str()).filter(|model| caller.may_use(model));
        known.collect::<Vec<_>>().join(", ")
    }
}
