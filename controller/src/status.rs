//! What the controller last saw and decided, as a file for `hostler up`, `wait` and `ps`, which may run on another login node.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};

/// All entries after one step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FleetStatus {
    /// When the step was taken. Whether the controller lives, its endpoint says: a step may wait for the scheduler.
    pub at: SystemTime,
    pub entries: Vec<EntryStatus>,
    /// Why scheduler or router gave no answer in this step; empty where both did.
    pub trouble: String,
}

/// One entry, its jobs and what is expected of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EntryStatus {
    pub name: String,
    pub model: String,
    /// When somebody had asked for it, as of this step.
    #[serde(default)]
    pub asked: u64,
    /// How many nodes are wanted now.
    pub wanted: u32,
    /// How many nodes serve.
    pub ready: u32,
    pub jobs: Vec<JobStatus>,
    /// Jobs that failed since one served for a while.
    pub failures: u32,
    /// Seconds until something is submitted again after a failure.
    pub pause: Option<u64>,
    /// Whether nothing is submitted any more, because too many jobs have failed in a row.
    #[serde(default)]
    pub given_up: bool,
    /// Seconds until the entry may submit another job, where it has submitted all that its size allows in a quarter of an hour and lacks some.
    #[serde(default)]
    pub limited: Option<u64>,
    /// Why the scheduler refused the last submission; empty where it did not.
    pub refusal: String,
}

/// A job of an entry.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobStatus {
    /// As the scheduler's own commands take it.
    pub id: String,
    /// `queued`, `held`, `waiting for its agent`, `loading`, `ready`, `draining`, `failed`, `suspended` or `ending`.
    pub state: String,
    /// The scheduler's own words about it; empty where it has none.
    pub comment: String,
    pub host: String,
    /// Seconds until the scheduler is expected to start it.
    pub starts_in: Option<u64>,
    /// Seconds until it ends.
    pub ends_in: Option<u64>,
}
