//! Simulator of a fleet: the router's own placement code, and other ways to choose, on a model of
//! engines.
//!
//! It shows how a change of the cost, or another policy, would affect the time to first token,
//! without a GPU. It is a model: its numbers compare policies and predict no hardware. `hostler
//! simulate` and `make simulate-gates` call it.

mod args;
mod batch;
mod blocks;
mod engine;
mod flag_values;
mod fleet;
mod gates;
mod measure;
mod plot;
mod policy;
mod random;
mod report;
mod request;
mod run;
pub mod trace;
mod workload;

pub use args::{SimulateArgs, SimulateError, simulate};
pub use batch::{Outcome, Progress, TooLong, compare};
pub use engine::Hardware;
pub use fleet::SimulatedFleet;
pub use gates::{Verdict, gates};
pub use measure::{Measures, Objectives};
pub use plot::svg;
pub use policy::PolicyName;
pub use report::{csv, table};
pub use request::Request;
pub use trace::TraceError;
pub use workload::{Arrival, ArrivalTime, Workload, WorkloadKind, WorkloadShape};
