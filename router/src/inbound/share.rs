//! Whom a request is counted with: who waits and has memory together.

use http::HeaderMap;

use super::headers;
use crate::keys::Caller;
use crate::placement::QueueShare;

/// Whom the request shares the queue with, and how many `bytes` it takes. Without keys a client may
/// name its `user`.
pub(super) fn queue_share(caller: &Caller, headers: &HeaderMap, user: Option<&str>, bytes: usize) -> QueueShare {
    let tenant = caller.tenant_hash().unwrap_or_else(|| headers::tenant_hash(headers, user));
    QueueShare { tenant, weight: caller.limits.weight.unwrap_or(1.0), bytes: bytes as u64 }
}
