//! Flags of `hostler simulate`, and its work: workloads, runs, a table and files.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use thiserror::Error;

use crate::batch::{Progress, TooLong, compare};
use crate::fleet::SimulatedFleet;
use crate::measure::Objectives;
use crate::plot::svg;
use crate::policy::PolicyName;
use crate::report::{csv, table};
use crate::trace::TraceError;
use crate::workload::{WorkloadKind, WorkloadShape};

/// Compare ways to choose a replica, on a model of engines.
#[derive(Debug, Clone, Args)]
pub struct SimulateArgs {
    /// What the fleet is asked for; several, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "agentic", value_name = "NAMES")]
    pub workload: Vec<WorkloadKind>,
    /// Ways to choose, separated by commas; all without this.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAMES")]
    pub policies: Vec<PolicyName>,
    /// The workload's numbers.
    #[command(flatten)]
    pub shape: WorkloadShape,
    /// The replicas.
    #[command(flatten)]
    pub fleet: SimulatedFleet,
    /// What counts as good.
    #[command(flatten)]
    pub objectives: Objectives,
    /// Write the table as CSV, too.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Write the table as JSON, too.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Draw the times to the first token.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// Why a comparison failed.
#[derive(Debug, Error)]
pub enum SimulateError {
    #[error(transparent)]
    Trace(#[from] TraceError),
    #[error(transparent)]
    TooLong(#[from] TooLong),
    #[error("cannot write {file}: {source}")]
    Write { file: PathBuf, source: std::io::Error },
}

/// Runs the comparison that the flags describe, and returns the table; files are written.
///
/// # Errors
/// When a trace cannot be read, a request does not fit a replica, or a file cannot be written.
pub fn simulate(args: &SimulateArgs) -> Result<String, SimulateError> {
    let workloads = args.workload.iter().map(|kind| args.shape.workload(*kind)).collect::<Result<Vec<_>, _>>()?;
    let policies = if args.policies.is_empty() { PolicyName::all() } else { &args.policies };
    let outcomes = compare(&workloads, policies, &args.fleet, &args.objectives, Progress::Shown)?;
    if let Some(file) = &args.csv {
        write(file, &csv(&outcomes))?;
    }
    if let Some(file) = &args.json {
        // These numbers and strings can always be written as JSON.
        write(file, &(serde_json::to_string_pretty(&outcomes).unwrap_or_default() + "\n"))?;
    }
    if let Some(file) = &args.svg {
        write(file, &svg(&outcomes))?;
    }
    Ok(table(&outcomes))
}

fn write(file: &Path, text: &str) -> Result<(), SimulateError> {
    fs::write(file, text).map_err(|source| SimulateError::Write { file: file.to_owned(), source })
}

#[cfg(test)]
mod tests;
