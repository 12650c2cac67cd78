//! Detection of kills from outside: a SIGKILL sent neither by this agent nor by the kernel's OOM
//! killer.
//!
//! No request can send one, so none is to blame. This module is pure; the supervisor asks once for
//! each crash. Anything unknown speaks against an outside kill.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use rustix::process::Signal;
use tokio::time::Instant;

/// Time within which the consequences of one end appear.
///
/// An engine that fails by itself may kill processes of its own that do not end: vLLM waits 4 s for
/// workers and 5 s for its core.
const SAME_END: Duration = Duration::from_secs(1);

/// Evidence about the end of a life.
#[derive(Debug, Clone)]
pub(super) struct EndEvidence {
    /// How the first process ended, if it has.
    pub(super) leader: Option<ExitStatus>,
    /// How and when the first of the computing processes ended, if that was seen.
    pub(super) core: Option<(ExitStatus, Instant)>,
    /// Whether the kernel killed a process for lack of memory during this life; `None` if the
    /// kernel does not tell.
    pub(super) oom_killed: Option<bool>,
    /// When the engine began to fail: an answer broke off, or the engine reported it.
    pub(super) failing_since: Option<Instant>,
}

impl EndEvidence {
    /// Whether the engine was killed from outside, with the evidence known `now`.
    pub(super) fn is_outside_kill(&self, now: Instant) -> bool {
        // If a computing process ended first, the end of the first process is only a consequence.
        let Some((status, at)) = self.core.or(self.leader.map(|status| (status, now))) else { return false };
        let had_failed = self.failing_since.is_some_and(|since| since + SAME_END < at);
        status.signal() == Some(Signal::KILL.as_raw()) && self.oom_killed == Some(false) && !had_failed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEGV: i32 = 11;

    fn killed(signal: Signal) -> ExitStatus {
        ExitStatus::from_raw(signal.as_raw())
    }

    fn evidence(leader: Option<ExitStatus>, core: Option<(ExitStatus, Instant)>) -> EndEvidence {
        EndEvidence { leader, core, oom_killed: Some(false), failing_since: None }
    }

    #[test]
    fn only_sigkill_comes_from_outside() {
        let now = Instant::now();
        let ended = |status| evidence(Some(status), None).is_outside_kill(now);
        assert!(ended(killed(Signal::KILL)));
        for status in [
            killed(Signal::TERM),
            killed(Signal::ABORT),
            ExitStatus::from_raw(SEGV | 0x80),
            ExitStatus::from_raw(0),
            ExitStatus::from_raw(9 << 8),
        ] {
            assert!(!ended(status), "{status}");
        }
        assert!(!evidence(None, None).is_outside_kill(now), "it hangs");
    }

    #[test]
    fn the_end_of_a_core_decides_before_its_front_ends() {
        let now = Instant::now();
        let core = |status| Some((status, now));
        let exited = ExitStatus::from_raw(0);
        assert!(evidence(Some(exited), core(killed(Signal::KILL))).is_outside_kill(now));
        assert!(evidence(None, core(killed(Signal::KILL))).is_outside_kill(now), "its front-end has not noticed");
        assert!(!evidence(Some(exited), core(ExitStatus::from_raw(SEGV))).is_outside_kill(now));
        assert!(!evidence(Some(killed(Signal::KILL)), core(ExitStatus::from_raw(SEGV))).is_outside_kill(now));
    }

    #[test]
    fn a_kill_may_be_the_memory_killers_unless_the_kernel_denies_it() {
        let now = Instant::now();
        for (oom_killed, expected) in [(Some(false), true), (Some(true), false), (None, false)] {
            let evidence = EndEvidence { oom_killed, ..evidence(Some(killed(Signal::KILL)), None) };
            assert_eq!(evidence.is_outside_kill(now), expected, "{oom_killed:?}");
        }
    }

    #[test]
    fn an_engine_that_had_failed_before_killed_itself() {
        let now = Instant::now() + Duration::from_secs(60);
        for (before, expected) in [(0, true), (1, true), (4, false)] {
            let failing_since = Some(now - Duration::from_secs(before));
            let hung = EndEvidence { failing_since, ..evidence(None, Some((killed(Signal::KILL), now))) };
            assert_eq!(hung.is_outside_kill(now + Duration::from_secs(3)), expected, "{before} s");
        }
    }
}
