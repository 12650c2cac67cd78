//! Result of a whole measurement: every target's figures, round by round, and the conditions under
//! which they were taken.
//!
//! The drive fills it in. The table, the JSON and the page are three ways to write it, and none of
//! them measures or leaves anything out.

mod html;
mod json;
mod plot;
mod rows;
mod table;

use std::collections::BTreeMap;

pub use html::html;
pub use json::json;
use serde::Serialize;
pub use table::table;

use crate::figures::Figures;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    pub scenario: String,
    /// Time of the beginning in UTC, for people.
    pub began: String,
    /// Requested settings, by the names of the flags; never a key.
    pub settings: BTreeMap<String, String>,
    pub machine: Machine,
    /// Targets in the order of the command line; the others are compared with the first.
    pub targets: Vec<TargetReport>,
}

/// Machine on which the load was made; the targets may run elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// Processor of the machine, or its architecture if the system does not tell.
    pub processor: String,
    pub cores: usize,
    pub system: String,
    pub hostler: String,
}

/// Results of one target.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TargetReport {
    /// Name as on the command line, or the URL.
    pub name: String,
    pub url: String,
    pub model: String,
    /// Figures of each round; empty for a sweep.
    pub rounds: Vec<Figures>,
    /// Steps of a sweep in order, one round after another; empty for other scenarios.
    pub sweep: Vec<SweepStep>,
    /// Where the sweep ended and why; `None` if it reached its last step, and for other scenarios.
    pub broke: Option<String>,
}

/// One step of a sweep.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SweepStep {
    /// Number of the round, from 0.
    pub round: u32,
    /// Requests in flight at any time.
    pub concurrency: u32,
    pub figures: Figures,
}

#[cfg(test)]
mod tests;
