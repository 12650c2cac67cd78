//! Input of one step: the entry's listed jobs joined with the router's view of their nodes, and the
//! demand for the model.

use std::time::{Duration, SystemTime};

use hostler_scheduler::{JobState, RunTime};

/// A step's view of an entry. The list is complete, and was read after the previous step's
/// actions.
#[derive(Debug, Clone, Default)]
pub struct Observation {
    /// Jobs that have not ended, with each part of an array on its own.
    pub jobs: Vec<ObservedJob>,
    /// Jobs whose agents have gone lately.
    pub gone: Vec<GoneAgent>,
    pub demand: Demand,
    /// Hash of the script and arguments of jobs submitted now. Jobs of another form were submitted
    /// with other settings.
    pub form: u64,
}

/// An agent that has gone.
#[derive(Debug, Clone)]
pub struct GoneAgent {
    /// Id of its job.
    pub job: String,
    /// When, by the controller's own clock.
    pub at: SystemTime,
    /// Whether it was told to leave and did, as that of a job which the scheduler preempts.
    pub has_drained: bool,
}

#[derive(Debug, Clone)]
pub struct ObservedJob {
    /// Id, as the scheduler's own commands take it.
    pub id: String,
    pub state: JobState,
    /// Submission time by the scheduler's clock, which is not compared with ours: only differences
    /// between its times are used.
    pub submitted: Option<SystemTime>,
    pub started: Option<SystemTime>,
    /// How long the run may last; `None` if unknown or unlimited.
    pub run_time: Option<RunTime>,
    pub node: NodeState,
    /// Requests in flight on the job's node.
    pub in_flight: u32,
    /// Requests that the node has taken since its agent started.
    pub served: u64,
    /// What the start of its engine was made of, once it is ready: names of parts, and the time of
    /// each.
    pub start_parts: Vec<(String, Duration)>,
}

impl ObservedJob {
    pub(crate) fn is_ready(&self) -> bool {
        self.state == JobState::Running && self.node == NodeState::Ready
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.state == JobState::Running && self.node == NodeState::Failed
    }

    /// Whether the job has started. A held job counts as queued: whoever holds it may release it.
    pub(crate) fn has_started(&self) -> bool {
        self.state.has_started()
    }
}

/// The router's view of the node whose agent runs in a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeState {
    NotAttached,
    /// A replica has not answered for the first time yet.
    Loading,
    /// A replica takes requests, and none is in its first start.
    Ready,
    Draining,
    /// No replica takes requests, and none will without an operator.
    Failed,
}

/// Client demand for the entry's model.
#[derive(Debug, Clone, Copy, Default)]
pub struct Demand {
    /// Requests waiting in the router.
    pub waiting: u32,
    pub in_flight: u32,
    /// Time since the last request, including refused ones; `None` if none is known.
    pub last_request: Option<Duration>,
}

impl Demand {
    /// Whether somebody has requested the model within this time.
    pub(crate) fn is_within(&self, time: Duration) -> bool {
        self.waiting > 0 || self.in_flight > 0 || self.last_request.is_some_and(|ago| ago < time)
    }
}
