//! How soon streams have lately begun, by replica and in all, from the decisions that the router
//! remembers. Computed when operators ask, so that no request pays for it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use hostler_proto::fleet::v1::FirstTokens;
use rustc_hash::FxHashMap;

use super::count;
use crate::history::{first_token_quantiles, nearest_rank};
use crate::placement::PlacementDecision;

/// Oldest decisions that count. Older ones say nothing about the present.
const MAX_AGE: Duration = Duration::from_secs(300);

/// Oldest decisions that count for the wait before them.
const QUEUE_AGE: Duration = Duration::from_secs(60);

/// Seconds until first tokens.
#[derive(Debug, Default)]
pub(super) struct FirstTokenTimes {
    by_replica: FxHashMap<String, Vec<f64>>,
}

impl FirstTokenTimes {
    pub(super) fn gather(decisions: &[Arc<PlacementDecision>], now: SystemTime) -> Self {
        let mut times = Self::default();
        for decision in recent(decisions, now, MAX_AGE) {
            let came = decision.outcome.lock().first_token_seconds;
            if let Some(seconds) = came {
                times.add(decision.choice().0, seconds);
            }
        }
        times
    }

    fn add(&mut self, replica: &str, seconds: f64) {
        match self.by_replica.get_mut(replica) {
            Some(times) => times.push(seconds),
            None => {
                self.by_replica.insert(replica.to_owned(), vec![seconds]);
            }
        }
    }

    pub(super) fn of_replica(&self, id: &str) -> Option<FirstTokens> {
        first_token_quantiles(self.by_replica.get(id)?.clone())
    }

    pub(super) fn of_all(&self) -> Option<FirstTokens> {
        first_token_quantiles(self.by_replica.values().flatten().copied().collect())
    }
}

/// Decisions that are no older. If the clock was set back, none is.
fn recent(decisions: &[Arc<PlacementDecision>], now: SystemTime, age: Duration) -> impl Iterator<Item = &PlacementDecision> {
    decisions.iter().map(|decision| &**decision).filter(move |decision| now.duration_since(decision.decided_at).unwrap_or_default() <= age)
}

/// How many requests of the last minute waited for a replica with room, and the seconds that one in
/// ten of them waited at least.
pub(super) fn queue_waits(decisions: &[Arc<PlacementDecision>], now: SystemTime) -> Option<(u32, f64)> {
    longest_tenth(
        recent(decisions, now, QUEUE_AGE).map(|decision| f64::from(decision.queued_seconds)).filter(|seconds| *seconds > 0.0).collect(),
    )
}

fn longest_tenth(mut waits: Vec<f64>) -> Option<(u32, f64)> {
    waits.sort_by(f64::total_cmp);
    Some((count(waits.len()), nearest_rank(&waits, 90)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(times: &FirstTokenTimes, id: &str) -> Option<(u32, f64, f64)> {
        times.of_replica(id).map(|of| (of.streams, of.p50, of.p99))
    }

    #[test]
    fn first_token_times_are_reported_per_replica_and_overall() {
        let mut times = FirstTokenTimes::default();
        (1..=100).rev().for_each(|seconds| times.add("n/0", f64::from(seconds)));
        times.add("n/1", 500.0);
        assert_eq!(told(&times, "n/0"), Some((100, 50.0, 99.0)));
        assert_eq!(told(&times, "n/1"), Some((1, 500.0, 500.0)));
        assert_eq!(told(&times, "n/2"), None, "which has had no stream");
        let all = times.of_all().unwrap();
        assert_eq!((all.streams, all.p50, all.p99), (101, 51.0, 100.0));
        assert!(FirstTokenTimes::default().of_all().is_none());
    }

    #[test]
    fn one_in_ten_requests_waits_at_least_the_longest_tenth() {
        assert_eq!(longest_tenth(Vec::new()), None);
        assert_eq!(longest_tenth(vec![3.0]), Some((1, 3.0)));
        assert_eq!(longest_tenth((1..=10).rev().map(f64::from).collect()), Some((10, 9.0)));
        assert_eq!(longest_tenth((1..=100).map(f64::from).collect()), Some((100, 90.0)));
    }
}
