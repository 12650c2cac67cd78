use hostler_proto::agent::v1::ReplicaState;
use hostler_proto::fleet::v1::Replica;

use super::*;
use crate::local_fleet::tests::{fleet, joined};

/// The first `hostler up`, at port 8000, and one beside it.
fn two() -> Vec<LocalFleet> {
    let mut first = fleet(8000, Vec::new());
    first.record.name = "org/a".into();
    vec![first.clone(), joined(8, &first, "b", Vec::new())]
}

/// Where a command serves: the process that it joins, or its error.
fn place(name: &str, listen: Option<&str>, fleets: &[LocalFleet]) -> Result<Option<i32>, String> {
    match choose_place(&Wish { name, listen }, fleets) {
        Ok(Place::Own) => Ok(None),
        Ok(Place::Beside(first)) => Ok(Some(first.record.pid)),
        Err(error) => Err(error.to_string()),
    }
}

#[test]
fn another_model_joins_the_router_that_runs() {
    assert_eq!(place("c", None, &two()), Ok(Some(8000)));
    assert_eq!(place("c", Some("0.0.0.0:8000"), &two()), Ok(Some(8000)), "that is its address");
    assert_eq!(place("c", None, &[]), Ok(None));
}

#[test]
fn an_address_of_its_own_means_a_router_of_its_own() {
    assert_eq!(place("c", Some("127.0.0.1:9000"), &two()), Ok(None));
    assert_eq!(place("c", Some("127.0.0.1:0"), &two()), Ok(None));
    assert_eq!(place("b", Some("127.0.0.1:9000"), &two()), Ok(None), "the same model, too");
}

#[test]
fn of_several_routers_one_is_chosen() {
    let several = [two(), vec![fleet(9000, Vec::new())]].concat();
    assert!(place("c", None, &several).unwrap_err().contains("2 routers of yours run here"));
    assert_eq!(place("c", Some("127.0.0.1:9000"), &several), Ok(Some(9000)));
}

#[test]
fn a_model_that_is_up_is_said_to_be() {
    for name in ["org/a", "a", "b"] {
        let said = place(name, None, &two()).unwrap_err();
        assert!(said.starts_with("up here already: ") && said.contains(&format!("`hostler down {name}` ends it")), "{said}");
    }
    assert!(place("", None, &[fleet(8000, Vec::new())]).is_err(), "the simulated engine without a name, twice");
    assert_eq!(place("", None, &two()), Ok(Some(8000)));
}

#[test]
fn each_agent_of_a_router_has_a_node_of_its_own() {
    assert_eq!(node_name("gpu1", Some("gpu1.c".into()), &two()), "gpu1.c");
    let mut taken = two();
    taken[1].record.joined.as_mut().unwrap().node = "gpu1.c".into();
    assert_eq!(node_name("gpu1", Some("gpu1.c".into()), &taken), "gpu1.2");
    assert_eq!(node_name("gpu1", None, &two()), "gpu1.2");
    taken[0].replicas = vec![Replica { id: "gpu1.2/0".into(), ..Replica::default() }];
    assert_eq!(node_name("gpu1", None, &taken), "gpu1.3", "an agent that has joined otherwise, or that leaves, has a name, too");
}

fn gpu(index: u32) -> Gpu {
    Gpu { index, uuid: format!("GPU-{index}"), ..Gpu::default() }
}

fn replica_on(index: u32, phase: Phase) -> Replica {
    let gpu = hostler_proto::agent::v1::Gpu { index, uuid: format!("GPU-{index}"), ..hostler_proto::agent::v1::Gpu::default() };
    let state = ReplicaState { phase: phase.into(), gpus: vec![gpu], ..ReplicaState::default() };
    Replica { state: Some(state), ..Replica::default() }
}

#[test]
fn only_gpus_that_nobody_has_are_used() {
    let mut fleets = two();
    fleets[0].replicas = vec![replica_on(0, Phase::Ready), replica_on(3, Phase::Stopped)];
    // Its agent has not come yet.
    fleets[1].record.joined.as_mut().unwrap().gpus = vec!["GPU-1".into()];
    let gpus: Vec<Gpu> = (0..4).map(gpu).collect();
    assert_eq!(choose_free(&gpus, false, &fleets).unwrap(), ["GPU-2", "GPU-3"]);
    assert_eq!(choose_free(&gpus[2..3], true, &fleets).unwrap(), ["GPU-2"]);
}

#[test]
fn taken_gpus_are_named_with_who_has_them() {
    let mut fleets = two();
    fleets[0].replicas = vec![replica_on(0, Phase::Loading), replica_on(1, Phase::Loading)];
    let all = choose_free(&[gpu(0), gpu(1)], false, &fleets).unwrap_err().to_string();
    assert!(all.contains("all GPUs are taken: GPU 0 by org/a (`hostler up`, process 8000), GPU 1 by"), "{all}");
    assert!(all.contains("`hostler down` ends one of them"), "{all}");
    let named = choose_free(&[gpu(1), gpu(2)], true, &fleets).unwrap_err().to_string();
    assert!(named.contains("agent.gpus names GPUs that are taken: GPU 1 by org/a"), "{named}");
}
