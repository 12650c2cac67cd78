//! All replicas as this router knows them: one task writes, everybody else reads an immutable view.
//!
//! `session` parses what an agent says into updates, `fleet_writer` applies them and publishes a `FleetView`; `index_writer` is to the cache
//! index what `fleet_writer` is to the view. `local_load` is what this router itself has at a replica.

mod agent_report;
mod arrival;
mod directives;
mod fleet_writer;
mod index_writer;
mod local_load;
mod replica_cache;
mod replica_status;
mod session;
mod view;

pub use arrival::Arrival;
pub use directives::{Directives, ReplicaOrder};
pub use fleet_writer::{Fleet, FleetUpdate};
pub use index_writer::CacheReportQueue;
pub use local_load::{InFlight, InFlightCost, LocalLoad};
pub use replica_cache::{CacheStats, ReplicaCache};
pub use replica_status::{EngineLaunch, EngineLoad, Model, Phase, ReplicaLoad, ReplicaStatus};
pub use session::SessionDeps;
pub(crate) use session::attach;
pub use view::{FleetView, Node, Replica};

#[cfg(test)]
pub(crate) mod tests;
