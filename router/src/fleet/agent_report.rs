//! An agent's last report of a replica, as it came. Operators see it whole; everything else reads
//! what `session` has parsed from it.

use std::sync::Arc;

use hostler_proto::agent::v1::{EngineLoad, GpuReading, Load, ReplicaState};

/// The messages of one report, or the newest of all reports.
#[derive(Debug, Clone, Default)]
pub(crate) struct AgentReport {
    /// Absent when unchanged.
    pub state: Option<Arc<ReplicaState>>,
    /// Absent when unchanged.
    pub load: Option<Load>,
    /// Readings of the replica's GPUs; absent when unchanged or unknown.
    pub gpus: Option<Arc<[GpuReading]>>,
}

impl AgentReport {
    /// Merges the changes of a later report.
    pub(super) fn merge(&mut self, later: Self) {
        self.state = later.state.or_else(|| self.state.take());
        self.load = later.load.or(self.load);
        self.gpus = later.gpus.or_else(|| self.gpus.take());
    }

    /// The engine's own figures, for people and for the metrics; zeros before it has reported.
    pub(crate) fn engine(&self) -> EngineLoad {
        self.load.and_then(|load| load.engine).unwrap_or_default()
    }

    /// The state for operators, with its reading in each GPU, and without an alias that does not
    /// count.
    pub(crate) fn state_for_operators(&self, is_alias_contested: bool) -> Option<ReplicaState> {
        let mut state = self.state.as_deref().cloned()?;
        state.models.retain(|model| !is_alias_contested || model.alias_of.is_empty());
        for gpu in &mut state.gpus {
            gpu.reading = self.gpus.iter().flat_map(|readings| readings.iter()).find(|reading| reading.uuid == gpu.uuid).cloned();
        }
        Some(state)
    }
}
