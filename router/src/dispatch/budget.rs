//! Bounds retries to a fifth of the requests, so that a failing fleet is not buried under repeated work.

use std::sync::atomic::{AtomicI64, Ordering};

/// A retry costs this much; requests deposit a fifth of it.
const RETRY: i64 = 5;

/// Retries that a quiet router may make at once: an engine with this many requests may die without a client noticing.
const RESERVE: i64 = 256;

/// A balance of retries: each request adds a fifth of one, each retry takes one, and at most a reserve is kept.
#[derive(Debug)]
pub struct RetryBudget(AtomicI64);

impl Default for RetryBudget {
    fn default() -> Self {
        Self(AtomicI64::new(RESERVE * RETRY))
    }
}

impl RetryBudget {
    /// A request has been taken.
    pub fn deposit(&self) {
        // Racing deposits may lose one; that errs on the side of fewer retries.
        let balance = self.0.load(Ordering::Relaxed);
        if balance < RESERVE * RETRY {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether one more retry may be made; if so it is counted.
    pub fn withdraw(&self) -> bool {
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |balance| (balance >= RETRY).then_some(balance - RETRY)).is_ok()
    }
}
