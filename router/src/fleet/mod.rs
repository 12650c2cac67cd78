//! All replicas as this router knows them: one task writes, everybody else reads an immutable view.
//!
//! `session` turns what an agent says into updates, `writer` applies them and publishes a `FleetView`; `caches` is to the affinity index
//! what `writer` is to the view. `own` is what this router itself has at a replica.

mod cache;
mod caches;
mod directives;
mod own;
mod session;
mod view;
mod writer;

pub use cache::{Cache, CacheFigures};
pub use caches::Caches;
pub use directives::{Directives, ReplicaOrder};
pub use own::{Booking, InFlight, Own};
pub use session::Sessions;
pub(crate) use session::attach;
pub use view::{FleetView, Load, Model, Node, Phase, Replica, State};
pub use writer::{Fleet, Update};

#[cfg(test)]
pub(crate) mod tests;
