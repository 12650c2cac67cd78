//! A simulated fleet: what its replicas are, and what a router can see of them.

use crate::blocks::CacheChanges;
use crate::engine::{EngineLoad, Hardware};
use crate::flag_values::not_negative;

/// What the replicas are, and how far away.
#[derive(Debug, Clone, Copy, PartialEq, clap::Args)]
pub struct SimulatedFleet {
    /// Replicas.
    #[arg(long, default_value_t = 8, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub replicas: u8,
    /// Seconds until the router knows what an engine says of its load and cache. Its own dispatches it knows at once, and answers
    /// pass through it.
    #[arg(long, default_value_t = 0.01, value_name = "SECONDS", value_parser = not_negative)]
    pub delay: f64,
    /// Each replica.
    #[command(flatten)]
    pub hardware: Hardware,
}

impl Default for SimulatedFleet {
    fn default() -> Self {
        Self { replicas: 8, delay: 0.01, hardware: Hardware::default() }
    }
}

/// What an engine says, once a step.
#[derive(Debug, Clone)]
pub(crate) struct ReplicaReport {
    pub(crate) load: EngineLoad,
    pub(crate) changes: CacheChanges,
}

/// What every router can see: its own requests at once, and the engines' words when they arrive.
#[derive(Debug)]
pub(crate) struct FleetState {
    /// Requests that it has sent to each replica and that have not ended.
    pub(crate) in_flight: Vec<u32>,
    pub(crate) loads: Vec<EngineLoad>,
}
