//! All replicas as this router knows them: one task writes, everybody else reads an immutable view.
//!
//! `session` turns what an agent says into updates, `writer` applies them and publishes a `FleetView`.

mod session;
mod view;
mod writer;

pub use session::Directives;
pub use session::Sessions;
pub(crate) use session::attach;
pub use view::{FleetView, InFlight, Load, Model, Node, Own, Phase, Replica, State};
pub use writer::{Fleet, Update};

#[cfg(test)]
mod tests;
