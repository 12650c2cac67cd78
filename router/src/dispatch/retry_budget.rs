//! Limits retries to a fifth of the requests, so that repeated work does not bury a failing fleet.

use std::sync::atomic::{AtomicI64, Ordering};

use super::retry_policy::RetryPayment;
use crate::metrics::RouterMetrics;

/// A retry costs this much; each request deposits 1, a fifth of it.
const RETRY_COST: i64 = 5;

/// Retries available at once after engines have refused.
const REFUSED_RESERVE: i64 = 256;

/// Retries available at once after attempts were lost.
///
/// An engine, or a node of eight, may die with this many requests without a client noticing. The
/// reserve may exceed the one for refusals because a lost attempt leaves no work behind.
const LOST_RESERVE: i64 = 8 * 1024;

/// Balances for the two causes of a retry, kept apart: dying engines must not use up the retries
/// for full ones, nor the other way round.
#[derive(Debug)]
pub(crate) struct RetryBudgets {
    /// Attempts that an engine answered with 500 or 503.
    pub refused: RetryBudget,
    /// Attempts whose engine or node was lost, or not ready.
    pub lost: RetryBudget,
}

impl Default for RetryBudgets {
    fn default() -> Self {
        Self { refused: RetryBudget::new(REFUSED_RESERVE), lost: RetryBudget::new(LOST_RESERVE) }
    }
}

impl RetryBudgets {
    /// Pays for an attempt. If the budget cannot, the denial is counted and the client gets the
    /// previous attempt's failure.
    pub(super) fn pay(&self, payment: RetryPayment, metrics: &RouterMetrics) -> bool {
        let [lost_denied, refused_denied] = &metrics.retries_denied;
        let (budget, denied) = match payment {
            RetryPayment::Free => return true,
            RetryPayment::LostBudget => (&self.lost, lost_denied),
            RetryPayment::RefusedBudget => (&self.refused, refused_denied),
        };
        let is_paid = budget.withdraw();
        if !is_paid {
            denied.inc();
        }
        is_paid
    }

    pub(crate) fn deposit(&self) {
        self.refused.deposit();
        self.lost.deposit();
    }
}

/// A balance of retries: each request adds a fifth of a retry, each retry takes one, up to a
/// reserve.
#[derive(Debug)]
pub(crate) struct RetryBudget {
    balance: AtomicI64,
    reserve: i64,
}

impl RetryBudget {
    /// Starts with a full balance.
    #[must_use]
    pub(crate) fn new(reserve: i64) -> Self {
        Self { balance: AtomicI64::new(reserve * RETRY_COST), reserve }
    }

    pub(crate) fn deposit(&self) {
        // Racing deposits may lose one, which errs on the side of fewer retries.
        if self.balance.load(Ordering::Relaxed) < self.reserve * RETRY_COST {
            self.balance.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Pays for one retry; `false` if the balance does not allow it.
    pub(crate) fn withdraw(&self) -> bool {
        let less = |balance| (balance >= RETRY_COST).then_some(balance - RETRY_COST);
        self.balance.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}
