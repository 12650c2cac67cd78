//! How long a job's present run may last, and so when it ends. The agent asks it of its own job, the controller of each.

use std::time::{Duration, SystemTime};

/// How old the walltime that PBS says is used may be: a host reports it every two minutes (`$max_check_poll`, 120 s by default), and on its way
/// it gets a little older.
pub(crate) const MAX_USED_AGE: Duration = Duration::from_secs(130);

/// What a run's beginning and its use may differ by although the clocks agree.
const CLOCKS_AGREE: Duration = Duration::from_secs(10);

/// The length of a run: it is the same by every clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunTime {
    pub limit: Duration,
    /// How much of it is used, at most `MAX_USED_AGE` ago, where the scheduler says it. PBS does not count time in which a job was suspended.
    pub used: Option<Duration>,
}

impl RunTime {
    /// When a run ends that began at `started`, which may be by another clock than `now` is. `None`: at no time that can be told.
    ///
    /// What is used tells it by this clock, but for what may be the age of that reading. Where `started` contradicts it, the job was suspended or
    /// the clocks differ, and the end is as early as it can be. So none ends earlier than is returned.
    #[must_use]
    pub fn end(self, started: SystemTime, now: SystemTime) -> Option<SystemTime> {
        let begun = started.checked_add(self.limit);
        let Some(used) = self.used else { return begun.min(now.checked_add(self.limit)) };
        let latest = now.checked_add(self.limit)?.checked_sub(used)?;
        let earliest = latest.checked_sub(MAX_USED_AGE)?;
        begun.filter(|end| (earliest..=latest + CLOCKS_AGREE).contains(end)).or(Some(earliest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn a_runs_end_is_computed_by_the_local_clock() {
        // It began at 10,000 by this clock, lasts for an hour and is read after 20 minutes.
        for (started, used, end) in [
            (10_000, Some(1200), 13_600),
            (10_000, Some(1070), 13_600),
            (9400, Some(1200), 13_470),
            (10_600, Some(1200), 13_470),
            (10_000, Some(600), 14_070),
            (10_000, None, 13_600),
            (12_000, None, 14_800),
        ] {
            let run = RunTime { limit: Duration::from_secs(3600), used: used.map(Duration::from_secs) };
            assert_eq!(run.end(at(started), at(11_200)), Some(at(end)), "from {started}, {used:?} s used");
        }
    }
}
