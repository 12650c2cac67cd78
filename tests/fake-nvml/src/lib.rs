//! Stand-in for NVIDIA's driver library NVML: the C functions that the agent calls, answered from a
//! file that tests write (`state`).
//!
//! The agent loads it if `HOSTLER_NVML_LIB` names it; nothing else about the agent changes.

mod events;
mod install;
mod questions;
mod state;

pub use install::Fake;
pub use state::{Device, Process, Slice, State};
