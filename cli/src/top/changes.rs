//! Describes what changed between two answers of the router, and keeps a list of recent events.

use std::collections::VecDeque;
use std::time::SystemTime;

use hostler_proto::agent::v1::{Job, Phase};
use hostler_proto::fleet::v1::{GoneJob, ListResponse, Node, Replica};

use crate::ps::run_words;

/// Events that are kept.
const MAX_EVENTS: usize = 200;

#[derive(Debug)]
pub(super) struct FleetEvent {
    pub(super) at: SystemTime,
    pub(super) words: String,
}

/// Recent events, newest last.
#[derive(Debug, Default)]
pub(super) struct EventLog {
    events: VecDeque<FleetEvent>,
}

impl EventLog {
    pub(super) fn push(&mut self, at: SystemTime, words: String) {
        if self.events.len() >= MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(FleetEvent { at, words });
    }

    /// The latest events, at most this many.
    pub(super) fn latest(&self, most: usize) -> impl Iterator<Item = &FleetEvent> {
        self.events.iter().skip(self.events.len().saturating_sub(most))
    }
}

/// Describes the changes of the fleet.
pub(super) fn changes(before: &ListResponse, after: &ListResponse) -> Vec<String> {
    let mut words = Vec::new();
    for node in &after.nodes {
        match before.nodes.iter().find(|known| known.name == node.name) {
            None => words.push(format!("node {} has come{}", node.name, job_note(node.job.as_ref()))),
            Some(known) => node_changes(known, node, &mut words),
        }
    }
    let is_left = |node: &&Node| !after.nodes.iter().any(|other| other.name == node.name);
    words.extend(before.nodes.iter().filter(is_left).map(|node| format!("node {} is gone", node.name)));
    let is_new = |gone: &&GoneJob| !before.gone_jobs.iter().any(|known| is_same_run(known.job(), gone.job()) && known.node == gone.node);
    words.extend(after.gone_jobs.iter().filter(is_new).map(gone_words));
    words
}

fn node_changes(before: &Node, after: &Node, words: &mut Vec<String>) {
    let name = &after.name;
    match (before.attached, after.attached) {
        (true, false) => words.push(format!("node {name}: its agent is not connected")),
        (false, true) => words.push(format!("node {name}: its agent is connected again")),
        _ => {}
    }
    if let Some(job) = &after.job
        && !before.job.as_ref().is_some_and(|known| is_same_run(known, job))
    {
        words.push(format!("node {name}: job {} has come", run_words(job)));
    }
    for replica in &after.replicas {
        match before.replicas.iter().find(|known| known.id == replica.id) {
            None => words.push(format!("{} has come: {}", replica.id, replica.phase().as_str())),
            Some(known) => words.extend(replica_change(known, replica)),
        }
    }
    let is_left = |replica: &&Replica| !after.replicas.iter().any(|other| other.id == replica.id);
    words.extend(before.replicas.iter().filter(is_left).map(|replica| format!("{} is gone", replica.id)));
}

fn replica_change(before: &Replica, after: &Replica) -> Option<String> {
    let (id, phase) = (&after.id, after.phase().as_str());
    if before.phase() != after.phase() {
        return Some(format!("{id} {} → {phase}{}", before.phase().as_str(), reason_note(after)));
    }
    // The replica went through other phases between two looks.
    (before.epoch != after.epoch && before.epoch > 0).then(|| format!("{id} has another engine, {phase}{}", reason_note(after)))
}

/// Reason for the phase; a serving replica needs none.
fn reason_note(replica: &Replica) -> String {
    let is_down = matches!(replica.phase(), Phase::Failed | Phase::Quarantined);
    let cause = replica.state().failure.as_ref().filter(|_| is_down).map(|failure| failure.cause.as_str());
    let reason = cause.filter(|cause| !cause.is_empty()).unwrap_or_else(|| replica.first_reason());
    if reason.is_empty() || replica.is_ready() { String::new() } else { format!(": {reason}") }
}

fn gone_words(gone: &GoneJob) -> String {
    format!("node {}: job {} is gone: {}", gone.node, run_words(gone.job()), gone.reason.lines().next().unwrap_or_default())
}

fn job_note(job: Option<&Job>) -> String {
    job.map(|job| format!(", job {}", run_words(job))).unwrap_or_default()
}

fn is_same_run(one: &Job, other: &Job) -> bool {
    (&one.scheduler, &one.id, one.array_index, one.run) == (&other.scheduler, &other.id, other.array_index, other.run)
}
