//! A fleet as a router would report it, and a model that has seen it.

use std::time::{Duration, Instant, SystemTime};

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use hostler_proto::agent::v1 as agent;
use hostler_proto::fleet::v1 as wire;

use crate::top::keys::KeyIntent;
use crate::top::model::{Moment, TopModel};

thread_local! {
    static BEGUN: Instant = Instant::now();
}

/// The moment this many seconds after 13:24:00.
pub(super) fn at(seconds: u64) -> Moment {
    let begun = BEGUN.with(|begun| *begun);
    Moment { at: begun + Duration::from_secs(seconds), wall: SystemTime::UNIX_EPOCH + Duration::from_secs(48_240 + seconds) }
}

/// A model without an answer of the router.
pub(super) fn model() -> TopModel {
    TopModel::new("/run/user/1000/hostler/router-8002.sock".into(), false, at(0))
}

pub(super) fn seen(fleet: wire::ListResponse, seconds: u64) -> TopModel {
    let mut model = model();
    model.apply(fleet, at(seconds));
    model
}

/// An answer of the router with events of these numbers and seconds.
pub(super) fn past(events: &[(u64, u64, &str)]) -> wire::PastResponse {
    let event = |(number, seconds, words): &(u64, u64, &str)| wire::FleetEvent {
        number: *number,
        at_ms: (48_240 + seconds) * 1000,
        words: (*words).to_owned(),
        ..wire::FleetEvent::default()
    };
    let last_event = events.last().map_or(0, |(number, ..)| *number);
    wire::PastResponse { events: events.iter().map(event).collect(), last_event }
}

pub(super) fn press(model: &mut TopModel, code: KeyCode) -> Option<KeyIntent> {
    model.press(KeyEvent::new(code, KeyModifiers::NONE))
}

pub(super) fn type_keys(model: &mut TopModel, keys: &str) {
    for key in keys.chars() {
        assert_eq!(press(model, KeyCode::Char(key)), None, "{key}");
    }
}

pub(super) fn replica(id: &str, state: agent::ReplicaState) -> wire::Replica {
    wire::Replica { id: id.into(), epoch: 1, state: Some(state), ..wire::Replica::default() }
}

fn ready() -> agent::ReplicaState {
    let model = agent::Model { id: "Qwen/Qwen3-8B".into(), ..agent::Model::default() };
    let gpu = agent::Gpu { index: 0, uuid: "GPU-0".into(), name: "NVIDIA H200".into(), memory_bytes: 141 << 30, reading: None };
    agent::ReplicaState {
        phase: agent::Phase::Ready.into(),
        models: vec![model],
        engine_version: "0.32.0".into(),
        engine_pid: 4242,
        gpus: vec![gpu],
        ..agent::ReplicaState::default()
    }
}

fn busy(mut replica: wire::Replica, running: u32) -> wire::Replica {
    let engine = agent::EngineLoad {
        running,
        waiting: running / 3,
        kv_use: f64::from(running) / 37.5,
        kv_blocks: 20_000,
        generation_tokens: 1_000_000,
        prefix_queries: 9000,
        prefix_hits: 5500,
        ..agent::EngineLoad::default()
    };
    let reading = agent::GpuReading {
        uuid: "GPU-0".into(),
        memory_used_bytes: Some(98 << 30),
        utilisation: Some(87),
        watts: Some(612.4),
        celsius: Some(64),
        ..agent::GpuReading::default()
    };
    replica.state.as_mut().unwrap().gpus[0].reading = Some(reading);
    wire::Replica {
        load: Some(agent::Load { in_flight: running, served: 1207, engine: Some(engine), ..agent::Load::default() }),
        cache: Some(wire::Cache { exact: true, blocks: 12_000, ..wire::Cache::default() }),
        first_tokens: Some(wire::FirstTokens { streams: 40, p50: 0.085, p99: 1.23 }),
        ..replica
    }
}

/// Three nodes, one of them in a batch job, with a replica that has failed and one that loads.
pub(super) fn fleet() -> wire::ListResponse {
    let failure = agent::Failure {
        kind: "memory".into(),
        cause: "CUDA out of memory".into(),
        remedy: "end process 4242, which holds 70 GiB of GPU 0".into(),
    };
    let failed = agent::ReplicaState { phase: agent::Phase::Failed.into(), failure: Some(failure), ..agent::ReplicaState::default() };
    let progress = agent::Progress { stage: "loading weights".into(), percent: 45, seconds_left: 20 };
    let loading = agent::ReplicaState { phase: agent::Phase::Loading.into(), progress: Some(progress), ..agent::ReplicaState::default() };
    let job = agent::Job { scheduler: "pbs".into(), id: "12.head".into(), run: 2, ends_in_ms: Some(4_325_000), ..agent::Job::default() };
    let node = |name: &str, replicas, job| wire::Node { name: name.into(), agent_version: "0.1.0".into(), attached: true, replicas, job };
    wire::ListResponse {
        router_version: "0.1.0".into(),
        nodes: vec![
            node("gpu-1", vec![busy(replica("gpu-1/0", ready()), 31)], None),
            node("gpu-2", vec![busy(replica("gpu-2/0", ready()), 7), replica("gpu-2/1", failed)], None),
            node("x3.12", vec![replica("x3.12/0", loading)], Some(job)),
        ],
        demand: vec![wire::ModelDemand {
            model: "Qwen/Qwen3-8B".into(),
            waiting: 5,
            in_flight: 38,
            last_request_ms_ago: Some(2000),
            alias_of: String::new(),
        }],
        first_tokens: Some(wire::FirstTokens { streams: 80, p50: 0.085, p99: 1.23 }),
        in_flight: 43,
        queued: 5,
        requests: Some(wire::RequestCounts { answered: 1000, ..wire::RequestCounts::default() }),
        tenants: vec![wire::TenantUse { name: "physics".into(), in_flight: 12, left: 0.62 }],
        ..wire::ListResponse::default()
    }
}
