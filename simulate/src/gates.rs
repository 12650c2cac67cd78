//! Gates for the cost: the router's own policy beside all others, on one real trace and on
//! workloads from fixed seeds.
//!
//! Further gates check whether it spreads a light load over equal replicas, keeps answers away from
//! replicas that end before them, and uses copies in the hosts' memory. Run `make simulate-gates`
//! before a change of the placement crate lands.

mod deadlines;
mod even_load;
mod host_tier;

use std::path::Path;

use crate::args::SimulateError;
use crate::batch::{Outcome, Progress, compare};
use crate::fleet::SimulatedFleet;
use crate::measure::Objectives;
use crate::policy::PolicyName;
use crate::report::{by_workload, seconds, table};
use crate::workload::{WorkloadKind, WorkloadShape};

/// Upper bound of the mean time to first token over the best other policy's.
///
/// A smaller difference is the luck of a seed.
const MAX_TTFT_RATIO: f64 = 1.03;

/// Required speedup over approximate and load-only policies if the fleet is overloaded.
const MIN_SPEEDUP: f64 = 2.0;

/// Workload, rate, requests, and whether it overloads fleets that recompute too much.
const WORKLOADS: [(WorkloadKind, f64, usize, bool); 7] = [
    (WorkloadKind::Mooncake, 1.5, 6000, false),
    (WorkloadKind::Mooncake, 1.7, 6000, true),
    (WorkloadKind::Agentic, 3.4, 8000, false),
    (WorkloadKind::Agentic, 4.0, 8000, true),
    (WorkloadKind::HotPrefix, 24.0, 6000, false),
    (WorkloadKind::Bursts, 0.8, 6000, false),
    (WorkloadKind::NoSharing, 16.0, 6000, false),
];

/// Result of one gate.
#[derive(Debug)]
struct GateResult {
    passed: bool,
    /// Measured value, and its limit.
    text: String,
}

#[derive(Debug)]
pub struct Verdict {
    /// Tables, a line for each gate, and `N passed, N failed`.
    pub text: String,
    pub failed: usize,
}

/// Runs all gates, with the trace of this file.
///
/// # Errors
/// When the trace cannot be read.
pub fn gates(trace: &Path, progress: Progress) -> Result<Verdict, SimulateError> {
    let mut workloads = Vec::new();
    for (kind, rate, requests, _) in WORKLOADS {
        let shape = WorkloadShape { trace: Some(trace.to_owned()), rate: Some(rate), requests, ..WorkloadShape::default() };
        workloads.push(shape.workload(kind)?);
    }
    let mut outcomes = compare(&workloads, PolicyName::all(), &SimulatedFleet::default(), &Objectives::default(), progress)?;
    let overloaded: Vec<bool> = WORKLOADS.iter().map(|(.., overloaded)| *overloaded).collect();
    let mut results = judge(&outcomes, &overloaded);
    results.extend(deadlines::judge(&deadlines::measure_jobs(false), &deadlines::measure_jobs(true)));
    results.extend(even_load::FLEETS.iter().map(|fleet| fleet.judge(&fleet.counts())));
    results.extend(host_tier::judge_ample(&outcomes, &host_tier::measure_ample(&workloads, progress)?));
    let short = host_tier::measure_short(progress)?;
    results.extend(host_tier::judge_short(&short));
    outcomes.extend(short);
    Ok(sum_up(&outcomes, &results))
}

fn sum_up(outcomes: &[Outcome], results: &[GateResult]) -> Verdict {
    let lines: String = results.iter().map(|gate| format!("{}  {}\n", if gate.passed { "pass" } else { "FAIL" }, gate.text)).collect();
    let failed = results.iter().filter(|gate| !gate.passed).count();
    Verdict { text: format!("{}\n{lines}{} passed, {failed} failed\n", table(outcomes), results.len() - failed), failed }
}

/// Judges the outcomes.
///
/// `overloaded` says for each workload, in order, whether it overloads the fleet.
fn judge(outcomes: &[Outcome], overloaded: &[bool]) -> Vec<GateResult> {
    let mut results = Vec::new();
    let mut gate = |workload: &str, own: f64, most: f64, other: &Outcome, factor: f64| {
        let passed = own <= most;
        let (own, theirs) = (seconds(own), seconds(other.measures.ttft_mean));
        let bound = if factor > 1.0 { format!("at most {factor:.2} of") } else { format!("at most 1/{:.0} of", 1.0 / factor) };
        results.push(GateResult { passed, text: format!("{workload}: mean TTFT {own} s, {bound} {} with {theirs} s", other.policy) });
    };
    for (panel, overloaded) in by_workload(outcomes).into_iter().zip(overloaded) {
        let Some((own, best)) = own_and_best_other(panel) else { continue };
        let mean = own.measures.ttft_mean;
        gate(&own.workload, mean, MAX_TTFT_RATIO * best.measures.ttft_mean, best, MAX_TTFT_RATIO);
        for name in
            [PolicyName::Radix, PolicyName::RadixTight, PolicyName::LeastRequest].iter().filter(|_| *overloaded).map(|name| name.name())
        {
            if let Some(other) = panel.iter().find(|outcome| outcome.policy == name) {
                gate(&own.workload, mean, other.measures.ttft_mean / MIN_SPEEDUP, other, 1.0 / MIN_SPEEDUP);
            }
        }
    }
    results
}

/// The router's own policy on a workload, and the other router's with the least mean time to the
/// first token.
fn own_and_best_other(panel: &[Outcome]) -> Option<(&Outcome, &Outcome)> {
    let own_names = [PolicyName::Hostler.name(), PolicyName::HostlerNoQueue.name()];
    let own = panel.iter().find(|outcome| outcome.policy == own_names[0])?;
    let others = panel.iter().filter(|outcome| !own_names.contains(&outcome.policy));
    let best = others.min_by(|one, other| one.measures.ttft_mean.total_cmp(&other.measures.ttft_mean))?;
    Some((own, best))
}

#[cfg(test)]
mod tests;
