//! What the controller sees in one step: the entry's jobs as the scheduler lists them, joined with what the router says of each job's node,
//! and the demand for the model.

use std::time::{Duration, SystemTime};

use hostler_scheduler::{JobState, RunTime};

/// One step's view of an entry. The list is complete, and was read after the actions of the step before were carried out.
#[derive(Debug, Clone, Default)]
pub struct Observation {
    /// Jobs that have not ended, parts of arrays one by one.
    pub jobs: Vec<ObservedJob>,
    pub demand: Demand,
    /// Names what is submitted now: script and arguments of a job. Jobs of another form were submitted with other settings.
    pub form: u64,
}

#[derive(Debug, Clone)]
pub struct ObservedJob {
    /// As the scheduler's own commands take it.
    pub id: String,
    pub state: JobState,
    /// By the scheduler's clock, which is not compared with ours: only what lies between two of its times is used.
    pub submitted: Option<SystemTime>,
    pub started: Option<SystemTime>,
    /// How long its run may last; `None` while it is not known, and for a job without limit.
    pub run_time: Option<RunTime>,
    pub node: NodeState,
    /// Requests in flight on its node.
    pub in_flight: u32,
}

impl ObservedJob {
    pub(crate) fn is_ready(&self) -> bool {
        self.state == JobState::Running && self.node == NodeState::Ready
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.state == JobState::Running && self.node == NodeState::Failed
    }

    /// A job that is held counts as queued: who holds it may release it.
    pub(crate) fn has_started(&self) -> bool {
        self.state.has_started()
    }
}

/// What the router says of the node whose agent runs in a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeState {
    NotAttached,
    /// A replica is still on its way to its first answer.
    Loading,
    /// A replica takes requests, and none is in its first start.
    Ready,
    Draining,
    /// No replica takes requests, and none will without an operator.
    Failed,
}

/// What clients want of the entry's model.
#[derive(Debug, Clone, Copy, Default)]
pub struct Demand {
    /// Requests that wait in the router.
    pub waiting: u32,
    pub in_flight: u32,
    /// How long ago the last request came, also one that was refused. `None`: none is known of.
    pub last_request: Option<Duration>,
}

impl Demand {
    /// Whether somebody has wanted the model within this time.
    pub(crate) fn is_within(&self, time: Duration) -> bool {
        self.waiting > 0 || self.in_flight > 0 || self.last_request.is_some_and(|ago| ago < time)
    }
}
