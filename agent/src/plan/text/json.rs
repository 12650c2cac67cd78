//! A plan for programs.

use serde_json::{Value, json};

use super::super::layout::{GpuGroupLayout, SizeReason};
use super::super::{FileCache, HostCache, MemoryBudget, ModelInfo, NcclTransport, Plan, ReplicaSpread, StandbyMemory};
use super::front_end;

pub(in super::super) fn of(plan: &Plan) -> Value {
    let model = match &plan.model {
        ModelInfo::Unknown { because } => json!({ "name": plan.name, "unknown": because }),
        ModelInfo::Known(facts) => json!({
            "name": plan.name,
            "architecture": facts.architecture,
            "parameters": facts.parameters,
            "weight_bytes": facts.weight_bytes,
            "format": facts.format.name,
            "layers": facts.shape.layers,
            "attention_heads": facts.shape.heads,
            "kv_heads": facts.shape.kv_heads,
            "head_dim": facts.shape.head_dim,
            "windowed_layers": facts.shape.windowed_layers,
            "recurrent_layers": facts.shape.recurrent_layers,
            "latent_elements": facts.shape.latent,
            "context": facts.context,
        }),
    };
    let replicas: Vec<Value> = plan.replicas.iter().map(|replica| {
        let flags = plan.choices(replica, plan.front_end.in_use);
        let flags: Vec<Value> = flags.iter().map(|choice| json!({ "flag": choice.flag, "value": choice.value, "origin": choice.origin.as_str(), "because": choice.because })).collect();
        let gpus: Vec<&str> = replica.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        json!({ "index": replica.index, "gpus": gpus, "standby": replica.is_standby, "flags": flags })
    }).collect();
    let spare: Vec<Value> = plan
        .layout
        .iter()
        .flat_map(|layout| &layout.spare)
        .map(|spare| json!({ "gpu": spare.gpu.uuid, "because": spare.because }))
        .collect();
    json!({
        "model": model,
        "layout": plan.layout.iter().flat_map(|layout| &layout.shares).map(share).collect::<Vec<_>>(),
        "nodes": plan.spread.map(|spread| nodes(plan, spread)),
        "replicas": replicas,
        "standby": plan.standby.as_ref().map(standby),
        "host_cache": match &plan.host_cache {
            HostCache::Off(because) => json!({ "off": because.to_string() }),
            HostCache::On(share) => json!({ "bytes": share.bytes, "tokens": share.tokens }),
        },
        "file_cache": match &plan.file_cache {
            FileCache::Off(because) => json!({ "off": because.to_string() }),
            FileCache::On(pool) => json!({ "bytes": pool.bytes, "tokens": pool.tokens, "folder": pool.folder }),
        },
        "spare": spare,
        "profile": plan.setup.profile.as_str(),
        "version": plan.setup.version.map(|version| version.to_string()),
        "front_end": { "name": front_end(plan.front_end.in_use).to_lowercase(), "because": plan.front_end.because },
        "warnings": plan.warnings,
    })
}

/// Division of a replica over several nodes.
fn nodes(plan: &Plan, spread: ReplicaSpread) -> Value {
    let share = plan.layout.as_ref().and_then(|layout| layout.shares.first());
    let fullest = share.and_then(|share| share.memory.as_ref()).map(|memory| memory.stage);
    let (transport, because) = match &plan.transport {
        NcclTransport::Unknown => ("unknown", None),
        NcclTransport::Sockets(because) => ("sockets", Some(because)),
        NcclTransport::Fast(because) => ("fast", Some(because)),
    };
    json!({
        "per_replica": spread.nodes,
        "ranks_per_node": spread.ranks_per_node,
        "tensor_parallel": spread.tp,
        "stages": spread.stages,
        "fullest_stage": fullest.map(|stage| json!({ "number": stage.index + 1, "layers": stage.layers })),
        "enough": share.and_then(|share| share.enough_nodes),
        "interface": plan.interface,
        "nccl": { "transport": transport, "because": because },
    })
}

fn standby(standby: &StandbyMemory) -> Value {
    json!({ "each_gpu": budget(&standby.budget), "context": standby.context })
}

fn budget(memory: &MemoryBudget) -> Value {
    json!({
        "usable_bytes": memory.usable,
        "weight_bytes": memory.weights,
        "runtime_bytes": memory.runtime,
        "step_bytes": memory.activations,
        "cache_bytes": memory.cache,
        "token_bytes": memory.token_bytes(),
    })
}

fn share(share: &GpuGroupLayout) -> Value {
    let why = match share.why {
        SizeReason::Smallest => "smallest",
        SizeReason::Requested => "asked",
        SizeReason::Unknown => "unknown",
        SizeReason::Slices => "slices",
    };
    let gpu = &share.replicas[0][0];
    let memory = share.memory.as_ref().map(budget);
    let tokens = share.memory.as_ref().zip(share.context).and_then(|(memory, context)| memory.tokens_in(context));
    let requests = share.memory.as_ref().zip(share.context).and_then(|(memory, context)| memory.requests_of(u64::from(context)));
    json!({
        "gpu": gpu.name,
        "gpu_bytes": gpu.memory_bytes,
        "replicas": share.replicas.len(),
        "tensor_parallel": share.tp,
        "why": why,
        "over_pcie": share.over_pcie,
        "each_gpu": memory,
        "context": share.context,
        "context_shortened": share.is_context_shortened,
        "kv_tokens": tokens,
        "requests_of_full_context": requests,
    })
}
