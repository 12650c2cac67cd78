use std::cell::Cell;

use super::*;
use crate::engine::Hardware;
use crate::policy::Name;
use crate::request::{Request, Segment, keys};
use crate::workload::{Arrival, Kind, Shape};

fn arrival(name: u64, prompt: u32, output: u32, start: Start) -> Arrival {
    let keys = keys(&[Segment { name, tokens: prompt }, Segment { name: 1_000_000, tokens: output }]);
    Arrival { request: Request { keys, prompt, output, session: name }, start }
}

fn small() -> Fleet {
    let hardware = Hardware { step: 1.0, prefill: 0.01, attention: 0.0, decode: 0.0, context: 0.0, ..Hardware::default() };
    Fleet { replicas: 2, delay: 0.0, hardware }
}

fn play(arrivals: Vec<Arrival>, policy: Name, fleet: &Fleet) -> Run {
    let done = Cell::new(0);
    let workload = Workload { name: "test".into(), arrivals };
    let run = run(fleet, &workload, policy.policy(fleet, 1), &|| done.set(done.get() + 1));
    assert_eq!(done.get(), workload.arrivals.len());
    run
}

#[test]
fn times_are_those_of_the_steps() {
    let run = play(vec![arrival(1, 100, 3, Start::At(5.0))], Name::RoundRobin, &small());
    let record = run.records[0];
    assert_eq!((record.arrived, record.first, record.last), (5.0, 7.0, 9.0));
    assert!((run.busy.iter().sum::<f64>() - 4.0).abs() < 1e-9);
}

#[test]
fn a_later_turn_comes_when_the_answer_before_it_has_ended() {
    let run = play(vec![arrival(1, 100, 3, Start::At(0.0)), arrival(2, 100, 1, Start::After(0, 2.5))], Name::RoundRobin, &small());
    assert_eq!((run.records[0].last, run.records[1].arrived), (4.0, 6.5));
}

#[test]
fn every_policy_answers_everything_and_no_sooner_than_it_came() {
    let shape = Shape { requests: 150, ..Shape::default() };
    for kind in [Kind::Agentic, Kind::HotPrefix, Kind::Bursts, Kind::NoSharing] {
        for policy in Name::all() {
            let fleet = Fleet { replicas: 3, ..Fleet::default() };
            let run = play(shape.workload(kind).unwrap().arrivals, *policy, &fleet);
            for record in &run.records {
                assert!(
                    record.first > record.arrived && record.last >= record.first && record.cached < record.prompt,
                    "{policy:?} {record:?}"
                );
                assert!(record.replica < 3);
            }
        }
    }
}

#[test]
fn held_requests_are_released_shortest_first_and_all_of_them() {
    // Two replicas, and far more prompts at once than the three steps of each that are not held.
    let arrivals: Vec<Arrival> = (0..120).map(|name| arrival(name, if name % 2 == 0 { 8000 } else { 400 }, 2, Start::At(0.0))).collect();
    let run = play(arrivals, Name::Hostler, &small());
    let mean = |odd: usize| run.records.iter().skip(odd).step_by(2).map(|record| record.first).sum::<f64>() / 60.0;
    assert!(mean(1) * 2.0 < mean(0), "short ones {} s, long ones {} s", mean(1), mean(0));
}

#[test]
fn bursts_stay_together_where_the_router_knows_what_is_in_flight() {
    let workload = Shape { requests: 800, rate: Some(2.0), ..Shape::default() }.workload(Kind::Bursts).unwrap();
    let hits = |policy| {
        let run = play(workload.arrivals.clone(), policy, &Fleet::default());
        run.records.iter().map(|record| f64::from(record.cached)).sum::<f64>()
            / run.records.iter().map(|record| f64::from(record.prompt)).sum::<f64>()
    };
    let (even, own) = (hits(Name::RoundRobin), hits(Name::Hostler));
    assert!(even < 0.51 && own > 0.75, "{even} and {own}");
}
