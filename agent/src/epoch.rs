//! Numbers of an engine's lives.

use std::time::{SystemTime, UNIX_EPOCH};

/// Number of the life after `last`: microseconds since 1970, so that another agent's are lower, and
/// higher than `last` even if the clock was set back.
pub(crate) fn next_epoch(last: u64) -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_micros()).unwrap_or(u64::MAX).max(last + 1)
}
