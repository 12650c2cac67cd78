//! The controller: keeps the size of a fleet whose nodes are batch jobs. `hostler controller` runs it beside a router, whose operators' calls it uses.
//! The decisions are crate `cluster`'s, the schedulers' commands crate `scheduler`'s.

mod config;
mod expectation;
mod folder;
mod join_token;
mod observation;
mod report;
mod run;
mod scheduler_check;
mod status;
mod submission;

pub use config::{ClusterConfig, SchedulerError};
pub use folder::{Endpoint, FleetFolder, FolderError, HEARTBEAT_LIFETIME};
pub use run::{Controller, ControllerSetup};
pub use scheduler_check::check_scheduler;
pub use status::{EntryStatus, FleetStatus, JobStatus};
pub use submission::{AgentCommand, build_submission};
