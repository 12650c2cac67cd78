//! Finds the engine for a request that names a stored response, and checks the response's owner.

use tokio::time::Instant;

use super::edge::Edge;
use super::request::Rejection;
use crate::engine_life::EngineLife;
use crate::keys::Caller;
use crate::response_affinity::{ResponseLookup, ResponseReference, query_replicas};

impl Edge {
    /// The only engine that can answer a request; `None` if any can, if only to say that the
    /// response does not exist.
    ///
    /// With keys, a response is found only if it came through this router: nobody else knows its
    /// owner. Without keys, the replicas are asked.
    ///
    /// # Errors
    /// If the request names a response that its caller does not have.
    pub(super) async fn find_required_engine(&self, named: &ResponseReference, caller: &Caller) -> Result<Option<EngineLife>, Rejection> {
        let Some(id) = named.id() else { return Ok(None) };
        let view = self.dispatch.fleet.view();
        let knows_callers = !caller.key.is_empty();
        let owner = caller.owner();
        match self.response_affinity.look_up(id, owner, &view, Instant::now()) {
            ResponseLookup::Found(life) => Ok(Some(life)),
            ResponseLookup::Unavailable | ResponseLookup::Unknown if knows_callers => Err(Rejection::NoResponse(id.to_owned())),
            ResponseLookup::Unavailable => Ok(None),
            ResponseLookup::Unknown => {
                let life = query_replicas(&view, id).await;
                if let Some(life) = &life {
                    self.response_affinity.record(id, life.clone(), owner, Instant::now());
                }
                Ok(life)
            }
        }
    }
}
