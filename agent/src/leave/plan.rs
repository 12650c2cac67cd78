//! Division of the time to leave: for answers to finish, for engines to stop, and for killed
//! processes and last reports.

use std::time::Duration;

use tokio::time::Instant;

/// Minimum time for engines to stop by themselves, if it fits, so that vLLM can clean up its shared
/// memory.
const MIN_STOP: Duration = Duration::from_millis(500);

/// Time limit for a killed process if there is no hurry.
///
/// A process in a GPU driver's call takes seconds.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// Most of a grace that killed processes get. Processes left after that die with the job.
const MAX_KILL: Duration = Duration::from_secs(1);

/// Time limit for the last reports to the routers if there is no hurry.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(1);

/// Most of a grace that the last reports get; a round trip takes a millisecond.
const MAX_FAREWELL: Duration = Duration::from_millis(250);

/// Longest wait of a leaving agent, because a clock cannot represent every duration that can be
/// set.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Parts of leaving, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LeavePlan {
    /// Time for running answers. Unfinished ones are then cut off.
    pub(crate) drain: Duration,
    /// Time from the engines' SIGTERM to their SIGKILL.
    pub(crate) stop: Duration,
    /// Time for killed processes to be gone.
    pub(crate) kill: Duration,
    /// Time for the last reports.
    pub(crate) farewell: Duration,
}

impl LeavePlan {
    /// Plan if nobody kills the agent.
    pub(crate) fn at_leisure(drain_timeout: Duration, stop_grace: Duration) -> Self {
        Self { drain: drain_timeout.min(LONGEST), stop: stop_grace.min(LONGEST), kill: KILL_TIMEOUT, farewell: FAREWELL_TIMEOUT }
    }

    /// Plan with everything inside `grace`.
    ///
    /// Answers get the time that the rest does not need: an eighth is for the engines to stop, as
    /// much for killed processes.
    pub(crate) fn within(grace: Duration, drain_timeout: Duration, stop_grace: Duration) -> Self {
        let grace = grace.min(LONGEST);
        let farewell = MAX_FAREWELL.min(grace / 8);
        let kill = MAX_KILL.min(grace / 8);
        let rest = grace - farewell - kill;
        let stop = (rest / 8).max(MIN_STOP).min(rest / 4).min(stop_grace);
        Self { drain: drain_timeout.min(rest - stop), stop, kill, farewell }
    }
}

/// When the parts of an agent's leaving are over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LeaveMoments {
    /// Unfinished answers are cut off then.
    pub(crate) drained_by: Instant,
    /// The engines are then gone, or cannot be killed.
    pub(crate) gone_by: Instant,
}

impl LeaveMoments {
    pub(crate) fn new(plan: LeavePlan, now: Instant) -> Self {
        let drained_by = now + plan.drain;
        Self { drained_by, gone_by: drained_by + plan.stop + plan.kill }
    }

    /// Shortened moments of an agent that must hurry now.
    ///
    /// No part takes longer than before, and engines that are being stopped have the new plan's
    /// time for that from now.
    pub(crate) fn hurry(self, plan: LeavePlan, now: Instant) -> Self {
        let drained_by = self.drained_by.min(now + plan.drain);
        Self { drained_by, gone_by: self.gone_by.min(drained_by.max(now) + plan.stop + plan.kill) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn total(plan: LeavePlan) -> Duration {
        plan.drain + plan.stop + plan.kill + plan.farewell
    }

    fn any_duration() -> impl Strategy<Value = Duration> {
        prop_oneof![
            Just(Duration::ZERO),
            (0_u64..600_000).prop_map(Duration::from_millis),
            (0_u64..5_000_000).prop_map(Duration::from_micros)
        ]
    }

    #[test]
    fn a_schedulers_grace_goes_mostly_to_answers() {
        let (drain, stop) = (30 * SECOND, 10 * SECOND);
        let pbs = LeavePlan::within(6 * SECOND, drain, stop);
        assert_eq!((pbs.drain, pbs.stop), (Duration::from_millis(4375), Duration::from_millis(625)));
        let slurm = LeavePlan::within(25 * SECOND, drain, stop);
        assert!(slurm.drain > 20 * SECOND && slurm.stop > 2 * SECOND, "{slurm:?}");
        // Time beyond the need is not used.
        let long = LeavePlan::within(300 * SECOND, drain, stop);
        assert_eq!((long.drain, long.stop), (drain, stop));
    }

    #[test]
    fn engines_have_time_to_stop_whenever_their_agent_is_hurried() {
        let plan = LeavePlan::at_leisure(30 * SECOND, 10 * SECOND);
        let hurried = LeavePlan { drain: 4 * SECOND, stop: SECOND, kill: SECOND, farewell: Duration::ZERO };
        let begun = Instant::now();
        // Columns: the second of the hurry, and both moments after it.
        for (second, drained_by, gone_by) in
            [(0, 4, 6), (10, 14, 16), (28, 30, 32), (30, 30, 32), (35, 30, 37), (48, 30, 50), (49, 30, 50), (60, 30, 50)]
        {
            let moments = LeaveMoments::new(plan, begun).hurry(hurried, begun + second * SECOND);
            let expected = LeaveMoments { drained_by: begun + drained_by * SECOND, gone_by: begun + gone_by * SECOND };
            assert_eq!(moments, expected, "hurried after {second} s");
        }
    }

    #[test]
    fn absurd_durations_have_moments_too() {
        let now = Instant::now();
        let endless = LeavePlan::at_leisure(Duration::MAX, Duration::MAX);
        let moments = LeaveMoments::new(endless, now);
        assert!(moments.gone_by > moments.drained_by && moments.drained_by > now);
        let hurried = LeavePlan::within(Duration::MAX, Duration::MAX, Duration::MAX);
        assert_eq!(moments.hurry(hurried, now).drained_by, now + hurried.drain);
    }

    proptest! {
        #[test]
        fn a_leave_plan_fits_the_grace(grace in any_duration(), drain in any_duration(), stop in any_duration()) {
            let plan = LeavePlan::within(grace, drain, stop);
            prop_assert!(total(plan) <= grace, "{plan:?}");
            prop_assert!(plan.drain <= drain && plan.stop <= stop);
        }

        #[test]
        fn answers_get_most_of_the_grace_and_engines_can_stop(grace in any_duration()) {
            let plan = LeavePlan::within(grace, 3_600 * SECOND, 3_600 * SECOND);
            prop_assert!(plan.drain >= plan.stop + plan.kill + plan.farewell, "{plan:?}");
            prop_assert!(grace < 3 * SECOND || plan.stop >= MIN_STOP, "{plan:?}");
        }
    }
}
