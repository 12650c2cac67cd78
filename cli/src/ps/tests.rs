use hostler_proto::agent::v1 as agent;

use super::*;

fn replica(cache: wire::Cache, gpu: &str) -> Node {
    let state = agent::ReplicaState { phase: agent::Phase::Ready.into(), gpu: gpu.into(), ..agent::ReplicaState::default() };
    let replica = wire::Replica { id: "n/0".into(), state: Some(state), cache: Some(cache), ..wire::Replica::default() };
    Node { node: "n".into(), agent_version: "1".into(), attached: true, replicas: vec![super::replica(replica)] }
}

fn cache(exact: bool, reason: &str) -> wire::Cache {
    wire::Cache { exact, blocks: 1234, reason: reason.into(), tokenizer: "proved".into(), ..wire::Cache::default() }
}

#[test]
fn a_cache_that_is_known_shows_its_blocks_and_another_one_why_not() {
    let lines = lines(&[replica(cache(true, ""), "H200")]);
    assert!(lines[1].contains("exact 1234") && lines[1].ends_with("H200"), "{lines:?}");
    let reason = "the engine keeps no cache";
    let lines = super::lines(&[replica(cache(false, reason), "H200")]);
    assert!(lines[1].contains("  text  ") && lines[1].ends_with("H200; placed by text: the engine keeps no cache"), "{lines:?}");
    let lines = super::lines(&[replica(wire::Cache { distrusted: true, ..cache(false, "") }, "")]);
    assert!(lines[1].ends_with("placed by text: its reports of cached blocks contradict themselves"), "{lines:?}");
    // On its way: nothing is wrong.
    let lines = super::lines(&[replica(cache(false, ""), "")]);
    assert_eq!(lines.len(), 2);
    assert!(!lines[1].contains("placed by text"), "{lines:?}");
}

#[test]
fn a_script_reads_cache_and_rates_of_each_replica() {
    let json = serde_json::to_value(replica(cache(true, ""), "")).unwrap();
    assert_eq!(json["replicas"][0]["cache"]["blocks"], 1234);
    for name in ["exact", "matches", "resyncs", "distrusted", "tokenizer", "reason"] {
        assert!(!json["replicas"][0]["cache"][name].is_null(), "{name}");
    }
    assert_eq!(json["replicas"][0]["rates"]["slowness"], 0.0);
    assert_eq!(json["replicas"][0]["phase"], "ready");
}
