//! What a whole measurement came to: every target's figures, round by round, and the conditions under which they were taken. The drive
//! fills it in; the table, the JSON and the page are three ways to write it down, and none of them measures or leaves anything out.

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
    /// When it began, as people write it, in UTC.
    pub began: String,
    /// What was asked for, by the names of the flags; never a key.
    pub settings: BTreeMap<String, String>,
    pub machine: Machine,
    /// In the order of the command line; the first is the one that the others are compared with.
    pub targets: Vec<TargetReport>,
}

/// The machine on which the load was made; the targets may run elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// Its processor, or its architecture where the system does not tell.
    pub processor: String,
    pub cores: usize,
    pub system: String,
    pub hostler: String,
}

/// The results of one target.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TargetReport {
    /// As on the command line, or its URL.
    pub name: String,
    pub url: String,
    pub model: String,
    /// One for each round; empty for a sweep.
    pub rounds: Vec<Figures>,
    /// The steps of a sweep in order, all rounds after each other; empty for other scenarios.
    pub sweep: Vec<SweepStep>,
    /// Where the sweep ended and why; `None` when it reached its last step, and for other
    /// scenarios.
    pub broke: Option<String>,
}

/// One step of a sweep.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SweepStep {
    /// The round, from 0.
    pub round: u32,
    /// Requests in flight at any time.
    pub concurrency: u32,
    pub figures: Figures,
}

#[cfg(test)]
mod tests;
