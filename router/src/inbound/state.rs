//! Where a request may go that names a response which one engine keeps, and whose such a response is.

use tokio::time::Instant;

use super::edge::Edge;
use super::request::Declined;
use super::share::owner;
use crate::keys::Caller;
use crate::sticky::{Home, Known, Named, ask};

impl Edge {
    /// The only engine that can answer a request; `None` when any can, if only with its own words for a response that is not there.
    ///
    /// Where keys say who is who, a response is found only if it came through this router: nobody else knows whose it is. Without keys
    /// the replicas are asked.
    ///
    /// # Errors
    /// When it names a response that its caller does not have.
    pub(super) async fn only(&self, named: &Named, caller: &Caller) -> Result<Option<Home>, Declined> {
        let Some(id) = named.id() else { return Ok(None) };
        let view = self.dispatch.fleet.view();
        let knows_callers = !caller.key.is_empty();
        let owner = owner(caller);
        match self.sticky.find(id, owner, &view, Instant::now()) {
            Known::Here(home) => Ok(Some(home)),
            Known::Gone | Known::Unknown if knows_callers => Err(Declined::NoResponse(id.to_owned())),
            Known::Gone => Ok(None),
            Known::Unknown => {
                let home = ask(&view, id).await;
                if let Some(home) = &home {
                    self.sticky.learn(id, home.clone(), owner, Instant::now());
                }
                Ok(home)
            }
        }
    }
}
