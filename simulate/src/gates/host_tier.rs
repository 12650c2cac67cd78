//! Gates for a second tier of the cache in the hosts' memory: it must cost nothing where the GPUs
//! suffice, and be used better than by the others where they do not.

use super::{GateResult, MAX_TTFT_RATIO, own_and_best_other};
use crate::args::SimulateError;
use crate::batch::{Outcome, Progress, compare};
use crate::engine::Hardware;
use crate::fleet::SimulatedFleet;
use crate::measure::Objectives;
use crate::policy::PolicyName;
use crate::report::{by_workload, seconds};
use crate::workload::{Workload, WorkloadKind, WorkloadShape};

/// Tokens of the tier beside GPUs of the default size, which hold a quarter of that.
const HOST_TOKENS: u32 = 1_600_000;

/// Tokens of each tier where memory is short.
///
/// The conversations that are open at once have up to 500,000 tokens for each of four replicas. The
/// host has room for those that have ended, too.
const SHORT_KV_TOKENS: u32 = 125_000;
const SHORT_HOST_TOKENS: u32 = 1_000_000;

/// Name and seconds to load a token: a seventeenth of what computing one takes, and almost four
/// times as much.
const TIERS: [(&str, f64); 2] = [("fast", 4e-6), ("slow", 2.5e-4)];

/// Runs the policy on the same workloads with a tier.
///
/// # Errors
/// When a request does not fit a replica.
pub(super) fn measure_ample(workloads: &[Workload], progress: Progress) -> Result<Vec<Outcome>, SimulateError> {
    let hardware = Hardware { host_tokens: HOST_TOKENS, ..Hardware::default() };
    let fleet = SimulatedFleet { hardware, ..SimulatedFleet::default() };
    Ok(compare(workloads, &[PolicyName::Hostler], &fleet, &Objectives::default(), progress)?)
}

/// Runs all policies where memory is short, with each tier.
///
/// # Errors
/// When a request does not fit a replica.
pub(super) fn measure_short(progress: Progress) -> Result<Vec<Outcome>, SimulateError> {
    let shape = WorkloadShape { rate: Some(1.0), think: 30.0, requests: 6000, ..WorkloadShape::default() };
    let arrivals = shape.workload(WorkloadKind::Agentic)?.arrivals;
    let mut outcomes = Vec::new();
    for (name, load) in TIERS {
        let hardware = Hardware { kv_tokens: SHORT_KV_TOKENS, host_tokens: SHORT_HOST_TOKENS, load, ..Hardware::default() };
        let fleet = SimulatedFleet { replicas: 4, hardware, ..SimulatedFleet::default() };
        let workload = Workload { name: format!("small GPUs, {name} hosts"), arrivals: arrivals.clone() };
        outcomes.extend(compare(&[workload], PolicyName::all(), &fleet, &Objectives::default(), progress)?);
    }
    Ok(outcomes)
}

/// Judges the outcomes with a tier by those without one.
pub(super) fn judge_ample(without: &[Outcome], with: &[Outcome]) -> Vec<GateResult> {
    let pairs = with.iter().filter_map(|with| {
        let same = |other: &&Outcome| other.workload == with.workload && other.policy == with.policy;
        without.iter().find(same).map(|without| (with, without.measures.ttft_mean))
    });
    let judge = |(with, without): (&Outcome, f64)| {
        let mean = with.measures.ttft_mean;
        let (shown, limit) = (seconds(mean), seconds(without));
        let text = format!("{}: mean TTFT {shown} s with a host tier, at most {MAX_TTFT_RATIO:.2} of {limit} s without", with.workload);
        GateResult { passed: mean <= MAX_TTFT_RATIO * without, text }
    };
    pairs.map(judge).collect()
}

/// Judges the outcomes where memory is short: no other policy may be as good.
pub(super) fn judge_short(outcomes: &[Outcome]) -> Vec<GateResult> {
    let judge = |(own, best): (&Outcome, &Outcome)| {
        let [mean, least] = [own, best].map(|of| of.measures.ttft_mean);
        let (shown, limit) = (seconds(mean), seconds(least));
        GateResult {
            passed: mean < least,
            text: format!("{}: mean TTFT {shown} s, less than {} with {limit} s", own.workload, best.policy),
        }
    };
    by_workload(outcomes).into_iter().filter_map(own_and_best_other).map(judge).collect()
}

#[cfg(test)]
mod tests;
