//! Gate for known ends of batch jobs: knowing them must save answers, and cost next to nothing.
//!
//! Of four replicas one ends every two minutes, once with these ends known to the router and once
//! without.

use super::GateResult;
use crate::fleet::SimulatedFleet;
use crate::measure::{Measures, Objectives, measure};
use crate::policy::PolicyName;
use crate::random::Random;
use crate::run;
use crate::workload::{Workload, unrelated};

/// Seconds of a job; one of four ends every two minutes.
const JOB_SECONDS: f64 = 480.0;

/// Requests, their rate, and mean tokens of their prompts and answers: half an hour at about half
/// of the fleet's capacity.
const REQUESTS: usize = 21_600;
const RATE: f64 = 12.0;
const TOKENS: (f64, f64) = (500.0, 600.0);

/// Most answers that may be cut if the ends are known, as a share of those cut if they are not.
const MAX_CUT_RATIO: f64 = 0.05;

/// Mean time to the first token if the ends are known, over that if they are not: at times three
/// replicas do the work of four.
const MAX_TTFT_RATIO: f64 = 1.1;

pub(super) fn measure_jobs(hide_job_ends: bool) -> Measures {
    let fleet = SimulatedFleet { replicas: 4, job: JOB_SECONDS, hide_job_ends, ..SimulatedFleet::default() };
    let arrivals = unrelated(&mut Random::new(1), 0..REQUESTS, 0.0, RATE, TOKENS);
    let workload = Workload { name: String::new(), arrivals };
    measure(&run::run(&fleet, &workload, PolicyName::Hostler.build(&fleet, 1), &|| ()), &Objectives::default())
}

pub(super) fn judge(known: &Measures, hidden: &Measures) -> [GateResult; 2] {
    let percent = |share: f64| format!("{:.3} %", share * 100.0);
    let text = format!(
        "jobs that end: {} of the answers cut, at most 1/{:.0} of {} where their ends are not known",
        percent(known.cut),
        1.0 / MAX_CUT_RATIO,
        percent(hidden.cut)
    );
    let cut = GateResult { passed: known.cut <= hidden.cut * MAX_CUT_RATIO, text };
    let (with, without) = (known.ttft_mean, hidden.ttft_mean);
    let text =
        format!("jobs that end: mean TTFT {with:.4} s, at most {MAX_TTFT_RATIO:.2} of {without:.4} s where their ends are not known");
    [cut, GateResult { passed: with <= MAX_TTFT_RATIO * without, text }]
}

#[cfg(test)]
mod tests;
