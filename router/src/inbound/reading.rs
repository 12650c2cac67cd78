//! Reads short bodies at once and long ones on a bounded pool of threads, so that no connection
//! waits for another one's body.

use std::sync::Arc;

use super::body::SHORT_BODY_BYTES;
use super::edge::Edge;
use super::request::Rejection;
use crate::admission::LimitExceeded;
use crate::keys::Caller;
use crate::thread_pool::PoolError;

impl Edge {
    /// Runs `read` on a body of `body_bytes` bytes from `caller`.
    ///
    /// # Errors
    /// If the body is long and its caller has no room for another request, or has its share of
    /// those being read.
    pub(crate) async fn read_on_pool<T: Send + 'static>(
        self: &Arc<Self>,
        (body_bytes, caller): (usize, &Caller),
        read: impl FnOnce(&Self) -> Result<T, Rejection> + Send + 'static,
    ) -> Result<T, Rejection> {
        if body_bytes <= SHORT_BODY_BYTES {
            return read(self);
        }
        self.admission.check_room(caller)?;
        let (edge, tenant) = (self.clone(), caller.tenant_hash().unwrap_or_default());
        // Boxed: short requests should not reserve room for it.
        Box::pin(self.readers.run((tenant, body_bytes), move || read(&edge))).await.map_err(|failed| match failed {
            PoolError::Full => {
                LimitExceeded::of_router("too many long requests, all or yours, are being read here: try again soon".to_owned()).into()
            }
            PoolError::Panicked => Rejection::Malformed("the body cannot be read".to_owned()),
        })?
    }
}
