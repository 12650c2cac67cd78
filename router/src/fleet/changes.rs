//! What changes of nodes and replicas are called, in the log and in the events of the last hour.

use std::sync::Arc;

use super::replica_status::Phase;
use super::view::{Node, Replica};
use crate::event_log::EventLog;

/// How a node has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NodeArrival {
    New,
    /// Its connection had been lost.
    Again,
    /// Another connection, or another agent, has replaced the one before.
    Replaced,
}

impl NodeArrival {
    pub(super) fn again(was_attached: bool) -> Self {
        if was_attached { Self::Replaced } else { Self::Again }
    }

    /// The event's words, once the node's replicas are known.
    pub(super) fn words<'a>(self, node: &Node, replicas: impl ExactSizeIterator<Item = &'a Arc<Replica>>) -> String {
        let (name, all) = (&node.name, replicas.len());
        let ready = replicas.filter(|replica| replica.state.phase == Phase::Ready).count();
        let how = match self {
            Self::New => "has come",
            Self::Again => "is connected again",
            Self::Replaced => "has another connection",
        };
        format!("node {name} {how}: {ready} of its {all} replicas ready")
    }
}

/// Writes that a replica is in another phase or has another engine. `before` is its phase and epoch
/// until then; `None` for a new replica.
pub(super) fn note_replica(events: &EventLog, replica: &Replica, before: Option<(Phase, u64)>) {
    let (id, phase) = (&replica.id, replica.state.phase);
    if before.is_none_or(|(before, _)| before != phase) {
        tracing::info!(event = "replica_phase", replica = %id, phase = phase.as_str(), reason = replica.state.reason, "phase");
    }
    // On its way up an engine is of interest only once it serves.
    if before.is_some() && matches!(phase, Phase::Starting | Phase::Loading) {
        return;
    }
    let because = reason(replica).map(|reason| format!(": {reason}")).unwrap_or_default();
    let words = match before {
        None => format!("{id} has come: {}{because}", phase.as_str()),
        Some((before, _)) if before != phase => format!("{id} {} → {}{because}", before.as_str(), phase.as_str()),
        Some(_) => format!("{id} has another engine, {}{because}", phase.as_str()),
    };
    events.record("replica_phase", id, &words, matches!(phase, Phase::Failed | Phase::Quarantined));
}

/// Why a replica does not serve: the first line of what its engine failed of, or of what its agent
/// says.
fn reason(replica: &Replica) -> Option<&str> {
    let failure = replica.report.state.as_deref().and_then(|state| state.failure.as_ref());
    let failed = matches!(replica.state.phase, Phase::Failed | Phase::Quarantined);
    let cause = failure.filter(|_| failed).map_or("", |failure| &failure.cause);
    let reason = if cause.is_empty() { &replica.state.reason } else { cause };
    reason.lines().next().filter(|reason| !reason.is_empty() && replica.state.phase != Phase::Ready)
}
