//! A step's view of an entry: its listed jobs joined with the router's nodes by job, and the
//! demand for its names. Pure.

use std::time::{Duration, SystemTime};

use hostler_api::given_model_names;
use hostler_cluster::{Demand, FleetEntry, GoneAgent, Memory, NodeState, Observation, ObservedJob};
use hostler_proto::agent::v1::{Phase, Start};
use hostler_proto::fleet::v1::{ListResponse, ModelDemand, Node, Replica};
use hostler_scheduler::{ScheduledJob, is_same_job};

/// Knowledge of an entry after a step.
pub(crate) struct EntryView<'a> {
    pub(crate) entry: &'a FleetEntry,
    /// Names by which clients ask for the model.
    pub(crate) names: &'a [String],
    pub(crate) memory: &'a Memory,
    pub(crate) jobs: &'a [ScheduledJob],
    pub(crate) nodes: &'a [Node],
    /// Why the scheduler refused the last submission; empty if it did not.
    pub(crate) refusal: &'a str,
}

impl EntryView<'_> {
    /// Time since a job's submission, by the controller's own clock if it remembers that.
    pub(crate) fn waited(&self, job: &ScheduledJob, now: SystemTime) -> Option<Duration> {
        now.duration_since(self.memory.submitted(&job.id).or(job.submitted)?).ok()
    }

    /// Time since the present run began, likewise.
    pub(crate) fn ran(&self, job: &ScheduledJob, now: SystemTime) -> Option<Duration> {
        now.duration_since(self.memory.started(&job.id).or(job.started)?).ok()
    }

    /// Time left until the job starts, if the scheduler estimates that.
    pub(crate) fn estimated_wait(&self, job: &ScheduledJob, now: SystemTime) -> Option<Duration> {
        // The scheduler's clock may differ from ours, so only its estimate of the total wait is
        // used.
        let in_all = job.estimated_start?.duration_since(job.submitted?).ok()?;
        Some(in_all.saturating_sub(self.waited(job, now)?))
    }
}

/// Names by which clients ask for an entry's model: those given to its engines, else the model
/// itself.
///
/// An entry without its own arguments uses those of the settings.
pub(crate) fn model_names(entry: &FleetEntry, configured: &[String]) -> Vec<String> {
    let arguments = if entry.engine_args.is_empty() { configured } else { &entry.engine_args };
    let given = given_model_names(arguments).filter(|names| !names.is_empty());
    given.unwrap_or_else(|| vec![&entry.model]).into_iter().map(str::to_owned).collect()
}

/// Input of `decide`.
pub(crate) fn observe(jobs: &[ScheduledJob], listed: &ListResponse, names: &[String], now: SystemTime) -> Observation {
    let observed = jobs.iter().map(|job| {
        let node = find_node(&listed.nodes, &job.id);
        ObservedJob {
            id: job.id.clone(),
            state: job.state,
            submitted: job.submitted,
            started: job.started,
            run_time: job.run_time,
            node: node_state(node),
            in_flight: node.map(in_flight).unwrap_or_default(),
            served: node.map(served).unwrap_or_default(),
            start_parts: node.map(start_parts).unwrap_or_default(),
        }
    });
    let gone = listed.gone_jobs.iter().filter_map(|gone| {
        let at = now.checked_sub(Duration::from_millis(gone.gone_ms_ago))?;
        Some(GoneAgent { job: gone.job.as_ref()?.id.clone(), at, has_drained: gone.drained })
    });
    Observation { jobs: observed.collect(), gone: gone.collect(), demand: sum_demand(listed, names), ..Observation::default() }
}

/// The node whose agent runs in a job. A requeued job may have been on another host before, whose
/// node is gone.
pub(crate) fn find_node<'a>(nodes: &'a [Node], job: &str) -> Option<&'a Node> {
    let of_job = nodes.iter().filter_map(|node| Some((node, node.job.as_ref().filter(|found| is_same_job(&found.id, job))?)));
    of_job.max_by_key(|(node, job)| (node.attached, job.run)).map(|(node, _)| node)
}

pub(crate) fn node_state(node: Option<&Node>) -> NodeState {
    let Some(node) = node.filter(|node| node.attached) else { return NodeState::NotAttached };
    // The last phase of a silent replica counts: its agent may only be slow.
    let has = |phases: &[Phase]| node.replicas.iter().any(|replica| phases.contains(&replica.state().phase()));
    let starts = [Phase::Unspecified, Phase::Starting, Phase::Loading];
    let is_in_first_start = |replica: &Replica| starts.contains(&replica.state().phase()) && replica.state().restarts == 0;
    if node.replicas.is_empty() || node.replicas.iter().any(is_in_first_start) {
        NodeState::Loading
    } else if has(&[Phase::Ready, Phase::Sleeping]) {
        // Whoever puts an engine to sleep wants to keep its node.
        NodeState::Ready
    } else if has(&starts) || has(&[Phase::Failed]) {
        // A failed engine is restarted. An agent ends by itself if none of its engines ever starts.
        NodeState::Loading
    } else if has(&[Phase::Draining]) {
        NodeState::Draining
    } else {
        // Stopped or quarantined: an agent does not end when its engines were drained.
        NodeState::Failed
    }
}

/// Progress of the engine that is furthest in loading, in words, and its seconds left if known.
pub(crate) fn progress(node: &Node) -> Option<(String, Option<Duration>)> {
    let progress = node.replicas.iter().filter_map(|replica| replica.state().progress.as_ref());
    let first = progress.max_by_key(|progress| progress.percent)?;
    let left = Some(u64::from(first.seconds_left)).filter(|left| *left > 0);
    Some((format!("{} {} %", first.stage, first.percent), left.map(Duration::from_secs)))
}

/// Parts of the start of the node's engine that took longest.
fn start_parts(node: &Node) -> Vec<(String, Duration)> {
    let starts = node.replicas.iter().filter_map(|replica| replica.state().start.as_ref().map(Start::parts));
    let longest = starts.max_by(|one, other| total(one).total_cmp(&total(other))).unwrap_or_default();
    let part = |(part, seconds): (&str, f32)| Some((part.to_owned(), Duration::try_from_secs_f32(seconds).ok()?));
    longest.into_iter().filter_map(part).collect()
}

fn total(parts: &[(&str, f32)]) -> f32 {
    parts.iter().map(|(_, seconds)| seconds).sum()
}

fn in_flight(node: &Node) -> u32 {
    let of_replica = |replica: &Replica| replica.load().in_flight.max(replica.local_in_flight);
    node.replicas.iter().map(of_replica).sum()
}

fn served(node: &Node) -> u64 {
    node.replicas.iter().map(|replica| replica.load().served).sum()
}

/// Demand for any of these names, or for the alias of one. Requests in flight are the same for all
/// names of an engine.
fn sum_demand(listed: &ListResponse, names: &[String]) -> Demand {
    let is_wanted = |demand: &&ModelDemand| names.contains(&demand.model) || names.contains(&demand.alias_of);
    let of_names = || listed.demand.iter().filter(is_wanted);
    Demand {
        waiting: of_names().map(|demand| demand.waiting).sum(),
        in_flight: of_names().map(|demand| demand.in_flight).max().unwrap_or_default(),
        last_request: of_names().filter_map(|demand| demand.last_request_ms_ago).min().map(Duration::from_millis),
    }
}

#[cfg(test)]
pub(crate) mod tests;
