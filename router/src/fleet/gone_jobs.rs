//! Remembers jobs whose agent is gone. A job's own output explains its end later or nowhere, and
//! operators ask the router.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::job::{GoneJob, Job};
use super::replica_status::Phase;
use super::view::{Node, Replica};
use crate::event_log::EventLog;

/// How long a job is remembered after its agent has gone.
const RETENTION: Duration = Duration::from_secs(30 * 60);

/// Most jobs that are remembered. If there are more, the oldest are forgotten.
const MAX_GONE_JOBS: usize = 256;

/// Most characters of an engine's failure that are kept.
const MAX_FAILURE_CHARS: usize = 300;

/// How the agent of a job went that had stopped its engines.
const DRAINED: &str = "drained";

/// The latest gone jobs, the oldest first.
#[derive(Debug)]
pub(super) struct GoneJobs {
    jobs: VecDeque<GoneJob>,
    /// The list that readers get.
    shared: Arc<[GoneJob]>,
    events: EventLog,
}

impl GoneJobs {
    pub(super) fn new(events: EventLog) -> Self {
        Self { jobs: VecDeque::new(), shared: Arc::default(), events }
    }

    pub(super) fn shared(&self) -> Arc<[GoneJob]> {
        self.shared.clone()
    }

    /// Remembers the job of a node whose agent has gone, if it ran in one.
    pub(super) fn record(&mut self, node: &Node, replicas: &BTreeMap<u32, Arc<Replica>>, now: Instant) {
        let Some(job) = node.job.clone() else { return };
        let (reason, has_drained) = (reason(&job, replicas.values(), now), has_drained(replicas.values()));
        tracing::info!(event = "job_gone", node = %node.name, %job, %reason, "a job's agent is gone");
        self.events.record("job_gone", &node.name, &format!("node {}: {job} is gone: {reason}", node.name), !reason.starts_with(DRAINED));
        if self.jobs.len() >= MAX_GONE_JOBS {
            self.jobs.pop_front();
        }
        let gone = GoneJob { node: node.name.clone(), job, gone_at: now, reason: reason.into(), has_drained, agent_run: node.agent_run };
        self.jobs.push_back(gone);
        self.share();
    }

    /// Forgets a job whose agent is back with the same life: only the connection was lost.
    pub(super) fn forget(&mut self, node: &str, agent_run: u64) {
        let before = self.jobs.len();
        self.jobs.retain(|gone| gone.agent_run != agent_run || &*gone.node != node);
        if self.jobs.len() != before {
            self.share();
        }
    }

    /// Forgets jobs that have been gone for long. Returns whether there were any.
    pub(super) fn prune(&mut self, now: Instant) -> bool {
        let kept = self.jobs.partition_point(|gone| now.saturating_duration_since(gone.gone_at) > RETENTION);
        self.jobs.drain(..kept);
        if kept > 0 {
            self.share();
        }
        kept > 0
    }

    fn share(&mut self) {
        self.shared = self.jobs.iter().cloned().collect();
    }
}

/// Whether all engines had stopped because they were told to.
fn has_drained<'a>(mut replicas: impl Iterator<Item = &'a Arc<Replica>>) -> bool {
    replicas
        .all(|replica| replica.state.phase == Phase::Stopped && replica.report.state.as_deref().is_none_or(|state| state.failure.is_none()))
}

/// How the agent went, from its last report, and why its engines failed.
fn reason<'a>(job: &Job, replicas: impl Iterator<Item = &'a Arc<Replica>> + Clone, now: Instant) -> String {
    let has_left = |replica: &Arc<Replica>| replica.state.phase == Phase::Stopped;
    let is_over = job.ends_at.is_some_and(|end| end <= now);
    let how = match (replicas.clone().all(has_left), is_over) {
        (true, _) => DRAINED,
        (false, true) => "agent lost after the job's end",
        (false, false) => "agent lost",
    };
    let failure = |replica: &'a Arc<Replica>| Some((replica, replica.report.state.as_deref()?.failure.as_ref()?));
    let failures = replicas.filter_map(failure).map(|(replica, failure)| format!("; {}: {}", replica.id, failure.cause));
    let failures: String = failures.collect();
    let failures: String = failures.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).take(MAX_FAILURE_CHARS).collect();
    format!("{how}{failures}")
}
