//! The controller's last observation and decision, as a file for `hostler up`, `wait` and `ps`,
//! which may run on another login node.

use std::collections::BTreeMap;
use std::time::SystemTime;

use hostler_cluster::BudgetLeft;
use serde::{Deserialize, Serialize};

/// All entries after one step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FleetStatus {
    /// When the step was taken. The endpoint, not this time, says whether the controller lives: a
    /// step may wait for the scheduler.
    pub at: SystemTime,
    pub entries: Vec<EntryStatus>,
    /// Why scheduler or router did not answer in this step; empty if both did.
    pub trouble: String,
}

/// An entry, its jobs and its state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EntryStatus {
    pub name: String,
    pub model: String,
    /// The entry's `asked` as of this step.
    #[serde(default)]
    pub asked: u64,
    /// Desired number of nodes now.
    pub wanted: u32,
    /// Number of nodes that serve.
    pub ready: u32,
    pub jobs: Vec<JobStatus>,
    /// Jobs that failed since one served for a while.
    pub failures: u32,
    /// Seconds until submissions continue after a failure.
    pub pause: Option<u64>,
    /// Whether submissions have ended because too many jobs failed in a row.
    #[serde(default)]
    pub given_up: bool,
    /// Seconds until the entry may submit again, if it lacks jobs and has submitted all that its
    /// size allows in a quarter of an hour.
    #[serde(default)]
    pub limited: Option<u64>,
    /// What is left of its budget; `None` if it has none.
    #[serde(default)]
    pub budget: Option<BudgetLeft>,
    /// Why the scheduler refused the last submission; empty if it did not.
    pub refusal: String,
    /// What a cold start is expected to be made of: seconds by the names of its parts.
    #[serde(default)]
    pub cold_start: BTreeMap<String, u64>,
}

/// A job of an entry.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobStatus {
    /// Id, as the scheduler's own commands take it.
    pub id: String,
    /// `queued`, `held`, `waiting for its agent`, `loading`, `ready`, `draining`, `failed`,
    /// `suspended` or `ending`.
    pub state: String,
    /// The scheduler's own words about the job; empty if it has none.
    pub comment: String,
    pub host: String,
    /// Seconds until the scheduler is expected to start the job.
    pub starts_in: Option<u64>,
    /// Seconds until the job ends.
    pub ends_in: Option<u64>,
}
