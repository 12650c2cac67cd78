//! Policies that use only counts, or nothing.

use super::{Policy, index_of_least};
use crate::fleet::FleetState;
use crate::request::Request;

/// Replicas one after another.
#[derive(Debug, Default)]
pub(super) struct RoundRobin(usize);

impl Policy for RoundRobin {
    fn place(&mut self, _id: usize, _request: &Request, seen: &FleetState, _now: f64) -> Option<usize> {
        self.0 = (self.0 + 1) % seen.in_flight.len();
        Some(self.0)
    }
}

/// Replica with the fewest requests in flight.
#[derive(Debug)]
pub(super) struct LeastRequest(pub(super) fastrand::Rng);

impl Policy for LeastRequest {
    fn place(&mut self, _id: usize, _request: &Request, seen: &FleetState, _now: f64) -> Option<usize> {
        Some(index_of_least(seen.in_flight.iter().map(|count| f64::from(*count)), &mut self.0))
    }
}

/// Better one of two replicas.
#[derive(Debug)]
pub(super) struct PowerOfTwo(pub(super) fastrand::Rng);

impl Policy for PowerOfTwo {
    fn place(&mut self, _id: usize, _request: &Request, seen: &FleetState, _now: f64) -> Option<usize> {
        let count = seen.in_flight.len();
        let one = self.0.usize(..count);
        let other = if count > 1 { (one + self.0.usize(1..count)) % count } else { one };
        Some(if seen.in_flight[other] < seen.in_flight[one] { other } else { one })
    }
}

/// Fixed replica for each conversation, by rendezvous hashing.
#[derive(Debug)]
pub(super) struct SessionHash;

impl Policy for SessionHash {
    fn place(&mut self, _id: usize, request: &Request, seen: &FleetState, _now: f64) -> Option<usize> {
        let weight =
            |replica: &usize| fastrand::Rng::with_seed(request.session.wrapping_mul(0x9e37_79b9) ^ ((*replica as u64) << 40)).u64(..);
        (0..seen.in_flight.len()).max_by_key(weight)
    }
}
