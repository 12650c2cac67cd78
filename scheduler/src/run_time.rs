//! How long a job's present run may last, and therefore when it ends. The agent uses this for its
//! own job, and the controller for each job.

use std::time::{Duration, SystemTime};

/// Greatest age of the used walltime that PBS reports. A host reports it every two minutes
/// (`$max_check_poll`, 120 s by default), and it gets a little older on the way.
pub(crate) const MAX_USED_AGE: Duration = Duration::from_secs(130);

/// Difference between a run's start and its used time within which the clocks agree.
const CLOCKS_AGREE: Duration = Duration::from_secs(10);

/// Length of a run, which is the same by every clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunTime {
    pub limit: Duration,
    /// Used part of the limit, at most `MAX_USED_AGE` ago, if the scheduler reports it. PBS does
    /// not count suspended time.
    pub used: Option<Duration>,
}

impl RunTime {
    /// When a run ends that began at `started`, which may be by another clock than `now`. `None` if
    /// no time can be given.
    ///
    /// The used time gives the end by this clock, up to the age of that reading. If `started`
    /// contradicts it, the job was suspended or the clocks differ, and the result is the earliest
    /// possible end. So no run ends earlier than returned.
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
        // The run began at 10,000 by this clock, lasts for an hour and is read after 20 minutes.
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
