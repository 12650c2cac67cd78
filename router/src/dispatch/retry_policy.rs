//! Decides whether a request is tried again, and which budget pays for it. Pure: an attempt's end
//! goes in, the next step comes out.

/// Attempts for one request, the first included.
const MAX_ATTEMPTS: usize = 3;

/// Attempts for a request that engines were too full for. They have done no work for it, and
/// another may have room.
const MAX_ATTEMPTS_WHEN_FULL: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AttemptEnd {
    /// An answer for the client, whatever its status.
    Answered,
    /// The engine failed with 500, or with an error as the first event of a stream. Another may
    /// not.
    Failed,
    /// The engine is full or dying (503).
    Full,
    /// No answer came. `excused` if another request crashed the engine.
    Lost { excused: bool },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NextStep {
    RelayAnswer,
    TryAgain,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RetryPayment {
    Free,
    LostBudget,
    RefusedBudget,
}

#[derive(Debug, Default)]
pub(super) struct RetryPolicy {
    attempts: usize,
    /// Lost attempts whose engine another request crashed.
    excused: usize,
    full: usize,
    /// Whether an engine has answered 500 or 503.
    was_refused: bool,
    last: Option<AttemptEnd>,
}

impl RetryPolicy {
    pub(super) fn attempts(&self) -> usize {
        self.attempts
    }

    pub(super) fn begin_attempt(&mut self) {
        self.attempts += 1;
    }

    /// Whether no attempt was made, or the last one found its engine full.
    pub(super) fn is_untried_or_full(&self) -> bool {
        matches!(self.last, None | Some(AttemptEnd::Full)) && self.attempts == self.full
    }

    /// Whether another attempt is allowed, if the retry budget pays for it.
    pub(super) fn allows_attempt(&self) -> bool {
        let most = if self.last == Some(AttemptEnd::Full) { MAX_ATTEMPTS_WHEN_FULL } else { MAX_ATTEMPTS };
        self.attempts - self.excused < most
    }

    /// Whether the running attempt may be given up because its agent is silent.
    pub(super) fn allows_failover(&self) -> bool {
        self.attempts - self.excused - self.full < MAX_ATTEMPTS
    }

    /// The budget that pays for the next attempt. A retry at a replica with room, after a full one,
    /// does not multiply a failing fleet's load.
    pub(super) fn payment(&self, has_room: bool) -> RetryPayment {
        match self.last {
            None => RetryPayment::Free,
            Some(AttemptEnd::Full) if has_room => RetryPayment::Free,
            Some(AttemptEnd::Full | AttemptEnd::Failed | AttemptEnd::Answered) => RetryPayment::RefusedBudget,
            Some(AttemptEnd::Lost { .. }) => RetryPayment::LostBudget,
        }
    }

    /// The step that follows an attempt's end. A 500 after a refusal is the request's own fault and
    /// goes to the client.
    pub(super) fn end_attempt(&mut self, end: AttemptEnd) -> NextStep {
        let step = match end {
            AttemptEnd::Answered => NextStep::RelayAnswer,
            AttemptEnd::Failed if self.was_refused => NextStep::RelayAnswer,
            AttemptEnd::Failed | AttemptEnd::Full | AttemptEnd::Lost { .. } => NextStep::TryAgain,
        };
        self.was_refused |= matches!(end, AttemptEnd::Failed | AttemptEnd::Full);
        self.full += usize::from(end == AttemptEnd::Full);
        self.excused += usize::from(end == AttemptEnd::Lost { excused: true });
        self.last = Some(end);
        step
    }
}

#[cfg(test)]
mod tests {
    use super::AttemptEnd::{Answered, Failed, Full};
    use super::*;

    const LOST: AttemptEnd = AttemptEnd::Lost { excused: false };
    const EXCUSED: AttemptEnd = AttemptEnd::Lost { excused: true };

    fn after(ends: &[AttemptEnd]) -> (RetryPolicy, Option<NextStep>) {
        let mut policy = RetryPolicy::default();
        let mut step = None;
        for end in ends {
            policy.begin_attempt();
            step = Some(policy.end_attempt(*end));
        }
        (policy, step)
    }

    #[test]
    fn the_next_step_follows_from_an_attempts_end_and_history() {
        let table = [
            (vec![Answered], NextStep::RelayAnswer),
            (vec![LOST], NextStep::TryAgain),
            (vec![Failed], NextStep::TryAgain),
            (vec![Full], NextStep::TryAgain),
            // After two engines' 500, the request itself is at fault.
            (vec![Failed, Failed], NextStep::RelayAnswer),
            (vec![Full, Failed], NextStep::RelayAnswer),
            (vec![LOST, Failed], NextStep::TryAgain),
            (vec![Failed, LOST, Failed], NextStep::RelayAnswer),
            (vec![Failed, Full], NextStep::TryAgain),
            (vec![Failed, Answered], NextStep::RelayAnswer),
        ];
        for (ends, step) in table {
            assert_eq!(after(&ends).1, Some(step), "{ends:?}");
        }
    }

    #[test]
    fn attempts_are_limited_to_three_or_eight_when_full() {
        let table = [
            (vec![], true),
            (vec![LOST; 2], true),
            (vec![LOST; 3], false),
            (vec![EXCUSED; 3], true),
            ([vec![EXCUSED; 3], vec![LOST; 3]].concat(), false),
            (vec![Full; 7], true),
            (vec![Full; 8], false),
            ([vec![Full; 3], vec![LOST]].concat(), false),
            (vec![Failed, Full, Full], true),
        ];
        for (ends, allowed) in table {
            assert_eq!(after(&ends).0.allows_attempt(), allowed, "{ends:?}");
        }
    }

    #[test]
    fn an_attempt_may_fail_over_while_fewer_than_three_count() {
        let running = |ends: &[AttemptEnd]| {
            let (mut policy, _) = after(ends);
            policy.begin_attempt();
            policy.allows_failover()
        };
        assert!(running(&[]) && running(&[LOST]) && !running(&[LOST, LOST]));
        assert!(running(&[Full, Full, LOST]) && running(&[EXCUSED, EXCUSED, LOST]));
    }

    #[test]
    fn first_attempts_and_retries_with_room_are_free() {
        let payment = |ends: &[AttemptEnd], has_room| after(ends).0.payment(has_room);
        assert_eq!(payment(&[], false), RetryPayment::Free);
        assert_eq!(payment(&[Full], true), RetryPayment::Free);
        assert_eq!(payment(&[Full], false), RetryPayment::RefusedBudget);
        assert_eq!(payment(&[Failed], true), RetryPayment::RefusedBudget);
        assert_eq!(payment(&[Full, LOST], true), RetryPayment::LostBudget);
    }
}
