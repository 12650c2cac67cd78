//! Limits how many jobs an entry may submit now. The limit holds whatever is remembered or
//! estimated, so a wrong decision cannot become a storm.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::since;

/// Within this time an entry may submit twice its nodes, plus four spare jobs for small entries.
const WINDOW: Duration = Duration::from_secs(15 * 60);

const SPARE_JOBS: usize = 4;

/// Submissions of the last quarter of an hour, oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pace(VecDeque<(SystemTime, usize)>);

impl Pace {
    /// Pace of an entry whose last quarter of an hour is unknown. The spare jobs count as
    /// submitted, so twice the entry's nodes are left.
    pub(crate) fn unknown(now: SystemTime) -> Self {
        Self(VecDeque::from([(now, SPARE_JOBS)]))
    }

    /// How many of `missing` jobs an entry of `nodes` nodes may submit now.
    pub(crate) fn allowed(&self, missing: usize, nodes: usize, now: SystemTime) -> usize {
        let lately: usize = self.0.iter().filter(|(at, _)| is_recent(*at, now)).map(|(_, parts)| parts).sum();
        missing.min((2 * nodes + SPARE_JOBS).saturating_sub(lately))
    }

    /// How long an entry of `nodes` nodes may submit nothing; zero where it may.
    pub(crate) fn delay(&self, nodes: usize, now: SystemTime) -> Duration {
        if self.allowed(1, nodes, now) > 0 {
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

    #[test]
    fn an_entry_submits_twice_its_nodes_and_four_more_in_a_quarter_of_an_hour() {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let mut pace = Pace::default();
        let mut submitted = Vec::new();
        for second in (10_000..13_600).step_by(5) {
            let parts = pace.allowed(3, 3, at(second));
            if parts > 0 {
                pace.note(parts, at(second));
                submitted.push((second - 10_000, parts));
            }
        }
        assert_eq!((pace.delay(3, at(13_499)), pace.delay(3, at(13_600))), (Duration::from_secs(101), Duration::ZERO));
        assert_eq!(submitted[..5], [(0, 3), (5, 3), (10, 3), (15, 1), (900, 3)]);
        assert_eq!(submitted.iter().map(|(_, parts)| parts).sum::<usize>(), 4 * 10);
        assert_eq!(pace.allowed(3, 3, at(100)), 3, "the clock was set back by hours");
        assert_eq!(Pace::unknown(at(0)).allowed(5, 2, at(9)), 4);
    }
}
