//! Limits how many jobs an entry may submit now. The limit holds whatever is remembered or
//! estimated, so a wrong decision cannot become a storm.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::entry::FleetEntry;
use crate::since;

/// Within this time an entry may submit a job for each node and half walltime, twice its nodes at
/// least, plus four spare jobs for small entries.
const WINDOW: Duration = Duration::from_secs(15 * 60);

const SPARE_JOBS: usize = 4;

/// Most jobs that an entry may submit within the window.
fn most_within_window(entry: &FleetEntry) -> usize {
    let half_walltimes = 2 * WINDOW.as_secs() / entry.walltime.as_secs().max(1);
    let per_node = usize::try_from(half_walltimes).unwrap_or(usize::MAX).max(2);
    entry.most_jobs().saturating_mul(per_node).saturating_add(SPARE_JOBS)
}

/// Submissions of the last quarter of an hour, oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pace(VecDeque<(SystemTime, usize)>);

impl Pace {
    /// Pace of an entry whose last quarter of an hour is unknown. The spare jobs count as
    /// submitted, so the rest of the limit is left.
    pub(crate) fn unknown(now: SystemTime) -> Self {
        Self(VecDeque::from([(now, SPARE_JOBS)]))
    }

    /// How many of `missing` jobs the entry may submit now.
    pub(crate) fn allowed(&self, missing: usize, entry: &FleetEntry, now: SystemTime) -> usize {
        let lately: usize = self.0.iter().filter(|(at, _)| is_recent(*at, now)).map(|(_, parts)| parts).sum();
        missing.min(most_within_window(entry).saturating_sub(lately))
    }

    /// How long the entry may submit nothing; zero where it may.
    pub(crate) fn delay(&self, entry: &FleetEntry, now: SystemTime) -> Duration {
        if self.allowed(1, entry, now) > 0 {
            return Duration::ZERO;
        }
        let oldest = self.0.iter().map(|(at, _)| *at).find(|at| is_recent(*at, now));
        oldest.map_or(Duration::ZERO, |at| since(at + WINDOW, now))
    }

    pub(crate) fn note(&mut self, parts: usize, now: SystemTime) {
        self.0.retain(|(at, _)| is_recent(*at, now));
        self.0.push_back((now, parts));
    }
}

/// Whether a submission is within the window. If the clock was set back, a submission stays recent
/// for no longer than the window.
fn is_recent(at: SystemTime, now: SystemTime) -> bool {
    since(now, at) < WINDOW && since(at, now) < WINDOW
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::FleetSize;

    fn entry(nodes: u32, minutes: u64) -> FleetEntry {
        let (size, walltime) = (FleetSize::Fixed(nodes), Duration::from_secs(60 * minutes));
        FleetEntry {
            name: "chat".to_owned(),
            model: "org/model".to_owned(),
            size,
            walltime,
            engine_args: Vec::new(),
            nodes_per_replica: 1,
            queue: String::new(),
            account: String::new(),
            resources: String::new(),
            budget: crate::budget::Budget::default(),
            asked: 0,
        }
    }

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn an_entry_submits_twice_its_nodes_and_four_more_in_a_quarter_of_an_hour() {
        let entry = entry(3, 60);
        let mut pace = Pace::default();
        let mut submitted = Vec::new();
        for second in (10_000..13_600).step_by(5) {
            let parts = pace.allowed(3, &entry, at(second));
            if parts > 0 {
                pace.note(parts, at(second));
                submitted.push((second - 10_000, parts));
            }
        }
        assert_eq!((pace.delay(&entry, at(13_499)), pace.delay(&entry, at(13_600))), (Duration::from_secs(101), Duration::ZERO));
        assert_eq!(submitted[..5], [(0, 3), (5, 3), (10, 3), (15, 1), (900, 3)]);
        assert_eq!(submitted.iter().map(|(_, parts)| parts).sum::<usize>(), 4 * 10);
        assert_eq!(pace.allowed(3, &entry, at(100)), 3, "the clock was set back by hours");
        assert_eq!(Pace::unknown(at(0)).allowed(5, &self::entry(2, 60), at(9)), 4);
    }

    #[test]
    fn short_jobs_may_be_renewed_for_as_long_as_the_fleet_lives() {
        for minutes in [2, 4, 10, 15, 30] {
            let entry = entry(2, minutes);
            let mut pace = Pace::default();
            // Each job is replaced when three quarters of its time are over.
            for second in (0..7_200).step_by(usize::try_from(45 * minutes).unwrap()) {
                assert_eq!(pace.allowed(2, &entry, at(second)), 2, "{minutes} minutes, after {second} s");
                pace.note(2, at(second));
            }
        }
    }
}
