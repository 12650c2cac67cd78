//! Several policies on several workloads.
//!
//! Each run is on one thread, with as many at once as there are cores. The distribution over
//! threads does not change the results.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use thiserror::Error;

use crate::fleet::SimulatedFleet;
use crate::measure::{Measures, Objectives, measure};
use crate::policy::PolicyName;
use crate::run;
use crate::workload::Workload;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    pub workload: String,
    pub policy: String,
    #[serde(flatten)]
    pub measures: Measures,
}

/// A request that does not fit a replica.
#[derive(Debug, Error)]
#[error("{workload} has a request of {longest} tokens, and a replica's KV cache holds {kv_tokens}: raise --kv-tokens")]
pub struct TooLong {
    workload: String,
    longest: u32,
    kv_tokens: u32,
}

/// Whether progress is shown on standard error; never if that is not a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    Shown,
    Hidden,
}

/// Runs every policy on every workload.
///
/// Outcomes are in the order of the workloads, then of the policies.
///
/// # Errors
/// When a request does not fit a replica.
pub fn compare(
    workloads: &[Workload],
    policies: &[PolicyName],
    fleet: &SimulatedFleet,
    objectives: &Objectives,
    progress: Progress,
) -> Result<Vec<Outcome>, TooLong> {
    let kv_tokens = fleet.hardware.kv_tokens;
    if let Some(workload) = workloads.iter().find(|workload| workload.max_tokens() > kv_tokens) {
        return Err(TooLong { workload: workload.name.clone(), longest: workload.max_tokens(), kv_tokens });
    }
    let jobs: Vec<(&Workload, PolicyName)> =
        workloads.iter().flat_map(|workload| policies.iter().map(move |policy| (workload, *policy))).collect();
    let bar = bar(jobs.iter().map(|(workload, _)| workload.arrivals.len() as u64).sum(), progress);
    let next = AtomicUsize::new(0);
    let (sender, outcomes) = mpsc::channel();
    let threads = thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
    thread::scope(|scope| {
        for _ in 0..threads {
            let (jobs, next, bar, sender) = (&jobs, &next, &bar, sender.clone());
            scope.spawn(move || {
                while let Some((number, (workload, policy))) = next_job(jobs, next) {
                    let run = run::run(fleet, workload, policy.build(fleet, SEED), &|| bar.inc(1));
                    let measures = measure(&run, objectives);
                    // The receiver is gone only if the whole comparison has been given up.
                    let _ = sender.send((number, Outcome { workload: workload.name.clone(), policy: policy.name(), measures }));
                }
            });
        }
    });
    drop(sender);
    bar.finish_and_clear();
    let mut outcomes: Vec<(usize, Outcome)> = outcomes.into_iter().collect();
    outcomes.sort_by_key(|(number, _)| *number);
    Ok(outcomes.into_iter().map(|(_, outcome)| outcome).collect())
}

/// Seed of the policies' own few random decisions: near-ties and random choices.
///
/// Workloads have a separate seed.
const SEED: u64 = 7;

fn next_job<T: Copy>(jobs: &[T], next: &AtomicUsize) -> Option<(usize, T)> {
    let number = next.fetch_add(1, Ordering::Relaxed);
    Some((number, *jobs.get(number)?))
}

fn bar(requests: u64, progress: Progress) -> ProgressBar {
    let target = if progress == Progress::Shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let style =
        ProgressStyle::with_template("{wide_bar} {pos}/{len} requests, {eta} left").unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(Some(requests), target).with_style(style)
}

#[cfg(test)]
mod tests;
