//! Agents without engines.
//!
//! Each attaches to a real router, reports replicas that do not exist, and answers requests on its
//! lanes. A thousand replicas then fit into one process. The wire, the lanes and the pauses between
//! attempts are those of a real agent.

mod agent;
mod attached;
mod replica;
mod tally;

pub use agent::{Agent, Agents};
pub use attached::{AttachRequest, Attachment, attach};
pub use replica::{MODEL, Replica};
pub use tally::{Tally, Traffic};
