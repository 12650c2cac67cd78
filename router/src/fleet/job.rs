//! The batch job that a node's agent runs in, as its reports describe it. Placement reads the job's
//! end, and errors name the job.

use std::sync::Arc;
use std::time::Duration;

use strum::IntoStaticStr;
use tokio::time::Instant;

/// The scheduler of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Scheduler {
    Pbs,
    Slurm,
}

/// A run of a batch job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Job {
    pub scheduler: Scheduler,
    /// The id as the scheduler's own commands take it.
    pub id: String,
    pub array_index: Option<u32>,
    /// Counts from 1, and grows when the job is requeued.
    pub run: u32,
    /// When the scheduler ends the job, if known.
    pub ends_at: Option<Instant>,
    /// When the job's agent begins to leave, never after `ends_at`.
    pub leaves_at: Option<Instant>,
}

/// A run of a job on one node that is over.
#[derive(Debug, Clone)]
pub(crate) struct GoneJob {
    pub node: Arc<str>,
    pub job: Arc<Job>,
    pub gone_at: Instant,
    /// How the job's agent went, and why its engines failed.
    pub reason: Arc<str>,
    /// Its agent was told to leave and did, and none of its engines had failed.
    pub has_drained: bool,
    /// The life of the agent.
    pub(super) agent_run: u64,
}

/// Longest id of a job in bytes. PBS has 63 for a server's name, and Slurm only numbers.
const MAX_ID_BYTES: usize = 128;

/// Longest time that a job has left. Slurm says that a job without a time limit ends after a year.
const MAX_TIME_LEFT: Duration = Duration::from_secs(2 * 365 * 24 * 3600);

impl Scheduler {
    /// The scheduler with this name, if there is one.
    #[must_use]
    pub(super) fn parse(word: &str) -> Option<Self> {
        [Self::Pbs, Self::Slurm].into_iter().find(|scheduler| scheduler.as_str() == word)
    }

    /// The word for people and scripts.
    #[must_use]
    pub(crate) fn as_str(self) -> &'static str {
        self.into()
    }
}

impl Job {
    /// Whether an id can appear in a line for people.
    #[must_use]
    pub(super) fn is_id(id: &str) -> bool {
        !id.is_empty() && id.len() <= MAX_ID_BYTES && id.chars().all(|letter| letter.is_ascii_graphic())
    }

    /// The moment in this many milliseconds.
    #[must_use]
    pub(super) fn moment(now: Instant, in_ms: u64) -> Instant {
        now + Duration::from_millis(in_ms).min(MAX_TIME_LEFT)
    }

    /// Whether this is a later run of the same job. The earlier run is then over.
    #[must_use]
    pub(super) fn is_rerun_of(&self, earlier: &Self) -> bool {
        self.scheduler == earlier.scheduler && self.id == earlier.id && self.run > earlier.run
    }
}

/// Shows `job 12.head run 2`, or without the run if it is the first.
impl std::fmt::Display for Job {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "job {}", self.id)?;
        if self.run > 1 { write!(formatter, " run {}", self.run) } else { Ok(()) }
    }
}
