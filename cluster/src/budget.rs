//! Budget of an entry: when its nodes end, whatever clients ask for. Pure.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::since;

/// How long before its end a budget is near it.
const NEAR: Duration = Duration::from_secs(30 * 60);

/// What an entry may use. Both limits may be set, and the first that is reached counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Budget {
    pub until: Option<SystemTime>,
    /// Time of nodes, counted from `asked` on.
    pub node_time: Option<Duration>,
    /// When somebody asked for it, in milliseconds since 1970. A later value is another budget.
    pub asked: u64,
}

/// What is left of a budget.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetLeft {
    pub until: Option<SystemTime>,
    pub node_time: Option<Duration>,
    /// Time of nodes that was used since the budget was asked for.
    pub used: Duration,
    /// When it ends, as long as the nodes of now run on; `None` while none runs.
    pub ends_in: Option<Duration>,
}

impl Budget {
    /// What is left, with so many nodes at work; `None` without limits.
    pub(crate) fn left(&self, used: Duration, nodes: u32, now: SystemTime) -> Option<BudgetLeft> {
        let Self { until, node_time, .. } = *self;
        let until_end = until.map(|until| since(until, now));
        let until_spent = node_time.and_then(|limit| match limit.saturating_sub(used) {
            Duration::ZERO => Some(Duration::ZERO),
            left => left.checked_div(nodes),
        });
        let ends_in = until_end.into_iter().chain(until_spent).min();
        (until.is_some() || node_time.is_some()).then_some(BudgetLeft { until, node_time, used, ends_in })
    }
}

impl BudgetLeft {
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.ends_in == Some(Duration::ZERO)
    }

    /// Whether it ends within half an hour.
    #[must_use]
    pub fn is_near(&self) -> bool {
        self.ends_in.is_some_and(|left| left <= NEAR)
    }

    /// In words, such as `12.5 of 20 node-hours are used; until 2026-11-29T18:00:00Z`.
    #[must_use]
    pub fn describe(&self) -> String {
        let hours = |time: Duration| time.as_secs_f64() / 3600.0;
        let rounded = |hours: f64| (hours * 1e4).round() / 1e4;
        let of_nodes = self.node_time.map(|limit| format!("{:.1} of {} node-hours are used", hours(self.used), rounded(hours(limit))));
        let until = self.until.map(|until| format!("until {}", humantime::format_rfc3339_seconds(until)));
        of_nodes.into_iter().chain(until).collect::<Vec<_>>().join("; ")
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    fn minutes(count: u64) -> Duration {
        Duration::from_secs(60 * count)
    }

    #[test]
    fn the_limit_that_is_reached_first_ends_a_budget() {
        let (from, one_hour) = (UNIX_EPOCH + minutes(100), minutes(60));
        let ends_in = |until: Option<u64>, hours: Option<u32>, used: u64, nodes: u32| {
            let budget = Budget { until: until.map(|at| from + minutes(at)), node_time: hours.map(|hours| one_hour * hours), asked: 1 };
            budget.left(minutes(used), nodes, from).map(|left| (left.ends_in, left.is_near(), left.is_over()))
        };
        assert_eq!(ends_in(None, None, 9, 1), None);
        assert_eq!(ends_in(Some(90), None, 9, 1), Some((Some(minutes(90)), false, false)));
        assert_eq!(ends_in(None, Some(2), 60, 0), Some((None, false, false)), "nothing runs, so nothing is used");
        assert_eq!(ends_in(None, Some(2), 60, 1), Some((Some(minutes(60)), false, false)));
        assert_eq!(ends_in(None, Some(2), 60, 4), Some((Some(minutes(15)), true, false)));
        assert_eq!(ends_in(Some(20), Some(2), 60, 2), Some((Some(minutes(20)), true, false)));
        assert_eq!(ends_in(None, Some(2), 120, 0), Some((Some(Duration::ZERO), true, true)));
        assert_eq!(ends_in(Some(0), Some(2), 0, 0), Some((Some(Duration::ZERO), true, true)));
    }
}
