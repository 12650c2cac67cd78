//! Reports to the routers about this node's engines: whole at first, then only changes.
//!
//! The wire types of `Attach` begin here.

use std::time::Duration;

use hostler_proto::agent::v1 as wire;
use tokio::time::Instant;

use crate::advise::{EngineSetup, Finding};
use crate::cache::CacheStatus;
use crate::crashes::Crash;
use crate::engine::startup_progress::{PastStage, StartPart};
use crate::engine::{EngineStatus, ModelCard, PastStart, Phase};
use crate::gang::MemberView;
use crate::gpu::{Gpu, GpuReading};
use crate::job::{JobClock, JobFacts};
use crate::node::{NodeState, Replica};
use crate::prompt_files::Bundle;
use crate::traffic::RouterKey;
use crate::vllm::FrontEndInUse;

/// Builder of one router's reports.
#[derive(Debug)]
pub(super) struct Reporter {
    router: RouterKey,
    sequence: u64,
    last_reports: Vec<ReplicaSnapshot>,
    last_job: Option<JobFacts>,
}

#[derive(Debug, Clone, Default, PartialEq)]
struct ReplicaSnapshot {
    epoch: u64,
    crashes: u64,
    state: Option<wire::ReplicaState>,
    load: Option<wire::Load>,
    gpus: Option<wire::GpuReadings>,
}

impl Reporter {
    pub(super) fn new(router: RouterKey) -> Self {
        Self { router, sequence: 0, last_reports: Vec::new(), last_job: None }
    }

    /// Report of everything, as if nothing had been reported before.
    pub(super) fn snapshot(&mut self, node: &NodeState) -> wire::Report {
        self.last_reports = vec![ReplicaSnapshot::default(); node.replicas().len()];
        (self.sequence, self.last_job) = (0, None);
        wire::Report { snapshot: true, ..self.report(node) }
    }

    /// Life of a replica's engine in the last report to the router; 0 before the first.
    pub(super) fn reported_epoch(&self, index: usize) -> u64 {
        self.last_reports.get(index).map_or(0, |reported| reported.epoch)
    }

    /// Report of the changes since the last one, which may be empty.
    pub(super) fn report(&mut self, node: &NodeState) -> wire::Report {
        let mut replicas = Vec::new();
        let queued = node.job().and_then(|job| job.facts().borrow().queued);
        for (replica, reported) in node.replicas().iter().zip(&mut self.last_reports) {
            let mut now =
                ReplicaSnapshot { gpus: gpu_readings(&node.gpu_readings(replica)), ..current_snapshot(replica, self.router, queued) };
            if now == *reported {
                continue;
            }
            let crashes;
            (crashes, now.crashes) = replica.engine.crashes().crashes_since(reported.crashes);
            replicas.push(wire::ReplicaReport {
                index: replica.index,
                epoch: now.epoch,
                state: now.state.clone().filter(|_| now.state != reported.state),
                load: now.load.filter(|_| now.load != reported.load),
                gpus: now.gpus.clone().filter(|_| now.gpus != reported.gpus),
                crashes: crashes.iter().map(engine_crash).collect(),
            });
            *reported = now;
        }
        let sequence = self.sequence;
        self.sequence += 1;
        wire::Report { sequence, snapshot: false, replicas, job: self.job_news(node.job()) }
    }

    /// Job data, if more is known than was reported to the router.
    fn job_news(&mut self, job: Option<&JobClock>) -> Option<wire::Job> {
        let job = job?;
        let facts = *job.facts().borrow();
        (self.last_job.replace(facts) != Some(facts)).then(|| self::job(job))
    }
}

/// Present state of the job. Hosts' clocks differ, so its end is sent as the time left.
pub(super) fn job(clock: &JobClock) -> wire::Job {
    let (job, JobFacts { run, ends_at, leaves_at, .. }) = (clock.job(), *clock.facts().borrow());
    let now = Instant::now();
    let left = |moment: Instant| u64::try_from(moment.saturating_duration_since(now).as_millis()).unwrap_or(u64::MAX);
    wire::Job {
        scheduler: job.scheduler.as_str().to_owned(),
        id: job.id.clone(),
        array_index: job.array_index,
        run,
        ends_in_ms: ends_at.map(left),
        leaves_in_ms: leaves_at.map(left),
    }
}

fn engine_crash(crash: &Crash) -> wire::EngineCrash {
    wire::EngineCrash {
        epoch: crash.epoch,
        age_ms: u64::try_from(crash.at.elapsed().as_millis()).unwrap_or(u64::MAX),
        requests: crash.requests.iter().map(|name| name.0.into()).collect(),
    }
}

fn current_snapshot(replica: &Replica, router: RouterKey, queued: Option<Duration>) -> ReplicaSnapshot {
    let status = replica.engine.status().borrow().clone();
    // A stale reading says nothing any more; the agent's own counts stay valid.
    let sample = replica.engine.samples().borrow().filter(|sample| !sample.is_stale);
    let counts = replica.engine.traffic().subscribe();
    let counts = counts.borrow();
    let (all, yours) = (counts.totals(), counts.totals_of(router));
    let load = wire::Load {
        in_flight: all.requests,
        in_flight_yours: yours.requests,
        served: counts.served_total(),
        engine: sample.map(|sample| wire::EngineLoad {
            running: sample.metrics.running,
            waiting: sample.metrics.waiting,
            kv_use: sample.metrics.kv_use,
            kv_blocks: sample.metrics.kv_blocks.unwrap_or(0),
            block_size: sample.metrics.block_size.unwrap_or(0),
            prompt_tokens: sample.metrics.prompt_tokens,
            generation_tokens: sample.metrics.generation_tokens,
            preemptions: sample.metrics.preemptions,
            prefix_queries: sample.metrics.prefix_queries,
            prefix_hits: sample.metrics.prefix_hits,
        }),
        pending_tokens: all.pending_tokens,
        pending_tokens_yours: yours.pending_tokens,
        context_tokens: all.context_tokens,
        context_tokens_yours: yours.context_tokens,
    };
    ReplicaSnapshot {
        epoch: status.epoch,
        crashes: replica.engine.crashes().version(),
        state: Some(state(replica, status, queued)),
        load: Some(load),
        gpus: None,
    }
}

fn state(replica: &Replica, status: EngineStatus, queued: Option<Duration>) -> wire::ReplicaState {
    let phase = match status.phase {
        Phase::Starting => wire::Phase::Starting,
        Phase::Loading => wire::Phase::Loading,
        Phase::Ready => wire::Phase::Ready,
        Phase::Draining => wire::Phase::Draining,
        Phase::Stopped => wire::Phase::Stopped,
        Phase::Failed => wire::Phase::Failed,
        Phase::Quarantined => wire::Phase::Quarantined,
        Phase::Sleeping => wire::Phase::Sleeping,
    };
    let watched = replica.engine.cache().watch().borrow().clone();
    let cache = cache_watch(&watched, status.epoch);
    let setup = &replica.traits.setup;
    let launch = launch(setup, &status);
    let models = models(setup, &status);
    let reason = match setup.attached_to() {
        Some(target) if status.phase == Phase::Ready => {
            format!("attached to {target}: not ours, so it is neither started again nor ended when it hangs")
        }
        Some(target) if matches!(status.phase, Phase::Starting | Phase::Loading) => {
            let why = if status.reason.is_empty() { String::new() } else { format!(": {}", status.reason) };
            format!("waits for {target}, which is not ours{why}")
        }
        _ if replica.traits.is_standby && status.phase == Phase::Ready => {
            "standby: answers only while no other replica serves its model".to_owned()
        }
        _ => status.reason,
    };
    wire::ReplicaState {
        phase: phase.into(),
        reason,
        models,
        engine_version: status.version.map(|version| version.to_string()).unwrap_or_default(),
        engine_pid: status.pid.unwrap_or(0),
        engine_socket: replica.engine.socket().display().to_string(),
        restarts: status.restarts,
        hangs: status.hangs,
        returns_in_seconds: status.returns_in.unwrap_or(0),
        gpu: replica.traits.gpu.clone(),
        token_budget: replica.traits.token_budget,
        prompt_files: replica.prompt_files().as_ref().map(prompt_files),
        cache: Some(cache),
        gpus: replica.traits.setup.gpus.iter().map(gpu).collect(),
        progress: status.progress.map(|progress| wire::Progress {
            stage: progress.stage,
            percent: progress.percent.into(),
            seconds_left: progress.seconds_left.unwrap_or(0),
        }),
        launch: Some(launch),
        findings: replica.findings().iter().map(finding).collect(),
        failure: status.failure.map(|failure| wire::Failure {
            kind: failure.kind.as_str().to_owned(),
            cause: failure.cause,
            remedy: failure.remedy,
        }),
        start: status.start.as_deref().map(|start| past_start(start, queued.filter(|_| status.restarts == 0))),
        is_standby: replica.traits.is_standby,
        is_simulated: setup.simulated,
        members: replica.engine.members().into_iter().map(member).collect(),
    }
}

fn member(view: MemberView) -> wire::Member {
    let MemberView { number, host, gpus, state, is_heard } = view;
    wire::Member { number, host, gpus, state, is_heard }
}

/// The stages of a start, after the wait of its job in the queue.
fn past_start(start: &PastStart, queued: Option<Duration>) -> wire::Start {
    let queue = queued.map(|took| PastStage { stage: "waiting in the queue", part: StartPart::Queue, took });
    let stage = |past: &PastStage| wire::StartStage {
        stage: past.stage.to_owned(),
        seconds: past.took.as_secs_f32(),
        part: past.part.as_str().to_owned(),
    };
    wire::Start { origin: start.origin.as_str().to_owned(), stages: queue.iter().chain(&start.stages).map(stage).collect() }
}

/// What the engine serves or, before it has said so, will serve by its arguments.
fn models(setup: &EngineSetup, status: &EngineStatus) -> Vec<wire::Model> {
    let mut cards: Vec<ModelCard> = status.models.to_vec();
    if cards.is_empty() {
        cards.extend(setup.model_names.iter().cloned().map(ModelCard::announced));
    }
    let own_name = cards.first().map(|card| card.id.clone()).unwrap_or_default();
    let alias_of = |id: &str| if setup.path_alias.as_deref() == Some(id) { own_name.clone() } else { String::new() };
    cards.into_iter().map(|card| wire::Model { alias_of: alias_of(&card.id), id: card.id, card: card.raw }).collect()
}

fn gpu(gpu: &Gpu) -> wire::Gpu {
    let Gpu { index, uuid, name, memory_bytes, .. } = gpu.clone();
    wire::Gpu { index, uuid, name, memory_bytes, reading: None }
}

/// Readings for the wire; `None` on CPU.
fn gpu_readings(readings: &[GpuReading]) -> Option<wire::GpuReadings> {
    let reading = |reading: &GpuReading| wire::GpuReading {
        uuid: reading.uuid.clone(),
        memory_used_bytes: reading.memory_used_bytes,
        utilisation: reading.utilisation,
        watts: reading.watts,
        watts_limit: reading.watts_limit,
        sm_mhz: reading.sm_mhz,
        celsius: reading.celsius,
        throttled: reading.throttled.iter().map(|&reason| reason.to_owned()).collect(),
        ecc_corrected: reading.ecc_corrected,
        ecc_uncorrected: reading.ecc_uncorrected,
        last_xid: reading.last_xid,
    };
    (!readings.is_empty()).then(|| wire::GpuReadings { readings: readings.iter().map(reading).collect() })
}

fn launch(setup: &EngineSetup, status: &EngineStatus) -> wire::Launch {
    let front_end = match status.front_end {
        _ if setup.attached => "attached",
        FrontEndInUse::Python => "python",
        FrontEndInUse::Rust => "rust",
    };
    wire::Launch {
        profile: setup.profile.to_owned(),
        tensor_parallel: setup.tensor_parallel,
        front_end: front_end.to_owned(),
        arguments: setup.arguments.clone(),
        kv_tokens: status.facts.kv_tokens.unwrap_or(0),
        max_model_len: status.max_model_len().unwrap_or(0),
        missing_routes: status.missing_routes.iter().map(|route| (*route).to_owned()).collect(),
        kv_token_bytes: setup.kv_token_bytes,
        host_kv_tokens: setup.host_kv_tokens,
    }
}

fn finding(finding: &Finding) -> wire::Finding {
    let Finding { kind, evidence, advice } = finding.clone();
    wire::Finding { kind: kind.as_str().to_owned(), evidence, advice }
}

/// Cache state without the version of the blocks, so that block changes alone do not send the state
/// again.
fn cache_watch(watched: &CacheStatus, epoch: u64) -> wire::CacheWatch {
    if watched.epoch != epoch {
        // For a moment the cache still reports the previous life.
        return wire::CacheWatch { reason: "the engine has just started".into(), ..wire::CacheWatch::default() };
    }
    let CacheStatus { exact, reason, block_size, has_holes, .. } = watched.clone();
    wire::CacheWatch { exact, reason, block_size, has_holes }
}

fn prompt_files(found: &Result<Bundle, String>) -> wire::PromptFiles {
    match found {
        Ok(bundle) => wire::PromptFiles { hash: bundle.hash.clone(), bytes: bundle.bytes.len() as u64, error: String::new() },
        Err(error) => wire::PromptFiles { error: error.clone(), ..wire::PromptFiles::default() },
    }
}
