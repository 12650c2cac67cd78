//! Reports of an agent about a replica that is ready.

use hostler_proto::agent::v1 as wire;

/// Model that every replica serves.
pub const MODEL: &str = "light";

/// A replica without an engine, as its agent reports it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Replica {
    /// Index on its node.
    pub index: u32,
    pub in_flight: u32,
    /// Requests taken so far.
    pub served: u64,
}

/// Epoch of its only life.
const EPOCH: u64 = 1;

impl Replica {
    /// Full report, as in a snapshot.
    #[must_use]
    pub fn full_report(self) -> wire::ReplicaReport {
        let card = format!(
            r#"{{"id":"{MODEL}","object":"model","created":1,"owned_by":"hostler","root":"{MODEL}","parent":null,"max_model_len":8192}}"#
        );
        let launch =
            wire::Launch { profile: "throughput".into(), tensor_parallel: 1, front_end: "python".into(), ..wire::Launch::default() };
        let gpu = wire::Gpu { index: self.index, uuid: self.gpu(), name: "none".into(), memory_bytes: 80 << 30, reading: None };
        let state = wire::ReplicaState {
            phase: wire::Phase::Ready.into(),
            reason: "it serves".into(),
            models: vec![wire::Model { id: MODEL.into(), card: card.into(), alias_of: String::new() }],
            engine_version: "0.32.0".into(),
            engine_pid: 1,
            engine_socket: format!("/run/none/{}/engine.sock", self.index),
            gpu: gpu.name.clone(),
            gpus: vec![gpu],
            token_budget: 8192,
            cache: Some(wire::CacheWatch { reason: "there is no engine".into(), ..wire::CacheWatch::default() }),
            launch: Some(launch),
            ..wire::ReplicaState::default()
        };
        wire::ReplicaReport { state: Some(state), ..self.load_report() }
    }

    /// Report of the load alone, which changes with every request.
    #[must_use]
    pub fn load_report(self) -> wire::ReplicaReport {
        let engine = wire::EngineLoad { running: self.in_flight, kv_blocks: 50_000, block_size: 16, ..wire::EngineLoad::default() };
        let load = wire::Load {
            in_flight: self.in_flight,
            in_flight_yours: self.in_flight,
            served: self.served,
            engine: Some(engine),
            ..wire::Load::default()
        };
        wire::ReplicaReport { index: self.index, epoch: EPOCH, load: Some(load), ..wire::ReplicaReport::default() }
    }

    /// Readings of its GPU; `watts` differs from one second to the next.
    #[must_use]
    pub fn gpu_report(self, watts: f32) -> wire::ReplicaReport {
        let reading = wire::GpuReading {
            uuid: self.gpu(),
            memory_used_bytes: Some(70 << 30),
            utilisation: Some(0),
            watts: Some(watts),
            watts_limit: Some(700.0),
            sm_mhz: Some(1_980),
            celsius: Some(40),
            ..wire::GpuReading::default()
        };
        let gpus = Some(wire::GpuReadings { readings: vec![reading] });
        wire::ReplicaReport { index: self.index, epoch: EPOCH, gpus, ..wire::ReplicaReport::default() }
    }

    fn gpu(self) -> String {
        format!("GPU-00000000-0000-0000-0000-{:012}", self.index)
    }
}
