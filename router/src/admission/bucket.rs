//! The use of a limit per minute, as a bucket that fills with use and drains evenly, a whole limit
//! per minute.
//!
//! So no more than the limit can be used at once, and on average no more than the limit per minute,
//! even if an answer used more than expected.

use serde::{Deserialize, Serialize};

/// Milliseconds of a minute. A unit of use is counted as 60,000 parts, so a limit of `n` per minute
/// drains `n` parts a millisecond.
const MINUTE_MS: u64 = 60_000;

#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(super) struct LeakyBucket {
    /// Use in parts, 60,000 to the unit.
    used_parts: u64,
    /// The time up to which the bucket has drained, in milliseconds.
    drained_until: u64,
}

impl LeakyBucket {
    /// Milliseconds until `amount` fits; 0 if it fits now. An amount above the whole limit fits
    /// when nothing else is used.
    pub(super) fn wait_ms(&mut self, limit: u64, amount: u64, now: u64) -> u64 {
        self.drain(limit, now);
        if limit == 0 {
            return MINUTE_MS;
        }
        let room = to_parts(limit).saturating_sub(to_parts(amount));
        self.used_parts.saturating_sub(room).div_ceil(limit)
    }

    pub(super) fn add(&mut self, limit: u64, amount: u64, now: u64) {
        self.drain(limit, now);
        self.used_parts = self.used_parts.saturating_add(to_parts(amount));
    }

    pub(super) fn reconcile(&mut self, limit: u64, reserved: u64, used: u64, now: u64) {
        self.drain(limit, now);
        self.used_parts =
            self.used_parts.saturating_add(to_parts(used.saturating_sub(reserved))).saturating_sub(to_parts(reserved.saturating_sub(used)));
    }

    /// The amount that may still be used at once, and the milliseconds until the whole limit is
    /// free again.
    pub(super) fn remaining(&mut self, limit: u64, now: u64) -> (u64, u64) {
        self.drain(limit, now);
        let left = to_parts(limit).saturating_sub(self.used_parts) / MINUTE_MS;
        (left, self.used_parts.checked_div(limit).map_or(MINUTE_MS, |_| self.used_parts.div_ceil(limit)))
    }

    pub(super) fn is_empty(&mut self, limit: u64, now: u64) -> bool {
        self.drain(limit, now);
        self.used_parts == 0
    }

    fn drain(&mut self, limit: u64, now: u64) {
        self.used_parts = self.used_parts.saturating_sub(limit.saturating_mul(now.saturating_sub(self.drained_until)));
        self.drained_until = self.drained_until.max(now);
    }
}

fn to_parts(amount: u64) -> u64 {
    amount.saturating_mul(MINUTE_MS)
}
