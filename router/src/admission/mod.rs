//! Whether a request may enter: a bound on how many are in flight in this router.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::keys::Caller;

/// Counts the requests in flight and keeps them below a bound.
#[derive(Debug, Clone)]
pub struct Admission {
    in_flight: Arc<AtomicUsize>,
    most: usize,
}

/// Proof that a request was admitted; its place is free again when it is dropped.
#[derive(Debug)]
pub struct Permit(Arc<AtomicUsize>);

/// What a request is expected to use.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Estimate {
    /// Prompt tokens, by the length of its text.
    pub input: u64,
    /// Tokens of its answer, at most.
    pub output: u64,
    /// Bytes of its body.
    pub bytes: u64,
}

/// Why a request may not enter now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Limited {
    /// For the client: which limit, and what to do.
    pub message: String,
    /// Seconds after which it may try again.
    pub retry_after: u64,
}

impl Admission {
    /// At most `most` requests at once.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { in_flight: Arc::default(), most }
    }

    /// A permit, unless the router is full.
    ///
    /// # Errors
    /// When it is.
    pub fn admit(&self, _caller: &Caller, _estimate: Estimate) -> Result<Permit, Limited> {
        if self.in_flight.fetch_add(1, Ordering::Relaxed) >= self.most {
            self.in_flight.fetch_sub(1, Ordering::Relaxed);
            let message = format!("{} requests are in flight here, the most that router.max_in_flight allows", self.most);
            return Err(Limited { message, retry_after: 1 });
        }
        Ok(Permit(self.in_flight.clone()))
    }

    /// Requests in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_router_admits_again_when_a_permit_is_dropped() {
        let admission = Admission::new(2);
        let admit = || admission.admit(&Caller::anyone("".into()), Estimate::default());
        let (first, _second) = (admit().unwrap(), admit().unwrap());
        assert!(admit().is_err());
        drop(first);
        assert!(admit().is_ok());
        assert_eq!(admission.in_flight(), 1);
    }
}
