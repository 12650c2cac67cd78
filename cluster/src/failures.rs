//! Consecutive failures of an entry's jobs, and how they limit submissions: a pause, one job at a
//! time, and finally none.
//!
//! A model that cannot start therefore costs ten jobs.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::since;

/// First pause. A scheduler takes this long to restart a job elsewhere, so one dead node costs no
/// more.
const FIRST_PAUSE: Duration = Duration::from_secs(30);

/// Most doublings of the pause: 16 minutes at most, which is about four tries an hour.
const MAX_DOUBLINGS: u32 = 5;

/// Failures in a row after which nothing is submitted. With their pauses they take an hour and a
/// half, longer than outages of a file system or a license server.
pub(crate) const MAX_FAILURES: u32 = 10;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failures {
    in_a_row: u32,
    /// When the last failure was counted.
    counted: Option<SystemTime>,
    /// Whether no job submitted after the last failure has become ready.
    #[serde(default)]
    is_probing: bool,
    pause_ends: Option<SystemTime>,
}

impl Failures {
    /// Counts a failed job if it was submitted after the last counted failure.
    ///
    /// Jobs submitted before share its cause, or chance. Both times are by the controller's own
    /// clock.
    pub(crate) fn note(&mut self, submitted: Option<SystemTime>, now: SystemTime) {
        let counts = match (self.counted, submitted) {
            (Some(counted), Some(submitted)) => submitted > counted,
            _ => true,
        };
        if counts {
            self.in_a_row = self.in_a_row.saturating_add(1);
            self.counted = Some(now);
            self.is_probing = true;
        }
        if counts || self.pause(now).is_none() {
            let doublings = self.in_a_row.saturating_sub(1).min(MAX_DOUBLINGS);
            self.pause_ends = Some(now + FIRST_PAUSE * 2_u32.pow(doublings));
        }
    }

    /// Forgives earlier failures because a job has served for a while: the next failure is the
    /// first again.
    pub(crate) fn forgive(&mut self) {
        *self = Self { pause_ends: self.pause_ends, ..Self::default() };
    }

    /// Notes that a job submitted at this time has become ready.
    pub(crate) fn note_ready(&mut self, submitted: Option<SystemTime>) {
        self.is_probing &= self.counted.zip(submitted).is_some_and(|(counted, submitted)| submitted <= counted);
    }

    /// Whether the next job must first show that jobs can start.
    pub(crate) fn is_probing(&self) -> bool {
        self.is_probing
    }

    /// Whether submissions have ended for good.
    pub(crate) fn is_final(&self) -> bool {
        self.in_a_row >= MAX_FAILURES
    }

    pub(crate) fn in_a_row(&self) -> u32 {
        self.in_a_row
    }

    /// Time left until submissions may continue.
    pub(crate) fn pause(&self, now: SystemTime) -> Option<Duration> {
        Some(since(self.pause_ends?, now)).filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn the_pause_after_failures_doubles_up_to_sixteen_minutes() {
        let mut failures = Failures::default();
        let mut now = at(1000);
        let mut pauses = Vec::new();
        for _ in 0..8 {
            failures.note(Some(now), now + Duration::from_secs(1));
            now += Duration::from_secs(1);
            let pause = failures.pause(now).expect("a failure is followed by a pause");
            pauses.push(pause.as_secs());
            now += pause;
            assert_eq!(failures.pause(now), None);
        }
        assert_eq!(pauses, [30, 60, 120, 240, 480, 960, 960, 960]);
        failures.forgive();
        failures.note(Some(now), now);
        assert_eq!(failures.pause(now), Some(FIRST_PAUSE));
    }

    #[test]
    fn jobs_come_one_by_one_until_one_is_ready() {
        let mut failures = Failures::default();
        failures.note(Some(at(50)), at(100));
        assert!(failures.is_probing());
        failures.note_ready(Some(at(60)));
        assert!(failures.is_probing(), "it was there when the other one failed");
        failures.note_ready(Some(at(131)));
        assert!(!failures.is_probing() && failures.in_a_row() == 1);
        (2..10).for_each(|count| failures.note(None, at(100 * count)));
        assert!(!failures.is_final());
        failures.note(None, at(2000));
        assert!(failures.is_final());
        failures.forgive();
        assert!(!failures.is_final() && !failures.is_probing());
    }

    #[test]
    fn an_arrays_consecutive_job_failures_count_once() {
        let mut failures = Failures::default();
        for second in [100, 110, 125, 140, 200] {
            failures.note(Some(at(50)), at(second));
        }
        assert_eq!(failures.in_a_row(), 1);
        assert_eq!(failures.pause(at(200)), Some(FIRST_PAUSE));
        failures.note(Some(at(131)), at(230));
        assert_eq!(failures.in_a_row(), 2);
    }
}
