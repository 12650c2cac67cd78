//! Tokens recently released for each tenant.
//!
//! The tenant with the fewest of them for its weight goes first.

use rustc_hash::FxHashMap;

/// Time after which released tokens count for 1/e.
const DECAY_SECONDS: f64 = 30.0;

/// How often tenants with less than a token left are removed, so that only those of the last few
/// minutes are kept.
const SWEEP_INTERVAL_SECONDS: f64 = 60.0;

/// Tokens released for each tenant.
///
/// They are kept as of one moment, and later tokens are scaled up instead, so that comparisons need
/// no decay.
#[derive(Debug, Default)]
pub(super) struct ReleasedTokens {
    reference_time: f64,
    by_tenant: FxHashMap<u64, f64>,
}

impl ReleasedTokens {
    pub(super) fn add(&mut self, tenant: u64, tokens: f64, now: f64) {
        self.sweep(now);
        *self.by_tenant.entry(tenant).or_default() += tokens / self.decay(now);
    }

    /// Tokens released for a tenant, decayed to `now`.
    pub(super) fn of_tenant(&self, tenant: u64, now: f64) -> f64 {
        self.by_tenant.get(&tenant).map_or(0.0, |tokens| tokens * self.decay(now))
    }

    fn decay(&self, now: f64) -> f64 {
        let age = now - self.reference_time;
        // Beyond a few sweeps, or at a time that is not a number, nothing is added.
        if age > 0.0 { (-age.min(10.0 * SWEEP_INTERVAL_SECONDS) / DECAY_SECONDS).exp() } else { 1.0 }
    }

    /// Rebases all counts to this moment if the last rebase is long ago.
    pub(super) fn sweep(&mut self, now: f64) {
        if now.is_finite() && now - self.reference_time > SWEEP_INTERVAL_SECONDS {
            let factor = self.decay(now);
            self.reference_time = now;
            self.by_tenant.retain(|_, tokens| {
                *tokens *= factor;
                *tokens >= 1.0
            });
        }
    }

    #[cfg(test)]
    pub(super) fn tenants(&self) -> usize {
        self.by_tenant.len()
    }
}
