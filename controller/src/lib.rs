//! The controller: keeps the size of a fleet whose nodes are batch jobs.
//!
//! `hostler controller` runs it beside a router, whose operator calls it uses. Crate `cluster`
//! makes the decisions, and crate `scheduler` runs the schedulers' commands.

mod attention;
mod config;
mod expectation;
mod folder;
mod job_settings;
mod join_token;
mod observation;
mod own_job;
mod report;
mod run;
mod scheduler_check;
mod setup;
mod status;
mod step_error;
mod submission;

pub use config::{ClusterConfig, ControllerPlace, SchedulerError};
pub use folder::{Endpoint, FleetFolder, FolderError, HEARTBEAT_LIFETIME, NodeUsage, ProgramFile};
pub use job_settings::JobSettings;
pub use run::{Controller, ControllerEnd};
pub use scheduler_check::check_scheduler;
pub use setup::ControllerSetup;
pub use status::{EntryStatus, FleetStatus, JobStatus};
pub use submission::{JobProgram, build_controller_submission, build_submission};
