//! Estimates of durations from their latest samples. The controller learns each entry's queue waits
//! and cold starts this way.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Number of remembered samples. Queues change within days; an entry of four nodes with jobs of 12
/// hours fills this in two and a half days.
const LENGTH: usize = 20;

/// Number of short samples in a row that rule out chance.
const LATEST: usize = 3;

/// Latest samples, oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecentTimes(VecDeque<Duration>);

impl RecentTimes {
    pub(crate) fn push(&mut self, time: Duration) {
        while self.0.len() >= LENGTH {
            self.0.pop_front();
        }
        self.0.push_back(time);
    }

    /// Ninetieth percentile of the samples; with fewer than ten samples, the longest.
    ///
    /// Replacing early is cheap, as the old job drains once the new one is ready, but not free. So
    /// if the last three samples took less than half of that, twice the longest of the three is
    /// enough.
    pub(crate) fn estimate(&self) -> Option<Duration> {
        let mut sorted: Vec<Duration> = self.0.iter().copied().collect();
        sorted.sort_unstable();
        let rank = (sorted.len() * 9).div_ceil(10);
        let usual = sorted.get(rank.checked_sub(1)?).copied()?;
        let latest = self.0.iter().rev().take(LATEST).max().filter(|_| self.0.len() > LATEST);
        Some(latest.map_or(usual, |latest| usual.min(*latest * 2)))
    }
}

/// Latest samples of each part of something, by name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecentParts(BTreeMap<String, RecentTimes>);

/// Most parts that are told apart: their names come from agents.
const MAX_PARTS: usize = 16;

impl RecentParts {
    pub(crate) fn push(&mut self, part: &str, time: Duration) {
        if self.0.len() < MAX_PARTS || self.0.contains_key(part) {
            self.0.entry(part.to_owned()).or_default().push(time);
        }
    }

    pub(crate) fn estimates(&self) -> impl Iterator<Item = (&str, Duration)> {
        self.0.iter().filter_map(|(part, times)| Some((part.as_str(), times.estimate()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_estimate_covers_nine_of_ten_recent_times() {
        let mut times = RecentTimes::default();
        assert_eq!(times.estimate(), None);
        times.push(Duration::from_secs(900));
        times.push(Duration::from_secs(1));
        assert_eq!(times.estimate(), Some(Duration::from_secs(900)));
        (1..=LENGTH as u64).for_each(|second| times.push(Duration::from_secs(second)));
        assert_eq!(times.estimate(), Some(Duration::from_secs(18)));
        assert_eq!(times.0.len(), LENGTH);
        times.push(Duration::from_secs(2));
        times.push(Duration::from_secs(2));
        assert_eq!(times.estimate(), Some(Duration::from_secs(18)), "two are chance");
        times.push(Duration::from_secs(2));
        assert_eq!(times.estimate(), Some(Duration::from_secs(4)));
    }
}
