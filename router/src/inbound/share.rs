//! The tenant that a request counts for, with whose other requests it shares the queue and memory.

use http::HeaderMap;

use super::headers;
use crate::keys::Caller;
use crate::placement::QueueShare;

/// The caller's share of what tenants share, with nothing taken yet.
pub(crate) fn owner_share(caller: &Caller) -> QueueShare {
    QueueShare { tenant: caller.tenant_hash().unwrap_or_default(), weight: caller.weight(), bytes: 0 }
}

/// The sharers of the request's queue, and how many `bytes` it takes. Without keys a client may
/// name its `user`.
pub(super) fn queue_share(caller: &Caller, headers: &HeaderMap, user: Option<&str>, bytes: usize) -> QueueShare {
    let tenant = caller.tenant_hash().unwrap_or_else(|| headers::tenant_hash(headers, user));
    QueueShare { tenant, weight: caller.weight(), bytes: bytes as u64 }
}
