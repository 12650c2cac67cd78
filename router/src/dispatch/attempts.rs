//! What is known of the attempts that were made for one request: where it may not go any more, and where it was lost. The loop of `Dispatch::find_answer` writes it,
//! and a stream that waits for a replica takes it on to the next search.

use std::sync::{Arc, Weak};

use tokio::time::Instant;

use super::retry_policy::RetryPolicy;
use crate::engine_life::EngineLife;
use crate::fleet::Replica;
use crate::lanes::Lanes;

#[derive(Debug, Default)]
pub(super) struct Attempts {
    /// The replicas that it may not go to.
    pub(super) tried: Vec<Arc<str>>,
    pub(super) policy: RetryPolicy,
    /// Where nothing came of an attempt.
    pub(super) losses: Vec<ReplicaLoss>,
}

impl Attempts {
    /// Whether the request was never sent, and may go to any replica.
    pub(super) fn is_first(&self) -> bool {
        self.policy.attempts() == 0 && self.tried.is_empty()
    }
}

/// A replica that has lost a request.
#[derive(Debug, Clone)]
pub(super) struct ReplicaLoss {
    life: EngineLife,
    /// Those of the attachment that was lost, where the engine may live on: its next agent may keep it.
    lanes: Option<Weak<Lanes>>,
    pub(super) at: Instant,
}

impl ReplicaLoss {
    /// The replica's engine was lost, or only the connection to its agent.
    pub(super) fn new(replica: &Replica, is_agents: bool, at: Instant) -> Self {
        Self { life: replica.engine_life(), lanes: is_agents.then(|| Arc::downgrade(&replica.lanes)), at }
    }

    /// Whether `replica` is as it was when it lost the request: the same life of its engine, and the same attachment where that was lost.
    pub(super) fn holds(&self, replica: &Replica) -> bool {
        let is_attached_anew = || self.lanes.as_ref().is_some_and(|lanes| !std::ptr::eq(lanes.as_ptr(), Arc::as_ptr(&replica.lanes)));
        replica.has_life(&self.life) && !is_attached_anew()
    }
}
