//! All replicas as this router knows them: one task writes, everybody else reads an immutable view.
//!
//! `session` turns what an agent says into updates, `writer` applies them and publishes a `FleetView`; `caches` is to the affinity index
//! what `writer` is to the view. `own` is what this router itself has at a replica.

mod directives;
mod fleet_writer;
mod index_writer;
mod local_load;
mod replica_cache;
mod session;
mod view;

pub use directives::{Directives, ReplicaOrder};
pub use fleet_writer::{Fleet, FleetUpdate};
pub use index_writer::CacheReportQueue;
pub use local_load::{InFlight, InFlightCost, LocalLoad};
pub use replica_cache::{CacheStats, ReplicaCache};
pub use session::SessionDeps;
pub(crate) use session::attach;
pub use view::{FleetView, Load, Model, Node, Phase, Replica, ReplicaStatus};

#[cfg(test)]
pub(crate) mod tests;
