//! Ways to choose a replica: Hostler's own, which is the router's very code, and those of other
//! routers.
//!
//! The latter are rewritten from their known behaviour, with their default numbers. The fleet asks
//! one of them for each run.

mod block_holders;
mod hostler;
mod load_only;
mod radix;
mod scores;

use clap::ValueEnum;

use crate::fleet::{FleetState, ReplicaReport, SimulatedFleet};
use crate::request::Request;

/// Interface of a policy for a run.
pub(crate) trait Policy {
    /// Places a new request. `None` keeps it until [`Policy::release`] releases it.
    fn place(&mut self, id: usize, request: &Request, seen: &FleetState, now: f64) -> Option<usize>;

    /// Releases a kept request that may go now, and its replica.
    ///
    /// Called after every event until it returns `None`.
    fn release(&mut self, _seen: &FleetState, _now: f64) -> Option<(usize, usize)> {
        None
    }

    /// Handles an engine's report.
    fn on_report(&mut self, _replica: usize, _report: &ReplicaReport) {}

    fn on_first_token(&mut self, _id: usize, _seen: &FleetState, _now: f64) {}

    fn on_last_token(&mut self, _id: usize, _seen: &FleetState, _now: f64) {}

    /// Handles the end of a request's replica.
    ///
    /// To most policies it looks like the end of the answer.
    fn on_cut(&mut self, id: usize, had_tokens: bool, seen: &FleetState, now: f64) {
        if !had_tokens {
            self.on_first_token(id, seen, now);
        }
        self.on_last_token(id, seen, now);
    }
}

/// Which policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum)]
pub enum PolicyName {
    /// The router's own: cost in seconds, late binding.
    Hostler,
    /// The same without late binding: every request is sent at once.
    HostlerNoQueue,
    /// One replica after another.
    RoundRobin,
    /// The fewest requests in flight.
    LeastRequest,
    /// The one with fewer requests in flight of two at random.
    PowerOfTwo,
    /// Always the same replica for a conversation.
    SessionHash,
    /// An approximate prefix tree unless the load is uneven (`SGLang`): 0.3, 64, 1.5.
    Radix,
    /// The same with narrower thresholds: 0.5, 32, 1.0001.
    RadixTight,
    /// Weighted scores of an exact prefix index, queue and KV use (llm-d).
    LlmDPrecise,
    /// Prefill blocks to compute plus blocks that decode (Dynamo).
    Dynamo,
    /// Tokens to compute over the replica's measured speed (SMG).
    ExpectedWait,
}

impl PolicyName {
    #[must_use]
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    #[must_use]
    pub fn all() -> &'static [Self] {
        Self::value_variants()
    }

    pub(crate) fn build(self, fleet: &SimulatedFleet, seed: u64) -> Box<dyn Policy> {
        let replicas = usize::from(fleet.replicas);
        let random = fastrand::Rng::with_seed(seed);
        match self {
            Self::Hostler => Box::new(hostler::HostlerPolicy::new(fleet, random, true)),
            Self::HostlerNoQueue => Box::new(hostler::HostlerPolicy::new(fleet, random, false)),
            Self::RoundRobin => Box::new(load_only::RoundRobin::default()),
            Self::LeastRequest => Box::new(load_only::LeastRequest(random)),
            Self::PowerOfTwo => Box::new(load_only::PowerOfTwo(random)),
            Self::SessionHash => Box::new(load_only::SessionHash),
            Self::Radix => Box::new(radix::Radix::new(radix::WIDE_THRESHOLDS)),
            Self::RadixTight => Box::new(radix::Radix::new(radix::TIGHT_THRESHOLDS)),
            Self::LlmDPrecise => Box::new(scores::WeightedScores::new(replicas, random)),
            Self::Dynamo => Box::new(scores::BlockCost::new(replicas, random)),
            Self::ExpectedWait => Box::new(scores::ExpectedWait::new(replicas, random)),
        }
    }
}

/// Index of the least value; at random among equals.
pub(crate) fn index_of_least(of: impl Iterator<Item = f64>, random: &mut fastrand::Rng) -> usize {
    let (mut best, mut value, mut equals) = (0, f64::INFINITY, 0);
    for (index, new) in of.enumerate() {
        if new < value {
            (best, value, equals) = (index, new, 1);
        } else if new == value {
            equals += 1;
            if random.usize(..equals) == 0 {
                best = index;
            }
        }
    }
    best
}

#[cfg(test)]
mod tests;
