//! Node time of an entry: how long its jobs had nodes, by day and by what these did.
//!
//! A day is one of UTC, numbered since 1970. Times are by the controller's own clock.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hostler_scheduler::JobState;
use serde::{Deserialize, Serialize};

use crate::observation::{NodeState, ObservedJob};
use crate::since;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// A ready node counts as serving for so long after it was seen with a request.
const SERVES_FOR: Duration = Duration::from_secs(60);

/// What a node was used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NodeUse {
    /// The job runs, and its agent has not come.
    Starting,
    Loading,
    Serving,
    /// Ready, without requests.
    Idle,
    /// Ready beside the node that replaces it.
    Overlap,
    /// Draining, failed, suspended or ending.
    Leaving,
}

/// Seconds of nodes, by their use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeTime {
    pub starting: f64,
    pub loading: f64,
    pub serving: f64,
    pub idle: f64,
    pub overlap: f64,
    pub leaving: f64,
}

impl NodeTime {
    /// Seconds of nodes, whatever they did.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.starting + self.loading + self.serving + self.idle + self.overlap + self.leaving
    }

    /// Adds another's.
    pub fn add(&mut self, other: &Self) {
        self.starting += other.starting;
        self.loading += other.loading;
        self.serving += other.serving;
        self.idle += other.idle;
        self.overlap += other.overlap;
        self.leaving += other.leaving;
    }

    fn of(&mut self, used: NodeUse) -> &mut f64 {
        match used {
            NodeUse::Starting => &mut self.starting,
            NodeUse::Loading => &mut self.loading,
            NodeUse::Serving => &mut self.serving,
            NodeUse::Idle => &mut self.idle,
            NodeUse::Overlap => &mut self.overlap,
            NodeUse::Leaving => &mut self.leaving,
        }
    }
}

/// Node time of one life of an entry's memory, by day.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeLedger {
    /// When it began, in milliseconds since 1970: two ledgers of one entry differ in it.
    pub began: u64,
    /// The entry's model.
    pub model: String,
    /// Nodes of each job.
    pub nodes: u32,
    pub days: BTreeMap<u64, NodeTime>,
}

impl NodeLedger {
    /// Counts a job's nodes from `from` to `to`.
    pub(crate) fn count(&mut self, used: NodeUse, from: SystemTime, to: SystemTime) {
        if self.began == 0 {
            self.began = u64::try_from(since(to, UNIX_EPOCH).as_millis()).unwrap_or(u64::MAX);
        }
        let mut begin = from;
        while begin < to {
            let day = since(begin, UNIX_EPOCH).as_secs() / DAY.as_secs();
            let end = to.min(UNIX_EPOCH + DAY * u32::try_from(day + 1).unwrap_or(u32::MAX));
            if end <= begin {
                return;
            }
            *self.days.entry(day).or_default().of(used) += since(end, begin).as_secs_f64() * f64::from(self.nodes.max(1));
            begin = end;
        }
    }

    /// Seconds of nodes of all days, by use.
    #[must_use]
    pub fn by_use(&self) -> [(&'static str, f64); 6] {
        let mut sum = NodeTime::default();
        self.days.values().for_each(|time| sum.add(time));
        let NodeTime { starting, loading, serving, idle, overlap, leaving } = sum;
        [("starting", starting), ("loading", loading), ("serving", serving), ("idle", idle), ("overlap", overlap), ("leaving", leaving)]
    }

    /// Seconds of nodes of all days.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.days.values().map(NodeTime::total).sum()
    }
}

impl NodeUse {
    /// What the nodes of a job are used for that has started. `ready` is when it was first ready,
    /// and `busy` when a request was last seen in flight there.
    pub(crate) fn of(
        job: &ObservedJob,
        (ready, busy): (Option<SystemTime>, Option<SystemTime>),
        is_replaced: bool,
        now: SystemTime,
    ) -> Self {
        match (job.state, job.node) {
            // A controller that has just started does not see its agents yet.
            (JobState::Running, NodeState::NotAttached) if ready.is_some() => Self::Idle,
            (JobState::Running, NodeState::NotAttached) => Self::Starting,
            (JobState::Running, NodeState::Loading) => Self::Loading,
            (JobState::Running, NodeState::Ready) if is_replaced => Self::Overlap,
            (JobState::Running, NodeState::Ready) if busy.is_some_and(|busy| since(now, busy) < SERVES_FOR) => Self::Serving,
            (JobState::Running, NodeState::Ready) => Self::Idle,
            _ => Self::Leaving,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn time_is_counted_on_the_day_on_which_it_was() {
        let mut ledger = NodeLedger { nodes: 2, ..NodeLedger::default() };
        ledger.count(NodeUse::Serving, at(86_400 - 10), at(86_400 + 30));
        ledger.count(NodeUse::Loading, at(86_400 + 30), at(86_400 + 31));
        ledger.count(NodeUse::Idle, at(50), at(50));
        ledger.count(NodeUse::Idle, at(50), at(40));
        let days: Vec<_> = ledger.days.iter().map(|(day, time)| (*day, time.serving, time.loading)).collect();
        assert_eq!(days, [(0, 20.0, 0.0), (1, 60.0, 2.0)], "two nodes each");
        assert!((ledger.total() - 82.0).abs() < 1e-9);
    }
}
