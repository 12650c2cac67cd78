use std::time::UNIX_EPOCH;

use hostler_proto::agent::v1 as agent;

use super::*;

fn job() -> agent::Job {
    agent::Job {
        scheduler: "pbs".into(),
        id: "12.head".into(),
        run: 2,
        ends_in_ms: Some(60_400),
        leaves_in_ms: Some(30_400),
        array_index: None,
    }
}

/// The page's script reads these names and values. Replicas have those of `hostler ps --json`.
#[test]
fn the_picture_of_a_node_keeps_its_names() {
    let now = UNIX_EPOCH + Duration::from_secs(1000);
    let node = Node { name: "n0".into(), agent_version: "0.2.0".into(), attached: true, replicas: Vec::new(), job: Some(job()) };
    insta::assert_snapshot!(serde_json::to_string_pretty(&NodePicture::new(&node, now)).unwrap());
}

#[test]
fn long_reasons_are_cut_and_flags_left_out() {
    let launch = agent::Launch { profile: "latency".into(), arguments: vec!["--no-log-requests".into()], ..agent::Launch::default() };
    let state = agent::ReplicaState { reason: "é".repeat(MAX_WORDS + 1), launch: Some(launch), ..agent::ReplicaState::default() };
    let replicas = vec![Replica { state: Some(state), ..Replica::default() }, Replica::default()];
    let mut listed = ListResponse { nodes: vec![Node { replicas, ..Node::default() }], ..ListResponse::default() };
    trim(&mut listed);
    let state = listed.nodes[0].replicas[0].state();
    let launch = state.launch.as_ref().unwrap();
    assert_eq!((state.reason.chars().count(), launch.profile.as_str(), launch.arguments.len()), (MAX_WORDS, "latency", 0));
}
