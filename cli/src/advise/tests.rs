use super::*;
use crate::ps::tests::{finding, node, ready};
use hostler_proto::agent::v1::{EngineLoad, Load, ReplicaState};

fn fleet() -> Vec<Node> {
    let front_end = finding("front_end", "the Python front-end used up to 0.97 of a core", "--front-end rust");
    let eager = finding("eager", "the engine runs without CUDA graphs", "drop --enforce-eager");
    vec![
        node("n0", ReplicaState { findings: vec![front_end, eager.clone()], ..ready() }, |_| {}),
        node("n1", ready(), |_| {}),
        node("n2", ReplicaState { findings: vec![eager], ..ready() }, |_| {}),
    ]
}

#[test]
fn every_finding_shows_its_evidence_and_its_advice() {
    let nodes = fleet();
    insta::assert_snapshot!(lines(&select_replicas(&nodes, None).unwrap()).join("\n"), @"
    n0/0  front_end
      seen    the Python front-end used up to 0.97 of a core
      change  --front-end rust
    n0/0  eager
      seen    the engine runs without CUDA graphs
      change  drop --enforce-eager
    n2/0  eager
      seen    the engine runs without CUDA graphs
      change  drop --enforce-eager
    --front-end, --tp and --profile are settings of the agent; other flags are the engine's, behind `--` of `hostler up` and `hostler agent` or in agent.engine_args. Both are read when the agent starts.
    ");
}

#[test]
fn an_advise_target_is_an_existing_node_or_replica() {
    let nodes = fleet();
    let ids = |target| {
        select_replicas(&nodes, Some(target)).map(|replicas| replicas.iter().map(|replica| replica.id.clone()).collect::<Vec<_>>())
    };
    assert_eq!(ids("n2").unwrap(), ["n2/0"]);
    assert_eq!(ids("n0/0").unwrap(), ["n0/0"]);
    let error = ids("n9").unwrap_err().to_string();
    assert_eq!(error, "no node or replica is called \"n9\"; `hostler ps` shows those there are");
}

#[test]
fn a_healthy_fleet_gets_no_advice() {
    let nodes = fleet();
    let lines = lines(&select_replicas(&nodes, Some("n1")).unwrap());
    assert_eq!(
        lines,
        [
            "nothing to advise: 1 of 1 replicas serve, and nothing was seen that costs them speed; what does shows after half a minute of work"
        ]
    );
}

#[test]
fn an_engine_without_advice_says_what_it_is_short_of_now() {
    let engine = EngineLoad { kv_use: 0.991, waiting: 7, ..EngineLoad::default() };
    let load = Load { engine: Some(engine), ..Load::default() };
    let nodes = [node("n1", ready(), |replica| replica.load = Some(load))];
    let lines = lines(&select_replicas(&nodes, None).unwrap());
    assert_eq!(lines[1..], ["right now n1/0: its KV cache is 99% full, and 7 requests wait in the engine"]);
}

#[test]
fn advice_in_json_names_the_replica() {
    let nodes = fleet();
    let replicas = select_replicas(&nodes, Some("n2")).unwrap();
    let json = serde_json::to_value(advice(&replicas).collect::<Vec<_>>()).unwrap();
    assert_eq!(
        (&json[0]["replica"], &json[0]["kind"], &json[0]["advice"]),
        (&"n2/0".into(), &"eager".into(), &"drop --enforce-eager".into())
    );
}
