//! Gate for noise in learned speeds, which must not gather load.
//!
//! Equal replicas whose speeds vary learn different ones while they are overloaded. Under light
//! load afterwards, none may get more than twice its share.

use super::GateResult;
use crate::fleet::SimulatedFleet;
use crate::policy::PolicyName;
use crate::random::{Random, whole};
use crate::run;
use crate::workload::{Workload, unrelated};

/// How much the speed of a replica varies.
const NOISE: f64 = 0.1;

/// Seconds of overload, and from its beginning to the light load.
///
/// By then everything before has long been answered.
const OVERLOAD_SECONDS: f64 = 10.0;
const LIGHT_LOAD_BEGINS: f64 = 120.0;

/// Requests a second and replica: about twice its capacity.
const OVERLOAD_RATE: f64 = 6.0;

/// Mean tokens of prompts and answers.
const OVERLOAD_TOKENS: (f64, f64) = (2500.0, 200.0);

/// Equal replicas after an overload.
#[derive(Debug, Clone, Copy)]
pub(super) struct EvenLoad {
    name: &'static str,
    replicas: u16,
    policy: PolicyName,
    /// Requests of the light load, and how many come a second.
    requests: usize,
    rate: f64,
    /// Mean tokens of their prompts and answers.
    tokens: (f64, f64),
    seeds: u64,
}

/// Fleets: a few streams that stay, and many short ones on a large fleet that is nearly idle.
///
/// The second leaves the queue out: while requests wait, it examines each replica after each step
/// of any.
pub(super) const FLEETS: [EvenLoad; 2] = [
    EvenLoad {
        name: "20 streams on 12 replicas",
        replicas: 12,
        policy: PolicyName::Hostler,
        requests: 20,
        rate: 2.0,
        tokens: (200.0, 1500.0),
        seeds: 10,
    },
    EvenLoad {
        name: "light load on 1,000 replicas",
        replicas: 1_000,
        policy: PolicyName::HostlerNoQueue,
        requests: 30_000,
        rate: 300.0,
        tokens: (400.0, 50.0),
        seeds: 1,
    },
];

impl EvenLoad {
    /// Requests of the light load that the busiest replica got, for each seed.
    pub(super) fn counts(&self) -> Vec<usize> {
        (1..=self.seeds).map(|seed| self.count(seed)).collect()
    }

    fn count(&self, seed: u64) -> usize {
        let fleet = SimulatedFleet { replicas: self.replicas, noise: NOISE, ..SimulatedFleet::default() };
        let mut random = Random::new(seed);
        let rate = OVERLOAD_RATE * f64::from(self.replicas);
        let before = whole(rate * OVERLOAD_SECONDS) as usize;
        let mut arrivals = unrelated(&mut random, 0..before, 0.0, rate, OVERLOAD_TOKENS);
        arrivals.extend(unrelated(&mut random, before..before + self.requests, LIGHT_LOAD_BEGINS, self.rate, self.tokens));
        let workload = Workload { name: self.name.to_owned(), arrivals };
        let run = run::run(&fleet, &workload, self.policy.build(&fleet, seed), &|| ());
        let mut counts = vec![0; usize::from(self.replicas)];
        run.records[before..].iter().for_each(|record| counts[record.replica] += 1);
        counts.into_iter().max().unwrap_or(0)
    }

    pub(super) fn judge(&self, counts: &[usize]) -> GateResult {
        let most = counts.iter().copied().max().unwrap_or(0);
        // A replica has only whole requests: of 20 on 12, up to 3 are no more than twice its share
        // of 1.7.
        let allowed = 2 * self.requests / usize::from(self.replicas);
        let share = self.requests as f64 / f64::from(self.replicas);
        let text = format!(
            "{} after an overload: at most {most} on one of {} seeds, at most {allowed} of a share of {share:.1}",
            self.name,
            counts.len()
        );
        GateResult { passed: most <= allowed, text }
    }
}

#[cfg(test)]
mod tests;
