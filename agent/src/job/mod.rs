//! Facts about the batch job that the agent runs in, from its environment and its scheduler.
//!
//! `clock` follows the end of the job and makes the agent leave before it.

mod clock;

use std::fmt;
use std::time::Duration;

use hostler_scheduler::Scheduler;

pub(crate) use clock::{JobClock, JobFacts, drain_in_time, read_grace};

/// Part of Slurm's `KillWait` reserved for the signal's way, the last reports and a busy host.
const GRACE_MARGIN: Duration = Duration::from_secs(5);

/// Shortest possible grace, because a drain needs some time.
const MIN_GRACE: Duration = Duration::from_secs(1);

/// Time that the agent may live after the scheduler's SIGTERM, if nothing else is known.
///
/// `OpenPBS` 23.06 killed 2.1 to 7.9 s after it in six runs where the job's script died of the
/// signal. Slurm kills after its `KillWait`, 30 s by default.
pub(crate) fn default_grace(scheduler: Scheduler) -> Duration {
    match scheduler {
        Scheduler::Pbs => Duration::from_secs(6),
        Scheduler::Slurm => Duration::from_secs(30) - GRACE_MARGIN,
    }
}

/// Number of this host among those of a job, from 0; `None` outside of a task that has one.
///
/// `srun` numbers its tasks, of which each host has one; PBS numbers the hosts.
pub(crate) fn host_number(scheduler: Scheduler, variable: impl Fn(&str) -> Option<String>) -> Option<u32> {
    let name = match scheduler {
        Scheduler::Pbs => "PBS_NODENUM",
        Scheduler::Slurm => "SLURM_PROCID",
    };
    variable(name)?.parse().ok()
}

/// One run of a batch job, as the environment names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Job {
    pub(crate) scheduler: Scheduler,
    /// Job id as the scheduler's own commands take it: `12.head`, `12[3].head`, `4711`, `4711_3`.
    pub(crate) id: String,
    pub(crate) array_index: Option<u32>,
    /// Number of the run, counted from 1; it grows when the job is requeued.
    ///
    /// PBS has no variable for it; `JobFacts` has the number from its command.
    run: u32,
}

impl Job {
    /// Detects the job of an environment.
    ///
    /// `PBS_NODEFILE` does not count: it is absent in some tasks of a job, and scripts set it
    /// without a job.
    pub(crate) fn detect(variable: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let number = |name: &str| variable(name)?.parse::<u32>().ok();
        if let Some(id) = variable("PBS_JOBID") {
            return Some(Self { scheduler: Scheduler::Pbs, id, array_index: number("PBS_ARRAY_INDEX"), run: 1 });
        }
        let array_index = number("SLURM_ARRAY_TASK_ID");
        let id = match (variable("SLURM_ARRAY_JOB_ID"), array_index) {
            (Some(array), Some(index)) => format!("{array}_{index}"),
            _ => variable("SLURM_JOB_ID")?,
        };
        let run = number("SLURM_RESTART_COUNT").unwrap_or(0).saturating_add(1);
        Some(Self { scheduler: Scheduler::Slurm, id, array_index, run })
    }

    /// Default name of this host's node: `x3001.12` for job `12.head`, and `x3001.19-3` for part 3
    /// of the array `19[].head`.
    ///
    /// Two jobs on one host, or two parts of an array, thus never take each other's name. A job
    /// that was requeued and runs on this host again keeps its name. The number alone is short, and
    /// has only characters that a node's name may have; brackets are not allowed.
    pub(crate) fn node_name(&self, host: &str) -> String {
        let number: String = self.id.chars().take_while(char::is_ascii_alphanumeric).collect();
        let part = self.array_index.map(|index| format!("-{index}")).unwrap_or_default();
        format!("{host}.{number}{part}")
    }
}

impl fmt::Display for Job {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "job {}", self.id)
    }
}

/// Job as a join token names it.
///
/// For an array it is the whole array, if the scheduler has a variable for that.
pub(crate) fn name_for_token(variable: impl Fn(&str) -> Option<String>) -> String {
    ["PBS_JOBID", "SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID"].into_iter().find_map(variable).unwrap_or_default()
}

#[cfg(test)]
mod tests;
