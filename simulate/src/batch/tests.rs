use super::*;
use crate::engine::Hardware;
use crate::workload::{WorkloadKind, WorkloadShape};

fn workloads() -> Vec<Workload> {
    let shape = WorkloadShape { requests: 120, ..WorkloadShape::default() };
    [WorkloadKind::Agentic, WorkloadKind::Bursts].map(|kind| shape.workload(kind).unwrap()).to_vec()
}

#[test]
fn outcomes_are_ordered_and_reproducible() {
    let run = || compare(&workloads(), PolicyName::all(), &SimulatedFleet::default(), &Objectives::default(), Progress::Hidden).unwrap();
    let outcomes = run();
    let names: Vec<(&str, &str)> = outcomes.iter().map(|outcome| (outcome.workload.as_str(), outcome.policy.as_str())).collect();
    assert_eq!(names.len(), 2 * PolicyName::all().len());
    assert_eq!((names[0], names[names.len() - 1]), (("agentic 3.4/s", "hostler"), ("bursts 0.8/s", "expected-wait")));
    assert_eq!(outcomes, run());
}

#[test]
fn a_request_that_fits_no_replica_is_named() {
    let hardware = Hardware { kv_tokens: 1000, ..Hardware::default() };
    let error = compare(
        &workloads(),
        PolicyName::all(),
        &SimulatedFleet { hardware, ..SimulatedFleet::default() },
        &Objectives::default(),
        Progress::Hidden,
    );
    let error = error.unwrap_err().to_string();
    assert!(error.starts_with("agentic 3.4/s has a request of ") && error.ends_with("raise --kv-tokens"), "{error}");
}
