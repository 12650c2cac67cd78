//! The page's content as the JSON that its script reads: the fleet from operators' data
//! (`fleet.v1`), requests from the router's decisions. Times are in seconds, moments in
//! milliseconds since 1970.

use std::time::{Duration, SystemTime};

use hostler_placement::cost::Scored;
use hostler_proto::fleet::v1::{GoneJob, ListResponse, ModelDemand, Node, Replica, TenantUse};
use serde::Serialize;

use super::history::{FirstTokenPicture, millis_since_1970};
use crate::placement::PlacementDecision;

/// Most characters of a reason, an advice or the like that are shown.
const MAX_WORDS: usize = 600;

#[derive(Serialize)]
pub(super) struct Totals {
    in_flight: u32,
    queued: u32,
    first_tokens: Option<FirstTokenPicture>,
}

#[derive(Serialize)]
pub(super) struct TenantPicture {
    name: String,
    in_flight: u32,
    /// Share left of the scarcest limit, 0 to 1.
    left: f64,
}

#[derive(Serialize)]
pub(super) struct ModelPicture {
    name: String,
    waiting: u32,
    in_flight: u32,
}

#[derive(Serialize)]
pub(super) struct NodePicture {
    name: String,
    attached: bool,
    agent_version: String,
    job: Option<JobPicture>,
    replicas: Vec<ReplicaPicture>,
}

#[derive(Serialize)]
struct JobPicture {
    scheduler: String,
    id: String,
    run: u32,
    ends_at: Option<u64>,
    leaves_at: Option<u64>,
}

/// A job whose agent is gone.
#[derive(Serialize)]
pub(super) struct GonePicture {
    node: String,
    job: String,
    gone_at: u64,
    reason: String,
}

#[derive(Serialize)]
struct ReplicaPicture {
    id: String,
    phase: String,
    /// Whether the agent is silent, so that everything else is old.
    suspect: bool,
    reason: String,
    models: Vec<String>,
    /// The engine's hardware, in words.
    hardware: String,
    gpus: Vec<GpuPicture>,
    progress: Option<StartPicture>,
    failure: Option<FailurePicture>,
    findings: Vec<FindingPicture>,
    engine_version: String,
    profile: String,
    max_model_len: u64,
    epoch: u64,
    restarts: u32,
    in_flight: u32,
    local_in_flight: u32,
    served: u64,
    running: u32,
    waiting: u32,
    /// Share of KV blocks in use, 0 to 1.
    kv_use: f64,
    kv_blocks: u64,
    block_tokens: u32,
    prompt_tokens: u64,
    generation_tokens: u64,
    preemptions: u64,
    prefix_queries: u64,
    prefix_hits: u64,
    cached_blocks: u64,
    cache_exact: bool,
    cache_reason: String,
    /// Prompt tokens that the replica computes per second.
    prefill_rate: f64,
    slowness: f64,
    streams_moved: u64,
    first_tokens: Option<FirstTokenPicture>,
}

/// A GPU. Values that its driver does not report are `null`.
#[derive(Serialize)]
struct GpuPicture {
    index: u32,
    name: String,
    memory_bytes: u64,
    memory_used_bytes: Option<u64>,
    /// Percent.
    utilisation: Option<u32>,
    watts: Option<f32>,
    watts_limit: Option<f32>,
    celsius: Option<u32>,
    throttled: Vec<String>,
    ecc_uncorrected: Option<u64>,
    last_xid: u32,
}

#[derive(Serialize)]
struct StartPicture {
    stage: String,
    percent: u32,
    seconds_left: u32,
}

#[derive(Serialize)]
struct FailurePicture {
    cause: String,
    remedy: String,
}

#[derive(Serialize)]
struct FindingPicture {
    kind: String,
    evidence: String,
    advice: String,
}

impl From<&ListResponse> for Totals {
    fn from(listed: &ListResponse) -> Self {
        Self { in_flight: listed.in_flight, queued: listed.queued, first_tokens: listed.first_tokens.map(FirstTokenPicture::from) }
    }
}

impl From<&TenantUse> for TenantPicture {
    fn from(tenant: &TenantUse) -> Self {
        Self { name: tenant.name.clone(), in_flight: tenant.in_flight, left: tenant.left }
    }
}

impl From<&ModelDemand> for ModelPicture {
    fn from(demand: &ModelDemand) -> Self {
        Self { name: demand.model.clone(), waiting: demand.waiting, in_flight: demand.in_flight }
    }
}

impl NodePicture {
    pub(super) fn new(node: &Node, now: SystemTime) -> Self {
        let job = node.job.as_ref().map(|job| JobPicture {
            scheduler: job.scheduler.clone(),
            id: job.id.clone(),
            run: job.run,
            ends_at: job.ends_in_ms.map(|left| whole_second(now + Duration::from_millis(left))),
            leaves_at: job.leaves_in_ms.map(|left| whole_second(now + Duration::from_millis(left))),
        });
        Self {
            name: node.name.clone(),
            attached: node.attached,
            agent_version: node.agent_version.clone(),
            job,
            replicas: node.replicas.iter().map(ReplicaPicture::from).collect(),
        }
    }
}

impl GonePicture {
    pub(super) fn new(gone: &GoneJob, now: SystemTime) -> Self {
        let job = gone.job.as_ref().map(|job| job.id.clone()).unwrap_or_default();
        let gone_at = now.checked_sub(Duration::from_millis(gone.gone_ms_ago)).map_or(0, whole_second);
        Self { node: gone.node.clone(), job, gone_at, reason: shorten(&gone.reason) }
    }
}

impl From<&Replica> for ReplicaPicture {
    fn from(replica: &Replica) -> Self {
        let state = replica.state.clone().unwrap_or_default();
        let load = replica.load.unwrap_or_default();
        let engine = load.engine.unwrap_or_default();
        let cache = replica.cache.clone().unwrap_or_default();
        let rates = replica.rates.unwrap_or_default();
        let launch = state.launch.clone().unwrap_or_default();
        let gpus = state.gpus.iter().map(|gpu| {
            let reading = replica.gpus.iter().find(|reading| reading.uuid == gpu.uuid).cloned().unwrap_or_default();
            GpuPicture {
                index: gpu.index,
                name: gpu.name.clone(),
                memory_bytes: gpu.memory_bytes,
                memory_used_bytes: reading.memory_used_bytes,
                utilisation: reading.utilisation,
                watts: reading.watts,
                watts_limit: reading.watts_limit,
                celsius: reading.celsius,
                throttled: reading.throttled,
                ecc_uncorrected: reading.ecc_uncorrected,
                last_xid: reading.last_xid,
            }
        });
        let findings = state.findings.iter().map(|finding| FindingPicture {
            kind: finding.kind.clone(),
            evidence: shorten(&finding.evidence),
            advice: shorten(&finding.advice),
        });
        Self {
            id: replica.id.clone(),
            phase: state.phase().as_str_name().trim_start_matches("PHASE_").to_ascii_lowercase(),
            suspect: replica.suspect,
            reason: shorten(&state.reason),
            models: state.models.iter().map(|model| model.id.clone()).collect(),
            hardware: state.gpu.clone(),
            gpus: gpus.collect(),
            progress: state.progress.as_ref().map(|progress| StartPicture {
                stage: progress.stage.clone(),
                percent: progress.percent,
                seconds_left: progress.seconds_left,
            }),
            failure: state
                .failure
                .as_ref()
                .map(|failure| FailurePicture { cause: shorten(&failure.cause), remedy: shorten(&failure.remedy) }),
            findings: findings.collect(),
            engine_version: state.engine_version.clone(),
            profile: launch.profile,
            max_model_len: launch.max_model_len,
            epoch: replica.epoch,
            restarts: state.restarts,
            in_flight: load.in_flight,
            local_in_flight: replica.local_in_flight,
            served: load.served,
            running: engine.running,
            waiting: engine.waiting,
            kv_use: engine.kv_use,
            kv_blocks: engine.kv_blocks,
            block_tokens: engine.block_size,
            prompt_tokens: engine.prompt_tokens,
            generation_tokens: engine.generation_tokens,
            preemptions: engine.preemptions,
            prefix_queries: engine.prefix_queries,
            prefix_hits: engine.prefix_hits,
            cached_blocks: cache.blocks,
            cache_exact: cache.exact,
            cache_reason: shorten(&cache.reason),
            prefill_rate: 1.0 / rates.prefill.max(1e-9),
            slowness: rates.slowness,
            streams_moved: replica.streams_moved,
            first_tokens: replica.first_tokens.map(FirstTokenPicture::from),
        }
    }
}

/// A request in the list of the latest ones.
#[derive(Serialize)]
pub(super) struct RequestPicture {
    pub(super) id: String,
    pub(super) attempt: u32,
    at: u64,
    path: String,
    model: String,
    replica: String,
    why: &'static str,
    level: &'static str,
    queue_seconds: f32,
    tokens: u32,
    predicted_first_token: f64,
    predicted_cached: u32,
    /// `null` until, or unless, it is known.
    first_token: Option<f64>,
    cached: Option<u32>,
}

impl RequestPicture {
    pub(super) fn new(decision: &PlacementDecision) -> Self {
        let outcome = *decision.outcome.lock();
        let (replica, choice) = decision.choice();
        Self {
            id: format!("{:016x}", decision.id),
            attempt: decision.attempt,
            at: millis_since_1970(decision.decided_at),
            path: decision.path.to_string(),
            model: shorten(decision.model.as_deref().unwrap_or_default()),
            replica: replica.to_owned(),
            why: decision.reason(),
            level: decision.level.as_str(),
            queue_seconds: decision.queued_seconds,
            tokens: decision.prompt_tokens,
            predicted_first_token: choice.terms.first_token(),
            predicted_cached: choice.candidate.matched,
            first_token: outcome.first_token_seconds,
            cached: outcome.cached_tokens,
        }
    }
}

/// A request explained.
#[derive(Serialize)]
pub(super) struct DecisionPicture {
    #[serde(flatten)]
    request: RequestPicture,
    client_id: String,
    fallback: &'static str,
    expected_output: f64,
    resume: String,
    tied: usize,
    /// How many candidates there were. Not all of very many are kept.
    candidate_count: usize,
    /// Index of the chosen one among the candidates.
    chosen: usize,
    candidates: Vec<CandidatePicture>,
}

#[derive(Serialize)]
struct CandidatePicture {
    replica: String,
    matched: u32,
    uncached: u32,
    in_flight: u32,
    /// Prompt tokens that wait at the replica.
    pending: u64,
    kv_use: f64,
    doubtful: bool,
    /// Seconds since the replica's last report.
    age: f32,
    slowness: f64,
    time_left: Option<f64>,
    finish: f64,
    costs: CostPicture,
}

#[derive(Serialize)]
struct CostPicture {
    queue: f64,
    prefill: f64,
    steps: f64,
    memory: f64,
    congestion: f64,
    decode: f64,
}

impl DecisionPicture {
    pub(super) fn new(decision: &PlacementDecision) -> Self {
        let scored = decision.decision.scored.iter().zip(&decision.replica_names).zip(&decision.report_ages);
        Self {
            request: RequestPicture::new(decision),
            client_id: shorten(decision.client_id.as_deref().unwrap_or_default()),
            fallback: decision.fallback_reason,
            expected_output: decision.expected_output_tokens,
            resume: decision.resume.to_string(),
            tied: decision.decision.tied,
            candidate_count: decision.decision.candidates,
            chosen: decision.decision.chosen,
            candidates: scored.map(|((scored, name), age)| CandidatePicture::new(scored, name, *age)).collect(),
        }
    }
}

impl CandidatePicture {
    fn new(scored: &Scored, replica: &str, age: f32) -> Self {
        let (candidate, terms) = (&scored.candidate, &scored.terms);
        Self {
            replica: replica.to_owned(),
            matched: candidate.matched,
            uncached: scored.uncached,
            in_flight: candidate.in_flight,
            pending: candidate.pending,
            kv_use: candidate.kv_use,
            doubtful: candidate.doubtful,
            age,
            slowness: candidate.rates.slowness,
            time_left: Some(candidate.time_left).filter(|left| left.is_finite()),
            finish: scored.finish,
            costs: CostPicture {
                queue: terms.queue,
                prefill: terms.prefill,
                steps: terms.steps,
                memory: terms.memory,
                congestion: terms.congestion,
                decode: terms.decode,
            },
        }
    }
}

fn shorten(words: &str) -> String {
    words.chars().take(MAX_WORDS).collect()
}

/// Rounded, so that a moment computed from two clocks stays the same from one second to the next.
fn whole_second(at: SystemTime) -> u64 {
    (millis_since_1970(at) + 500) / 1000 * 1000
}

#[cfg(test)]
mod tests;
