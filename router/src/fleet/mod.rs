//! All replicas as this router knows them. One task writes, everybody else reads an immutable view.
//!
//! `session` parses an agent's messages into updates, and `fleet_writer` applies them and publishes
//! a `FleetView`. `index_writer` does the same for the cache index. `local_load` is this router's
//! own work at a replica, and `stream_moves` is how its streams leave the replica. `expectation`
//! holds models without a replica yet. `aliases` decides which names of paths count.

mod agent_report;
mod aliases;
mod arrival;
mod changes;
mod directives;
mod expectation;
mod fleet_writer;
mod gone_jobs;
mod index_writer;
mod job;
mod load_turns;
mod local_load;
mod log_lines;
mod replica_cache;
mod replica_status;
mod session;
mod stream_moves;
mod view;

pub(crate) use arrival::Arrival;
pub(crate) use directives::{Directives, ReplicaOrder};
pub(crate) use expectation::{EntryUse, Expectation, Expectations};
pub(crate) use fleet_writer::Fleet;
pub(crate) use index_writer::CacheReportQueue;
pub(crate) use job::Job;
pub(crate) use load_turns::LoadTurns;
pub(crate) use local_load::{InFlight, InFlightCost, LocalLoad};
pub(crate) use replica_cache::ReplicaCache;
pub(crate) use replica_status::{EngineLaunch, Model, Phase, is_flag};
pub(crate) use session::{SessionDeps, attach, job_message};
pub(crate) use stream_moves::MoveTurn;
pub(crate) use view::{FleetView, Node, Replica};
#[cfg(test)]
pub(crate) use {
    fleet_writer::FleetUpdate,
    replica_cache::CacheTier,
    replica_status::{EngineLoad, ReplicaLoad, ReplicaStatus},
};

#[cfg(test)]
pub(crate) mod tests;
