//! All replicas as this router knows them: one task writes, everybody else reads an immutable view.
//!
//! `session` turns what an agent says into updates, `writer` applies them and publishes a `FleetView`; `caches` is to the affinity index
//! what `writer` is to the view. `own` is what this router itself has at a replica.

mod replica_cache;
mod index_writer;
mod directives;
mod local_load;
mod session;
mod view;
mod fleet_writer;

pub use replica_cache::{ReplicaCache, CacheStats};
pub use index_writer::CacheReportQueue;
pub use directives::Directives;
pub use local_load::{InFlightCost, InFlight, LocalLoad};
pub use session::SessionDeps;
pub(crate) use session::attach;
pub use view::{FleetView, Load, Model, Node, Phase, Replica, ReplicaStatus};
pub use fleet_writer::{Fleet, FleetUpdate};

#[cfg(test)]
pub(crate) mod tests;
