//! Whether a request may enter: a bound on how many are in flight in this router.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts the requests in flight and keeps them below a bound.
#[derive(Debug, Clone)]
pub struct Admission {
    in_flight: Arc<AtomicUsize>,
    most: usize,
}

/// Proof that a request was admitted; its place is free again when it is dropped.
#[derive(Debug)]
pub struct Permit(Arc<AtomicUsize>);

impl Admission {
    /// At most `most` requests at once.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { in_flight: Arc::default(), most }
    }

    /// A permit, unless the router is full.
    #[must_use]
    pub fn admit(&self) -> Option<Permit> {
        if self.in_flight.fetch_add(1, Ordering::Relaxed) >= self.most {
            self.in_flight.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(Permit(self.in_flight.clone()))
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
        let (first, _second) = (admission.admit().unwrap(), admission.admit().unwrap());
        assert!(admission.admit().is_none());
        drop(first);
        assert!(admission.admit().is_some());
        assert_eq!(admission.in_flight(), 1);
    }
}
