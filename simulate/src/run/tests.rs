use std::cell::Cell;

use super::*;
use crate::engine::Hardware;
use crate::policy::PolicyName;
use crate::request::{Request, Segment, keys};
use crate::workload::{Arrival, WorkloadKind, WorkloadShape};

fn arrival(name: u64, prompt: u32, output: u32, start: ArrivalTime) -> Arrival {
    let keys = keys(&[Segment { name, tokens: prompt }, Segment { name: 1_000_000, tokens: output }]);
    Arrival { request: Request { keys, prompt, output, session: name }, start }
}

fn small() -> SimulatedFleet {
    let hardware = Hardware { step: 1.0, prefill: 0.01, attention: 0.0, decode: 0.0, context: 0.0, ..Hardware::default() };
    SimulatedFleet { replicas: 2, delay: 0.0, hardware, ..SimulatedFleet::default() }
}

fn play(arrivals: Vec<Arrival>, policy: PolicyName, fleet: &SimulatedFleet) -> RunResult {
    let done = Cell::new(0);
    let workload = Workload { name: "test".into(), arrivals };
    let run = run(fleet, &workload, policy.build(fleet, 1), &|| done.set(done.get() + 1));
    assert_eq!(done.get(), workload.arrivals.len());
    run
}

#[test]
fn recorded_times_are_those_of_the_steps() {
    let run = play(vec![arrival(1, 100, 3, ArrivalTime::At(5.0))], PolicyName::RoundRobin, &small());
    let record = run.records[0];
    assert_eq!((record.arrived, record.first, record.last), (5.0, 7.0, 9.0));
    assert!((run.busy.iter().sum::<f64>() - 4.0).abs() < 1e-9);
}

#[test]
fn a_later_turn_arrives_after_the_earlier_answers_end() {
    let run = play(
        vec![arrival(1, 100, 3, ArrivalTime::At(0.0)), arrival(2, 100, 1, ArrivalTime::After(0, 2.5))],
        PolicyName::RoundRobin,
        &small(),
    );
    assert_eq!((run.records[0].last, run.records[1].arrived), (4.0, 6.5));
}

#[test]
fn every_policy_answers_every_request_after_its_arrival() {
    let shape = WorkloadShape { requests: 150, ..WorkloadShape::default() };
    for kind in [WorkloadKind::Agentic, WorkloadKind::HotPrefix, WorkloadKind::Bursts, WorkloadKind::NoSharing] {
        for policy in PolicyName::all() {
            let fleet = SimulatedFleet { replicas: 3, ..SimulatedFleet::default() };
            let run = play(shape.workload(kind).unwrap().arrivals, *policy, &fleet);
            for record in &run.records {
                assert!(
                    record.first > record.arrived && record.last >= record.first && record.found.cached < record.prompt,
                    "{policy:?} {record:?}"
                );
                assert!(record.replica < 3);
            }
        }
    }
}

#[test]
fn a_host_tier_saves_prompt_tokens_where_the_gpus_are_too_small() {
    let shape = WorkloadShape { requests: 200, rate: Some(1.0), think: 20.0, ..WorkloadShape::default() };
    let arrivals = shape.workload(WorkloadKind::Agentic).unwrap().arrivals;
    let found = |host_tokens, policy| {
        let hardware = Hardware { kv_tokens: 72_000, host_tokens, ..Hardware::default() };
        let run = play(arrivals.clone(), policy, &SimulatedFleet { replicas: 3, hardware, ..SimulatedFleet::default() });
        let sum = |of: fn(&RequestRecord) -> u32| run.records.iter().map(|record| u64::from(of(record))).sum::<u64>();
        (sum(|record| record.found.cached), sum(|record| record.found.loaded))
    };
    for policy in PolicyName::all() {
        let (without, with) = (found(0, *policy), found(2_000_000, *policy));
        assert!(without.1 == 0 && with.1 > 0 && with.0 > without.0, "{policy:?}: {without:?} and {with:?}");
    }
}

#[test]
fn held_requests_are_all_released_shortest_first() {
    // Two replicas, and far more prompts at once than the three steps of each that are not held.
    let arrivals: Vec<Arrival> =
        (0..120).map(|name| arrival(name, if name % 2 == 0 { 8000 } else { 400 }, 2, ArrivalTime::At(0.0))).collect();
    let run = play(arrivals, PolicyName::Hostler, &small());
    let mean = |odd: usize| run.records.iter().skip(odd).step_by(2).map(|record| record.first).sum::<f64>() / 60.0;
    assert!(mean(1) * 2.0 < mean(0), "short ones {} s, long ones {} s", mean(1), mean(0));
}

#[test]
fn bursts_stay_together_where_in_flight_prompts_are_known() {
    let workload = WorkloadShape { requests: 800, rate: Some(2.0), ..WorkloadShape::default() }.workload(WorkloadKind::Bursts).unwrap();
    let hits = |policy| {
        let run = play(workload.arrivals.clone(), policy, &SimulatedFleet::default());
        run.records.iter().map(|record| f64::from(record.found.cached)).sum::<f64>()
            / run.records.iter().map(|record| f64::from(record.prompt)).sum::<f64>()
    };
    let (even, own) = (hits(PolicyName::RoundRobin), hits(PolicyName::Hostler));
    assert!(even < 0.51 && own > 0.75, "{even} and {own}");
}

/// Record of one answer of 20 steps on a replica whose job ends every 10 s.
///
/// The request has this many prompt tokens and arrives after 5 s.
fn cut_by_the_end_of_a_job(prompt: u32) -> RequestRecord {
    let fleet = SimulatedFleet { replicas: 1, job: 10.0, ..small() };
    play(vec![arrival(1, prompt, 20, ArrivalTime::At(5.0))], PolicyName::Hostler, &fleet).records[0]
}

#[test]
fn the_end_of_a_job_cuts_answers_that_have_begun() {
    let record = cut_by_the_end_of_a_job(100);
    assert!(record.cut, "{record:?}");
    assert_eq!((record.first, record.last), (7.0, 10.0));
}

#[test]
fn an_unanswered_request_is_placed_again_at_most_twice() {
    // The prompt takes 8 s, so it is computed in the next job.
    let record = cut_by_the_end_of_a_job(700);
    assert_eq!((record.first, record.last, record.cut), (18.0, 20.0, true));
    // The prompt takes longer than a job.
    let record = cut_by_the_end_of_a_job(2_000);
    assert_eq!((record.first, record.last, record.cut), (30.0, 30.0, true));
}

#[test]
fn every_policy_continues_after_job_ends_with_empty_caches() {
    let shape = WorkloadShape { requests: 80, ..WorkloadShape::default() };
    for kind in [WorkloadKind::Agentic, WorkloadKind::Bursts] {
        for policy in PolicyName::all() {
            let fleet = SimulatedFleet { replicas: 3, job: 10.0, ..SimulatedFleet::default() };
            let run = play(shape.workload(kind).unwrap().arrivals, *policy, &fleet);
            assert!(run.records.iter().all(|record| record.first > record.arrived && record.last >= record.first), "{policy:?}");
        }
    }
}

#[test]
fn answers_go_where_they_can_end_if_known() {
    let cut = |hide_job_ends| {
        let shape = WorkloadShape { requests: 1_000, rate: Some(8.0), ..WorkloadShape::default() };
        let fleet = SimulatedFleet { replicas: 4, job: 60.0, hide_job_ends, ..SimulatedFleet::default() };
        let run = play(shape.workload(WorkloadKind::NoSharing).unwrap().arrivals, PolicyName::Hostler, &fleet);
        run.records.iter().filter(|record| record.cut).count()
    };
    let (known, hidden) = (cut(false), cut(true));
    assert!(hidden > 20 && known * 5 < hidden, "{known} cut, and {hidden} where the ends are hidden");
}

#[test]
fn replica_noise_lasts_ten_seconds_and_averages_to_one() {
    let fleet = SimulatedFleet { noise: 0.1, ..SimulatedFleet::default() };
    assert_eq!(fleet.noise_factor(3, 20.0), fleet.noise_factor(3, 29.9));
    let factors: Vec<f64> = (0..2_000).map(|period| fleet.noise_factor(3, 10.0 * f64::from(period))).collect();
    let mean = factors.iter().sum::<f64>() / 2_000.0;
    let deviation = (factors.iter().map(|factor| (factor - mean).powi(2)).sum::<f64>() / 2_000.0).sqrt();
    assert!((mean - 1.0).abs() < 0.01 && (deviation - 0.1).abs() < 0.01, "{mean} {deviation}");
    assert_eq!(SimulatedFleet::default().noise_factor(3, 20.0), 1.0);
}
