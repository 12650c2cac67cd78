use std::time::UNIX_EPOCH;

use hostler_proto::agent::v1 as agent;
use hostler_proto::fleet::v1::{Cache, FirstTokens, Rates};

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

fn whole_replica() -> Replica {
    let engine = agent::EngineLoad {
        running: 31,
        waiting: 2,
        kv_use: 0.5,
        kv_blocks: 20_000,
        block_size: 16,
        prompt_tokens: 9000,
        generation_tokens: 800,
        preemptions: 1,
        prefix_queries: 9000,
        prefix_hits: 5500,
    };
    let reading = agent::GpuReading {
        uuid: "GPU-0".into(),
        memory_used_bytes: Some(98 << 30),
        utilisation: Some(80),
        watts: Some(612.5),
        celsius: Some(60),
        throttled: vec!["power limit".into()],
        ..agent::GpuReading::default()
    };
    Replica {
        id: "n0/0".into(),
        epoch: 7,
        local_in_flight: 12,
        state: Some(agent::ReplicaState {
            phase: agent::Phase::Ready.into(),
            reason: "r".repeat(MAX_WORDS + 1),
            models: vec![agent::Model { id: "tiny".into(), ..agent::Model::default() }],
            engine_version: "0.32.0".into(),
            restarts: 3,
            gpu: "NVIDIA H200".into(),
            gpus: vec![agent::Gpu {
                index: 0,
                uuid: "GPU-0".into(),
                name: "NVIDIA H200".into(),
                memory_bytes: 141 << 30,
                reading: Some(reading),
            }],
            progress: Some(agent::Progress { stage: "loading weights".into(), percent: 45, seconds_left: 20 }),
            launch: Some(agent::Launch { profile: "latency".into(), max_model_len: 4096, ..agent::Launch::default() }),
            findings: vec![agent::Finding { kind: "eager".into(), evidence: "seen".into(), advice: "change".into() }],
            failure: Some(agent::Failure { kind: "memory".into(), cause: "out of memory".into(), remedy: "end it".into() }),
            ..agent::ReplicaState::default()
        }),
        load: Some(agent::Load { in_flight: 33, served: 1207, engine: Some(engine), ..agent::Load::default() }),
        cache: Some(Cache { exact: true, blocks: 1234, reason: "text".into(), ..Cache::default() }),
        rates: Some(Rates { prefill: 0.001, slowness: 1.25, ..Rates::default() }),
        streams_moved: 4,
        first_tokens: Some(FirstTokens { streams: 40, p50: 0.085, p99: 1.23 }),
        ..Replica::default()
    }
}

/// The page's script reads these names and values.
#[test]
fn the_pictures_of_nodes_and_gone_jobs_keep_their_names() {
    let now = UNIX_EPOCH + Duration::from_secs(1000);
    let silent = Replica { id: "n0/1".into(), suspect: true, ..Replica::default() };
    let replicas = vec![whole_replica(), silent];
    let nodes = vec![Node { name: "n0".into(), agent_version: "0.2.0".into(), attached: true, replicas, job: Some(job()) }];
    let mut listed = ListResponse { nodes, ..ListResponse::default() };
    listed.mark_suspects();
    trim(&mut listed);
    let gone = GoneJob { node: "n1".into(), job: Some(job()), gone_ms_ago: 5400, reason: "agent lost".into() };
    let pictures = serde_json::json!([NodePicture::new(&listed.nodes[0], now), GonePicture::new(&gone, now)]);
    insta::assert_snapshot!(serde_json::to_string_pretty(&pictures).unwrap());
}
