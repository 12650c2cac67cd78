//! What the cost must hold against: the router's own policy beside all others, on one real trace and on workloads from fixed seeds.
//! `make simulate-gates` runs it before a change of the placement crate lands.

use std::path::Path;

use crate::args::SimulateError;
use crate::batch::{Outcome, Progress, compare};
use crate::fleet::Fleet;
use crate::measure::Objectives;
use crate::policy::Name;
use crate::report::{by_workload, seconds, table};
use crate::workload::{Kind, Shape};

/// Mean time to first token over the best other policy's, at most: what differs less is the luck of a seed.
const AS_GOOD: f64 = 1.03;

/// By what factor it must be better than approximate and load-only policies where the fleet is overloaded.
const BETTER: f64 = 2.0;

/// Workload, rate, requests, and whether it overloads fleets that recompute too much.
const WORKLOADS: [(Kind, f64, usize, bool); 7] = [
    (Kind::Mooncake, 1.5, 6000, false),
    (Kind::Mooncake, 1.7, 6000, true),
    (Kind::Agentic, 3.4, 8000, false),
    (Kind::Agentic, 4.0, 8000, true),
    (Kind::HotPrefix, 24.0, 6000, false),
    (Kind::Bursts, 0.8, 6000, false),
    (Kind::NoSharing, 16.0, 6000, false),
];

/// What the gates said.
#[derive(Debug)]
pub struct Verdict {
    /// Tables, a line for each gate, and `N passed, N failed`.
    pub text: String,
    /// Gates that failed.
    pub failed: usize,
}

/// Runs all gates, with the trace of this file.
///
/// # Errors
/// When the trace cannot be read.
pub fn gates(trace: &Path, progress: Progress) -> Result<Verdict, SimulateError> {
    let mut workloads = Vec::new();
    for (kind, rate, requests, _) in WORKLOADS {
        let shape = Shape { trace: Some(trace.to_owned()), rate: Some(rate), requests, ..Shape::default() };
        workloads.push(shape.workload(kind)?);
    }
    let outcomes = compare(&workloads, Name::all(), &Fleet::default(), &Objectives::default(), progress)?;
    let overloaded: Vec<bool> = WORKLOADS.iter().map(|(.., overloaded)| *overloaded).collect();
    Ok(judge(&outcomes, &overloaded))
}

/// `overloaded` says it of each workload, in their order.
fn judge(outcomes: &[Outcome], overloaded: &[bool]) -> Verdict {
    let mut lines = Vec::new();
    let mut failed = 0;
    let mut gate = |workload: &str, own: f64, most: f64, other: &Outcome, factor: f64| {
        let passed = own <= most;
        failed += usize::from(!passed);
        let word = if passed { "pass" } else { "FAIL" };
        let (own, theirs) = (seconds(own), seconds(other.measures.ttft_mean));
        let wanted = if factor > 1.0 { format!("at most {factor:.2} of") } else { format!("at most 1/{:.0} of", 1.0 / factor) };
        lines.push(format!("{word}  {workload}: mean TTFT {own} s, {wanted} {} with {theirs} s", other.policy));
    };
    for (panel, overloaded) in by_workload(outcomes).into_iter().zip(overloaded) {
        let own_names = [Name::Hostler.name(), Name::HostlerNoHold.name()];
        let Some(own) = panel.iter().find(|outcome| outcome.policy == own_names[0]) else { continue };
        let mean = own.measures.ttft_mean;
        let others = panel.iter().filter(|outcome| !own_names.contains(&outcome.policy));
        let best = others.min_by(|one, other| one.measures.ttft_mean.total_cmp(&other.measures.ttft_mean));
        if let Some(best) = best {
            gate(&own.workload, mean, AS_GOOD * best.measures.ttft_mean, best, AS_GOOD);
        }
        for name in [Name::Radix, Name::RadixTight, Name::LeastRequest].iter().filter(|_| *overloaded).map(|name| name.name()) {
            if let Some(other) = panel.iter().find(|outcome| outcome.policy == name) {
                gate(&own.workload, mean, other.measures.ttft_mean / BETTER, other, 1.0 / BETTER);
            }
        }
    }
    let passed = lines.len() - failed;
    let text = format!("{}\n{}\n{passed} passed, {failed} failed\n", table(outcomes), lines.join("\n"));
    Verdict { text, failed }
}

#[cfg(test)]
mod tests;
