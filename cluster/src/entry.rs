//! An entry of a fleet: a model, and how many nodes serve it. Entries are parsed from TOML and
//! checked while parsing.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::budget::Budget;

/// Most nodes of an entry. Slurm takes no larger array with the default `MaxArraySize` of 1001.
const MAX_NODES: u32 = 1000;

/// Most bytes in a name, which becomes part of the jobs' names.
const MAX_NAME_BYTES: usize = 64;

/// Shortest walltime. Schedulers count in minutes, and an agent takes up to a quarter of a short
/// job to leave.
const MIN_WALLTIME: Duration = Duration::from_secs(60);

/// Shortest `idle_after`: the demand is read every few seconds.
const MIN_IDLE_AFTER: Duration = Duration::from_secs(60);

const IDLE_AFTER: Duration = Duration::from_secs(30 * 60);

/// A model and the jobs that serve it, with one replica or node each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "EntryTable", into = "EntryTable")]
pub struct FleetEntry {
    pub name: String,
    pub model: String,
    pub size: FleetSize,
    /// Nodes of each job: 1, or those over which the job's only replica is spread.
    pub nodes_per_replica: u32,
    /// Walltime of each job.
    pub walltime: Duration,
    /// Arguments for every engine, after the agent's own.
    pub engine_args: Vec<String>,
    /// Queue, account and resources of its jobs; each empty for that of the cluster's settings.
    pub queue: String,
    pub account: String,
    pub resources: String,
    pub budget: Budget,
    /// When somebody last asked for the entry, in milliseconds since 1970. A later value restarts
    /// an entry that was given up.
    pub asked: u64,
}

/// Number of desired jobs. Each has as many nodes as its entry's `nodes_per_replica`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FleetSize {
    Fixed(u32),
    /// Grows by one job while requests wait, and shrinks when jobs have had no request for
    /// `idle_after`.
    Elastic {
        min: u32,
        max: u32,
        idle_after: Duration,
    },
}

/// Error in an entry. The quoted word is the entry's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    #[error("{0:?} is no name of an entry: use 1 to {MAX_NAME_BYTES} letters, digits, '-', '_' and '.', a letter or digit first")]
    Name(String),
    #[error("{0:?} has no model: give a local path or a Hugging Face id")]
    NoModel(String),
    #[error("{0:?} does not say how many nodes it has: give `nodes`, or `min` and `max`")]
    NoSize(String),
    #[error(
        "{0:?} has `nodes` beside `min`, `max` or `idle_after`: give `nodes` for a fixed size, or the others for one that follows demand"
    )]
    TwoSizes(String),
    #[error("{name:?} has min = {min} and max = {max}: `max` is at least 1, and `min` is not more than it")]
    Range { name: String, min: u32, max: u32 },
    #[error("{name:?} has {nodes} nodes, of which a replica takes {each}: give a multiple of {each}")]
    Remainder { name: String, nodes: u32, each: u32 },
    #[error("{name:?} wants {nodes} nodes: an array job has {MAX_NODES} at most, so use several entries")]
    TooMany { name: String, nodes: u32 },
    #[error("{0:?} has a walltime of less than a minute: give what the queue allows, such as \"12h\"")]
    Walltime(String),
    #[error("{0:?} has an `idle_after` of less than a minute: give some times what a cold start takes, such as \"30m\"")]
    IdleAfter(String),
}

/// Written form of an entry.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct EntryTable {
    name: String,
    model: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nodes: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    min: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max: Option<u32>,
    #[serde(default = "one", skip_serializing_if = "is_one")]
    nodes_per_replica: u32,
    #[serde(with = "hostler_boot::duration")]
    walltime: Duration,
    #[serde(default, with = "hostler_boot::duration::optional", skip_serializing_if = "Option::is_none")]
    idle_after: Option<Duration>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    engine_args: Vec<String>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    queue: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    account: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    resources: String,
    #[serde(default, with = "moment", skip_serializing_if = "Option::is_none")]
    until: Option<SystemTime>,
    /// Of its budget, as a duration of one node.
    #[serde(default, with = "hostler_boot::duration::optional", skip_serializing_if = "Option::is_none")]
    node_time: Option<Duration>,
    #[serde(default, skip_serializing_if = "is_zero")]
    budget_asked: u64,
    #[serde(default)]
    asked: u64,
}

impl FleetEntry {
    /// Most jobs that the entry can have.
    pub(crate) fn most_jobs(&self) -> usize {
        let (FleetSize::Fixed(nodes) | FleetSize::Elastic { max: nodes, .. }) = self.size;
        usize::try_from(nodes).expect("a u32 fits a usize on every host with GPUs")
    }

    /// Checks an entry, including one changed after parsing.
    ///
    /// # Errors
    /// The error says what to write instead.
    pub fn check(&self) -> Result<(), EntryError> {
        let name = || self.name.clone();
        let is_of_names = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
        let begins_well = self.name.starts_with(|letter: char| letter.is_ascii_alphanumeric());
        if !begins_well || self.name.len() > MAX_NAME_BYTES || !self.name.chars().all(is_of_names) {
            return Err(EntryError::Name(name()));
        }
        if self.model.trim().is_empty() {
            return Err(EntryError::NoModel(name()));
        }
        if self.walltime < MIN_WALLTIME {
            return Err(EntryError::Walltime(name()));
        }
        let jobs = match self.size {
            FleetSize::Fixed(jobs) => jobs,
            FleetSize::Elastic { min, max, .. } if max == 0 || min > max => return Err(EntryError::Range { name: name(), min, max }),
            FleetSize::Elastic { idle_after, .. } if idle_after < MIN_IDLE_AFTER => return Err(EntryError::IdleAfter(name())),
            FleetSize::Elastic { max, .. } => max,
        };
        let nodes = jobs.saturating_mul(self.nodes_per_replica.max(1));
        if nodes > MAX_NODES {
            return Err(EntryError::TooMany { name: name(), nodes });
        }
        Ok(())
    }
}

impl FleetSize {
    /// Size in jobs of this one in nodes, of which each job takes `each`.
    ///
    /// # Errors
    /// When the nodes do not divide. The error has the entry's name.
    pub fn of_nodes(self, name: &str, each: u32) -> Result<Self, EntryError> {
        let each = each.max(1);
        let jobs = |nodes: u32| match nodes.is_multiple_of(each) {
            true => Ok(nodes / each),
            false => Err(EntryError::Remainder { name: name.to_owned(), nodes, each }),
        };
        Ok(match self {
            Self::Fixed(nodes) => Self::Fixed(jobs(nodes)?),
            Self::Elastic { min, max, idle_after } => Self::Elastic { min: jobs(min)?, max: jobs(max)?, idle_after },
        })
    }
}

fn one() -> u32 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes it so")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A moment as `2026-11-29T18:00:00Z`.
mod moment {
    use std::time::SystemTime;

    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(moment: &Option<SystemTime>, serializer: S) -> Result<S::Ok, S::Error> {
        match moment {
            Some(moment) => serializer.collect_str(&humantime::format_rfc3339_seconds(*moment)),
            None => serializer.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SystemTime>, D::Error> {
        let text = String::deserialize(deserializer)?;
        humantime::parse_rfc3339_weak(&text).map(Some).map_err(|_| D::Error::custom("a time such as 2026-11-29T18:00:00Z was expected"))
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes it so")]
fn is_one(number: &u32) -> bool {
    *number == 1
}

impl TryFrom<EntryTable> for FleetEntry {
    type Error = EntryError;

    fn try_from(table: EntryTable) -> Result<Self, EntryError> {
        let size = match (table.nodes, table.min, table.max, table.idle_after) {
            (Some(nodes), None, None, None) => FleetSize::Fixed(nodes),
            (Some(_), ..) => return Err(EntryError::TwoSizes(table.name)),
            (None, Some(min), Some(max), idle_after) => FleetSize::Elastic { min, max, idle_after: idle_after.unwrap_or(IDLE_AFTER) },
            (None, ..) => return Err(EntryError::NoSize(table.name)),
        };
        let budget = Budget { until: table.until, node_time: table.node_time, asked: table.budget_asked };
        let EntryTable { name, model, nodes_per_replica, walltime, engine_args, queue, account, resources, asked, .. } = table;
        let size = size.of_nodes(&name, nodes_per_replica)?;
        let entry = Self { name, model, size, nodes_per_replica, walltime, engine_args, queue, account, resources, budget, asked };
        entry.check()?;
        Ok(entry)
    }
}

impl From<FleetEntry> for EntryTable {
    fn from(entry: FleetEntry) -> Self {
        let (nodes, min, max, idle_after) = match entry.size {
            FleetSize::Fixed(nodes) => (Some(nodes), None, None, None),
            FleetSize::Elastic { min, max, idle_after } => (None, Some(min), Some(max), Some(idle_after)),
        };
        let FleetEntry { name, model, nodes_per_replica, walltime, engine_args, queue, account, resources, budget, asked, .. } = entry;
        let Budget { until, node_time, asked: budget_asked } = budget;
        let in_nodes = |jobs: Option<u32>| jobs.map(|jobs| jobs.saturating_mul(nodes_per_replica));
        let (nodes, min, max) = (in_nodes(nodes), in_nodes(min), in_nodes(max));
        Self {
            name,
            model,
            nodes,
            min,
            max,
            nodes_per_replica,
            walltime,
            idle_after,
            engine_args,
            queue,
            account,
            resources,
            until,
            node_time,
            budget_asked,
            asked,
        }
    }
}

#[cfg(test)]
mod tests;
