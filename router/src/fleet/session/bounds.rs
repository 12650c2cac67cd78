//! Bounds of what an agent says about its replicas: numbers, texts, and how many there are of each.
//! `session` applies them to each report before anything else reads it.

use bytes::Bytes;
use hostler_proto::agent::v1 as wire;
use tonic::Status;

/// Most replicas of one node. An agent has one for each GPU, one on the CPU, or some simulated
/// ones, and numbers them from 0.
pub(super) const MAX_REPLICAS: usize = 256;

/// Most requests that a replica has in flight, over all routers.
pub(super) const MAX_REQUESTS: u32 = 1 << 20;

/// Most tokens that a replica has in memory or still to compute. The largest hosts of today have
/// room for about 100 million.
pub(super) const MAX_TOKENS: u64 = 1 << 28;

/// Longest sentence for people, in bytes. A reason may quote a line of an engine's log, which has
/// up to 2,000.
pub(super) const MAX_SENTENCE_BYTES: usize = 4096;

/// Longest name, in bytes: a version, a GPU, a word for scripts.
pub(super) const MAX_NAME_BYTES: usize = 256;

/// Longest name of a model, in bytes, which may be the path of its folder.
const MAX_MODEL_BYTES: usize = 1024;

/// Most models of one replica, which are adapters but for one.
pub(super) const MAX_MODELS: usize = 1024;

/// Most bytes of the models of one replica with their cards. A card has about 500.
const MAX_BYTES_OF_MODELS: usize = 1024 * 1024;

/// Most findings, GPUs or readings of one replica. The agent knows 20 kinds of finding, and the
/// largest hosts have 16 GPUs.
pub(super) const MAX_ITEMS: usize = 64;

/// Most flags of an engine, and the longest, in bytes: some are JSON.
const MAX_FLAGS: usize = 512;
const MAX_FLAG_BYTES: usize = 16 * 1024;

/// Refuses a number of a replica that no agent gives.
pub(super) fn check_index(index: u32) -> Result<(), Status> {
    if (index as usize) < MAX_REPLICAS {
        return Ok(());
    }
    Err(Status::invalid_argument(format!("a node has at most {MAX_REPLICAS} replicas, numbered from 0, and this one is number {index}")))
}

/// Refuses a report of more replicas than a node has.
pub(super) fn check_replicas(report: &wire::Report) -> Result<(), Status> {
    let count = report.replicas.len();
    if count > MAX_REPLICAS {
        return Err(Status::invalid_argument(format!("a node has at most {MAX_REPLICAS} replicas, and this report has {count}")));
    }
    report.replicas.iter().try_for_each(|replica| check_index(replica.index))
}

/// An agent's load, within what any replica can have: placement adds and multiplies it.
pub(super) fn bound_load(mut load: wire::Load) -> wire::Load {
    load.in_flight = load.in_flight.min(MAX_REQUESTS);
    load.pending_tokens = load.pending_tokens.min(MAX_TOKENS);
    load.context_tokens = load.context_tokens.min(MAX_TOKENS);
    // Each figure is named, so that a new one gets its bound.
    if let Some(wire::EngineLoad {
        running,
        waiting,
        kv_use,
        kv_blocks,
        block_size,
        prompt_tokens: _,
        generation_tokens: _,
        preemptions: _,
        prefix_queries: _,
        prefix_hits: _,
    }) = &mut load.engine
    {
        *running = (*running).min(MAX_REQUESTS);
        *waiting = (*waiting).min(MAX_REQUESTS);
        *kv_blocks = (*kv_blocks).min(MAX_TOKENS / u64::from((*block_size).max(1)));
        *kv_use = if kv_use.is_nan() { 0.0 } else { kv_use.clamp(0.0, 1.0) };
    }
    load
}

/// Cuts what a state says to what is kept, shown and logged of it.
pub(super) fn bound_state(state: &mut wire::ReplicaState) {
    bound_models(&mut state.models);
    for sentence in [Some(&mut state.reason), state.cache.as_mut().map(|watch| &mut watch.reason)].into_iter().flatten() {
        cut(sentence, MAX_SENTENCE_BYTES);
    }
    for name in [&mut state.engine_version, &mut state.engine_socket, &mut state.gpu] {
        cut(name, MAX_NAME_BYTES);
    }
    if let Some(files) = &mut state.prompt_files {
        cut(&mut files.error, MAX_SENTENCE_BYTES);
        // What is left of the message's bytes would keep all of it in memory.
        files.hash = Bytes::copy_from_slice(&files.hash[..files.hash.len().min(MAX_NAME_BYTES)]);
    }
    state.gpus.truncate(MAX_ITEMS);
    for gpu in &mut state.gpus {
        cut(&mut gpu.uuid, MAX_NAME_BYTES);
        cut(&mut gpu.name, MAX_NAME_BYTES);
        // Readings come apart from the state, within `bound_readings`.
        gpu.reading = None;
    }
    if let Some(progress) = &mut state.progress {
        cut(&mut progress.stage, MAX_SENTENCE_BYTES);
    }
    if let Some(launch) = &mut state.launch {
        bound_launch(launch);
    }
    state.findings.truncate(MAX_ITEMS);
    for finding in &mut state.findings {
        cut(&mut finding.kind, MAX_NAME_BYTES);
        cut(&mut finding.evidence, MAX_SENTENCE_BYTES);
        cut(&mut finding.advice, MAX_SENTENCE_BYTES);
    }
    if let Some(failure) = &mut state.failure {
        cut(&mut failure.kind, MAX_NAME_BYTES);
        cut(&mut failure.cause, MAX_SENTENCE_BYTES);
        cut(&mut failure.remedy, MAX_SENTENCE_BYTES);
    }
}

/// Leaves out models beyond the bounds. The beginning of a name would be another model's.
fn bound_models(models: &mut Vec<wire::Model>) {
    let mut room = MAX_BYTES_OF_MODELS;
    models.retain(|model| {
        let left = room
            .checked_sub(model.id.len() + model.card.len() + model.alias_of.len())
            .filter(|_| model.id.len().max(model.alias_of.len()) <= MAX_MODEL_BYTES);
        room = left.unwrap_or(room);
        left.is_some()
    });
    models.truncate(MAX_MODELS);
    // A card is a part of the whole message, which it would keep in memory.
    models.iter_mut().for_each(|model| model.card = Bytes::copy_from_slice(&model.card));
}

fn bound_launch(launch: &mut wire::Launch) {
    cut(&mut launch.profile, MAX_NAME_BYTES);
    cut(&mut launch.front_end, MAX_NAME_BYTES);
    launch.arguments.truncate(MAX_FLAGS);
    launch.arguments.iter_mut().for_each(|flag| cut(flag, MAX_FLAG_BYTES));
    launch.missing_routes.truncate(MAX_ITEMS);
    launch.missing_routes.iter_mut().for_each(|route| cut(route, MAX_NAME_BYTES));
}

/// Cuts readings to those of the most GPUs that a replica has.
pub(super) fn bound_readings(mut readings: Vec<wire::GpuReading>) -> Vec<wire::GpuReading> {
    readings.truncate(MAX_ITEMS);
    for reading in &mut readings {
        cut(&mut reading.uuid, MAX_NAME_BYTES);
        reading.throttled.truncate(MAX_ITEMS);
        reading.throttled.iter_mut().for_each(|reason| cut(reason, MAX_NAME_BYTES));
    }
    readings
}

/// Keeps the beginning of a text, and gives the memory of the rest back.
pub(super) fn cut(text: &mut String, most: usize) {
    if text.len() > most {
        text.truncate(text.floor_char_boundary(most));
        text.shrink_to_fit();
    }
}
