//! The attempts made for one request: which replicas it may no longer use, and which ones lost it.
//!
//! `Dispatch::find_answer` writes this record, and a stream that waits for a replica takes it along
//! to the next search.

use std::sync::{Arc, Weak};

use tokio::time::Instant;

use super::retry_policy::RetryPolicy;
use crate::engine_life::EngineLife;
use crate::fleet::Replica;
use crate::lanes::Lanes;

#[derive(Debug, Default)]
pub(super) struct Attempts {
    /// Replicas that the request may not go to.
    pub(super) tried: Vec<Arc<str>>,
    pub(super) policy: RetryPolicy,
    /// Attempts that ended without an answer.
    pub(super) losses: Vec<ReplicaLoss>,
}

impl Attempts {
    /// Whether the request may go to any replica, so that it may wait for its turn: it was never
    /// sent, or only to full engines.
    pub(super) fn may_wait(&self) -> bool {
        self.policy.is_untried_or_full() && self.tried.is_empty()
    }

    /// Opens the replica of the last attempt again, which was full.
    pub(super) fn reopen(&mut self, replica: &Replica) {
        self.tried.pop_if(|last| *last == replica.id);
    }
}

/// A replica that lost a request.
#[derive(Debug, Clone)]
pub(super) struct ReplicaLoss {
    life: EngineLife,
    /// Lanes of the lost attachment. Set if only the agent was lost: its engine may live on, and
    /// the agent's successor may keep it.
    lanes: Option<Weak<Lanes>>,
    pub(super) at: Instant,
}

impl ReplicaLoss {
    /// Records the loss of the replica's engine, or of only its agent's connection if `is_agents`.
    pub(super) fn new(replica: &Replica, is_agents: bool, at: Instant) -> Self {
        Self { life: replica.engine_life(), lanes: is_agents.then(|| Arc::downgrade(&replica.lanes)), at }
    }

    /// Whether `replica` is unchanged since it lost the request: its engine has the same life, and
    /// its agent has not attached anew if the attachment was lost.
    pub(super) fn holds(&self, replica: &Replica) -> bool {
        let is_attached_anew = || self.lanes.as_ref().is_some_and(|lanes| !std::ptr::eq(lanes.as_ptr(), Arc::as_ptr(&replica.lanes)));
        replica.has_life(&self.life) && !is_attached_anew()
    }
}
