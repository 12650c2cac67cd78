use super::*;
use crate::blocks::CacheChanges;
use crate::engine::EngineLoad;
use crate::request::{Segment, keys};

/// A prompt of these segments and an answer of 16 tokens.
fn request(session: u64, segments: &[(u64, u32)]) -> Request {
    let mut all: Vec<Segment> = segments.iter().map(|&(name, tokens)| Segment { name, tokens }).collect();
    let prompt = all.iter().map(|segment| segment.tokens).sum();
    all.push(Segment { name: 1 << 40, tokens: 16 });
    Request { keys: keys(&all), prompt, output: 16, session }
}

fn seen(in_flight: &[u32]) -> FleetState {
    FleetState {
        in_flight: in_flight.to_vec(),
        loads: vec![EngineLoad::default(); in_flight.len()],
        job_ends: vec![f64::INFINITY; in_flight.len()],
    }
}

fn changes(stored: &Request) -> CacheChanges {
    CacheChanges { stored: stored.keys.to_vec(), removed: Vec::new() }
}

fn stored(request: &Request) -> ReplicaReport {
    ReplicaReport { load: EngineLoad::default(), changes: changes(request), copy_changes: CacheChanges::default() }
}

fn policy(name: PolicyName, replicas: u16) -> Box<dyn Policy> {
    name.build(&SimulatedFleet { replicas, ..SimulatedFleet::default() }, 5)
}

/// Places of this many equal requests if only counts are known.
fn places(name: PolicyName, in_flight: &[u32], count: usize) -> Vec<usize> {
    let mut policy = policy(name, u16::try_from(in_flight.len()).unwrap());
    (0..count).map(|id| policy.place(id, &request(id as u64, &[(id as u64, 320)]), &seen(in_flight), 0.0).unwrap()).collect()
}

#[test]
fn round_robin_takes_turns() {
    let places = places(PolicyName::RoundRobin, &[9, 0, 0], 6);
    assert_eq!(places[..3].iter().collect::<std::collections::BTreeSet<_>>().len(), 3);
    assert_eq!(places[..3], places[3..]);
}

#[test]
fn the_replica_with_the_fewest_requests_wins() {
    assert!(places(PolicyName::LeastRequest, &[3, 1, 2], 20).iter().all(|place| *place == 1));
    let two = places(PolicyName::PowerOfTwo, &[3, 1, 2], 60);
    assert!(!two.contains(&0) && two.contains(&1) && two.contains(&2));
    assert_eq!(places(PolicyName::PowerOfTwo, &[3], 2), [0, 0]);
}

#[test]
fn a_conversation_stays_on_its_replica() {
    let mut policy = policy(PolicyName::SessionHash, 8);
    let mut place = |session, load| policy.place(0, &request(session, &[(1, 32)]), &seen(&[load; 8]), 0.0).unwrap();
    assert!((0..50).all(|session| place(session, 0) == place(session, 100)));
    assert!((0..50).map(|session| place(session, 0)).collect::<std::collections::BTreeSet<_>>().len() > 5);
}

#[test]
fn the_radix_tree_follows_long_matches_until_load_is_uneven() {
    let mut policy = policy(PolicyName::Radix, 4);
    let home = policy.place(0, &request(1, &[(1, 1600)]), &seen(&[0; 4]), 0.0).unwrap();
    let mut loads = [0; 4];
    loads[home] = 60;
    assert_eq!(policy.place(1, &request(1, &[(1, 1600), (2, 1600)]), &seen(&loads), 0.0), Some(home), "half of it matches");
    let other = policy.place(2, &request(1, &[(1, 1600), (3, 16_000)]), &seen(&loads), 0.0);
    assert_ne!(other, Some(home), "a tenth of it matches: the smallest tree");
    loads[home] = 70;
    assert_ne!(policy.place(3, &request(1, &[(1, 1600)]), &seen(&loads), 0.0), Some(home), "70 requests against none");
}

#[test]
fn the_weighted_score_weighs_prefix_against_queue_and_memory() {
    let mut policy = policy(PolicyName::LlmDPrecise, 3);
    let prompt = request(1, &[(1, 1600)]);
    policy.on_report(2, &stored(&prompt));
    let mut seen = seen(&[0; 3]);
    assert_eq!(policy.place(0, &prompt, &seen, 0.0), Some(2));
    seen.loads[2] = EngineLoad { running: 9, waiting: 5, kv_use: 0.4 };
    assert_eq!(policy.place(1, &prompt, &seen, 0.0), Some(2), "3 for the prefix are more than 2 for the queue and 0.8 for memory");
    seen.loads[2].kv_use = 0.6;
    assert_ne!(policy.place(2, &prompt, &seen, 0.0), Some(2));
}

#[test]
fn the_block_cost_counts_prefill_and_decoding_blocks() {
    let mut policy = policy(PolicyName::Dynamo, 2);
    let (long, short) = (request(1, &[(1, 3200)]), request(2, &[(2, 320)]));
    let seen = seen(&[0; 2]);
    let first = policy.place(0, &long, &seen, 0.0).unwrap();
    assert_eq!(policy.place(1, &short, &seen, 0.0), Some(1 - first));
    policy.on_first_token(0, &seen, 1.0);
    policy.on_last_token(0, &seen, 2.0);
    assert_eq!(policy.place(2, &request(3, &[(3, 320)]), &seen, 3.0), Some(first), "nothing is left there, and 20 blocks here");
    policy.on_report(1 - first, &stored(&long));
    assert_eq!(policy.place(3, &long, &seen, 4.0), Some(1 - first), "cached there");
}

#[test]
fn the_expected_wait_is_the_work_still_to_compute() {
    let mut policy = policy(PolicyName::ExpectedWait, 2);
    let seen = seen(&[0; 2]);
    let first = policy.place(0, &request(1, &[(1, 3200)]), &seen, 0.0).unwrap();
    assert_eq!(policy.place(1, &request(2, &[(2, 1600)]), &seen, 0.0), Some(1 - first));
    assert_eq!(policy.place(2, &request(3, &[(3, 800)]), &seen, 0.0), Some(1 - first));
    assert_eq!(policy.place(3, &request(1, &[(1, 3200), (4, 160)]), &seen, 0.0), Some(first), "160 tokens after 3,200");
}

#[test]
fn hostlers_policy_follows_the_cache_and_waits_for_room() {
    let mut policy = policy(PolicyName::Hostler, 2);
    let seen = seen(&[0; 2]);
    let long = request(1, &[(1, 32_000)]);
    policy.on_report(1, &stored(&long));
    assert_eq!(policy.place(0, &long, &seen, 0.0), Some(1));
    let one = policy.place(1, &request(2, &[(2, 32_000)]), &seen, 0.0).unwrap();
    let other = policy.place(2, &request(3, &[(3, 32_000)]), &seen, 0.0).unwrap();
    assert_eq!((one, other), (0, 1), "both have room, and the first one is busier by then");
    assert_eq!(policy.place(3, &request(4, &[(4, 16_000)]), &seen, 0.0), None, "nobody has room");
    assert_eq!(policy.release(&seen, 0.1), None);
    policy.on_first_token(1, &seen, 2.0);
    assert_eq!(policy.release(&seen, 2.0), Some((3, 0)));
}

#[test]
fn hostlers_policy_prefers_the_gpu_to_the_host_and_the_host_to_computing() {
    let hardware = crate::Hardware { host_tokens: 100_000, ..crate::Hardware::default() };
    let place = |hardware, reports: &[(usize, bool)]| {
        let long = request(1, &[(1, 32_000)]);
        let mut policy = PolicyName::Hostler.build(&SimulatedFleet { replicas: 2, hardware, ..SimulatedFleet::default() }, 5);
        for (replica, on_host) in reports {
            let mut report = stored(&long);
            if *on_host {
                std::mem::swap(&mut report.changes, &mut report.copy_changes);
            }
            policy.on_report(*replica, &report);
        }
        policy.place(0, &long, &seen(&[0; 2]), 0.0)
    };
    for replica in [0, 1] {
        assert_eq!(place(hardware, &[(replica, true)]), Some(replica));
        assert_eq!(place(hardware, &[(replica, false), (1 - replica, true)]), Some(replica));
        let slow = crate::Hardware { load: 0.01, ..hardware };
        assert_eq!(place(slow, &[(replica, true)]), Some(1 - replica), "loading takes longer than computing");
    }
}
