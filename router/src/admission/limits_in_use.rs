//! How much tenants have used of their limits, for operators.

use std::sync::Arc;

use super::Admission;
use super::rate_limits::{RateLimit, RateLimits};

/// The use of limits shared by a tenant's keys, or by a key without a tenant.
#[derive(Debug, PartialEq)]
pub(crate) struct LimitsInUse {
    pub(crate) name: Arc<str>,
    pub(crate) in_flight: u32,
    /// Share left of the scarcest limit, 0 to 1.
    pub(crate) share_left: f64,
}

impl Admission {
    /// The use of each active account, in any order.
    #[must_use]
    pub(crate) fn limits_in_use(&self) -> Vec<LimitsInUse> {
        let now = self.0.now();
        let accounts: Vec<_> = self.0.accounts.lock().by_owner.values().cloned().collect();
        let of_account = |open: &Arc<super::TenantAccount>| {
            let mut shared = open.account.lock();
            let in_flight = shared.account.in_flight();
            let RateLimits { requests, tokens } = shared.account.rate_limits(&open.limits, now);
            let free = |most: u32| share(most.saturating_sub(in_flight).into(), most.into());
            let rate = |limit: RateLimit| share(limit.remaining, limit.limit);
            let shares = [open.limits.in_flight.map(free), requests.map(rate), tokens.map(rate)];
            LimitsInUse { name: open.owner.name.clone(), in_flight, share_left: shares.into_iter().flatten().fold(1.0, f64::min) }
        };
        accounts.iter().map(of_account).collect()
    }
}

#[allow(clippy::cast_precision_loss, reason = "a share that people read")]
fn share(left: u64, limit: u64) -> f64 {
    left as f64 / limit.max(1) as f64
}
