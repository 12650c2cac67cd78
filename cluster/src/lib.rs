//! Decides which batch jobs keep a fleet's size: when to submit, replace, drain or cancel them.
//!
//! Everything here is a pure function or plain data, and time is an argument. The controller
//! queries scheduler and router, calls [`decide`] and carries out its actions. This crate uses only
//! types from crate `scheduler`.

mod budget;
mod decide;
mod entry;
mod estimates;
mod failures;
mod memory;
mod node_time;
mod observation;
mod pace;
#[cfg(test)]
mod simulation;
mod size;
mod stages;
mod succession;

use std::time::{Duration, SystemTime};

pub use budget::{Budget, BudgetLeft};
pub use decide::{Action, decide};
pub use entry::{EntryError, FleetEntry, FleetSize};
pub use memory::Memory;
pub use node_time::{NodeLedger, NodeTime};
pub use observation::{Demand, GoneAgent, NodeState, Observation, ObservedJob};
pub use succession::{ControllerJob, SuccessionAction, SuccessionMemory, decide_succession, find_successors};

/// Time since `then`, or zero if the clock was set back.
fn since(now: SystemTime, then: SystemTime) -> Duration {
    now.duration_since(then).unwrap_or_default()
}
