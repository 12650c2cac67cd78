//! Gathers the facts from which the findings about the fleet follow.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use hostler_proto::fleet::v1::{FirstTokens, FleetFinding};
use tokio::time::Instant;

use super::first_tokens::{FirstTokenTimes, queue_waits};
use super::{MAX_DECISIONS, Operators};
use crate::event_log::millis_since_1970;
use crate::findings::{self, FleetFacts};
use crate::fleet::{FleetView, Phase, Replica};

/// How long an engine's failures count, and how many are a loop. These and the next two are those
/// of the alerts.
const CRASH_LOOP_TIME: Duration = Duration::from_secs(1800);
const CRASH_LOOP_FAILURES: usize = 3;

/// How long a lost node is news.
const LOST_NODE_TIME: Duration = Duration::from_secs(600);

/// Batch jobs that end within this time end soon.
const JOBS_END_TIME: Duration = Duration::from_secs(1800);

impl Operators {
    /// What is wrong about the fleet now, the gravest first.
    pub(crate) fn findings(&self) -> Vec<FleetFinding> {
        let first_tokens = FirstTokenTimes::gather(&self.placer.decisions.latest(MAX_DECISIONS), SystemTime::now());
        findings::list(&self.facts(first_tokens.of_all()))
    }

    pub(super) fn facts(&self, first_tokens: Option<FirstTokens>) -> FleetFacts {
        let (view, now) = (self.fleet.view(), SystemTime::now());
        let count = |is_meant: fn(&Replica) -> bool| view.replicas.iter().filter(|replica| is_meant(replica)).count();
        let since = |time: Duration| millis_since_1970(now.checked_sub(time).unwrap_or(SystemTime::UNIX_EPOCH));
        let events = self.fleet.events();
        FleetFacts {
            ends: self.history.recent_ends(&self.placer.metrics.end_counts()),
            first_tokens,
            queue_waits: queue_waits(&self.placer.decisions.latest(MAX_DECISIONS), now),
            queued: self.queue.waiting_count(),
            replicas: view.replicas.len(),
            down: count(|replica| replica.lease_lapsed || matches!(replica.state.phase, Phase::Failed | Phase::Quarantined)),
            quarantined: count(|replica| replica.state.phase == Phase::Quarantined),
            crash_loops: crash_loops(events.grave_subjects("replica_phase", since(CRASH_LOOP_TIME))),
            nodes_lost: events.grave_subjects("node_lost", since(LOST_NODE_TIME)).len(),
            serving: serving(&view, Instant::now()),
            budgets_end: budgets_end(&view, Instant::now()),
            is_key_file_unusable: self.page_sessions.is_key_file_unusable(),
        }
    }
}

/// How many replicas have failed too often, of one name for each failure.
fn crash_loops(failed: Vec<String>) -> usize {
    let mut failures: BTreeMap<String, usize> = BTreeMap::new();
    failed.into_iter().for_each(|replica| *failures.entry(replica).or_default() += 1);
    failures.values().filter(|count| **count >= CRASH_LOOP_FAILURES).count()
}

fn budgets_end(view: &FleetView, now: Instant) -> usize {
    view.entries().iter().filter(|entry| entry.budget_ends_at.is_some_and(|at| at <= now + JOBS_END_TIME)).count()
}

/// How many replicas serve now and after the jobs that end soon; `None` where a controller brings
/// others in time.
fn serving(view: &FleetView, now: Instant) -> Option<(usize, usize)> {
    if view.expected_models() > 0 {
        return None;
    }
    let leaving = |node: &str| {
        let job = view.nodes.iter().find(|known| &*known.name == node).and_then(|known| known.job.as_ref());
        job.and_then(|job| job.leaves_at).is_some_and(|at| at < now + JOBS_END_TIME)
    };
    let ready: Vec<_> = view.replicas.iter().filter(|replica| replica.is_ready()).collect();
    Some((ready.len(), ready.iter().filter(|replica| !leaving(&replica.node)).count()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_failures_of_one_replica_are_a_loop() {
        let failed = |names: &[&str]| crash_loops(names.iter().map(|name| (*name).to_owned()).collect());
        assert_eq!((failed(&["a", "b", "a", "b"]), failed(&["a", "b", "a", "a"])), (0, 1));
    }
}
