//! What the routers are told about this node's engines: whole at first, then what changed. Wire types of `Attach` begin here.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hostler_proto::agent::v1 as wire;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::client::EngineClient;
use crate::advise::{self, Advised, Finding, Setup};
use crate::cache::Watch;
use crate::deaths::Death;
use crate::engine::{Engine, Phase, Status};
use crate::files::{Bundle, FilesError, Source};
use crate::gpu::{Gpu, Reading, Readings};
use crate::traffic::RouterKey;
use crate::vllm::FrontEndInUse;

/// After this the prompt files are tried again that a shared filesystem could not give: it may have a bad minute.
const FILES_RETRY: Duration = Duration::from_secs(30);

/// The least time between two reports.
pub const REPORT_INTERVAL: Duration = Duration::from_millis(10);

/// A replica of this node: its engine, and the way of requests to it.
#[derive(Debug)]
pub struct Replica {
    /// Index on this node.
    pub index: u32,
    /// The supervised engine.
    pub engine: Engine,
    /// What is known of it beforehand.
    pub traits: Traits,
    pub(super) client: EngineClient,
    /// The prompt files of its model, or why there are none; nothing before it has been ready.
    prompt_files: watch::Sender<Option<Result<Bundle, String>>>,
    /// What could be better about it.
    findings: watch::Sender<Vec<Finding>>,
}

/// What is known of a replica before its engine starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traits {
    /// Name of its GPU, empty on CPU.
    pub gpu: String,
    /// Tokens that its engine computes in one step at most; 0 when unknown.
    pub token_budget: u32,
    /// Where the prompt files of its model are.
    pub prompt_files: Source,
    /// How it is started.
    pub setup: Setup,
}

impl Replica {
    /// A replica over a supervised engine.
    #[must_use]
    pub fn new(index: u32, engine: Engine, traits: Traits) -> Self {
        let socket: PathBuf = engine.socket().to_owned();
        Self {
            index,
            engine,
            traits,
            client: EngineClient::new(socket),
            prompt_files: watch::Sender::new(None),
            findings: watch::Sender::default(),
        }
    }

    /// What could be better about it, the gravest first.
    #[must_use]
    pub fn findings(&self) -> Vec<Finding> {
        self.findings.borrow().clone()
    }

    fn bundle(&self) -> Option<Bundle> {
        self.prompt_files.borrow().clone()?.ok()
    }
}

/// The node's replicas, and a pulse that beats when something about them has changed.
#[derive(Debug)]
pub struct Board {
    replicas: Vec<Replica>,
    pulse: watch::Sender<u64>,
    /// How the node's GPUs do; nothing on a host without.
    readings: Option<watch::Receiver<Arc<Readings>>>,
}

impl Board {
    /// The board of these replicas, in the order of their index.
    #[must_use]
    pub fn new(replicas: Vec<Replica>) -> Self {
        Self { replicas, pulse: watch::Sender::new(0), readings: None }
    }

    /// As it is, with the readings of the node's GPUs.
    #[must_use]
    pub fn with_readings(self, readings: Option<watch::Receiver<Arc<Readings>>>) -> Self {
        Self { readings, ..self }
    }

    /// How the GPUs of a replica do, in their order; none where the driver has not told.
    #[must_use]
    pub fn gpu_readings(&self, replica: &Replica) -> Vec<Reading> {
        let Some(readings) = &self.readings else { return Vec::new() };
        let readings = readings.borrow();
        replica.traits.setup.gpus.iter().filter_map(|gpu| readings.of(&gpu.uuid).cloned()).collect()
    }

    /// All replicas.
    #[must_use]
    pub fn replicas(&self) -> &[Replica] {
        &self.replicas
    }

    /// The replica of an index.
    #[must_use]
    pub fn replica(&self, index: u32) -> Option<&Replica> {
        self.replicas.get(index as usize)
    }

    /// Wakes when something has changed, at most every 10 ms.
    pub(super) fn pulse(&self) -> watch::Receiver<u64> {
        self.pulse.subscribe()
    }

    /// The bundle of prompt files with this hash, if a replica has it.
    pub(super) fn bundle(&self, hash: &[u8]) -> Option<Bundle> {
        self.replicas.iter().filter_map(Replica::bundle).find(|bundle| bundle.hash == hash)
    }

    /// Watches the engines until `end`.
    pub async fn watch(&self, end: CancellationToken) {
        let watching = self.replicas.iter().map(|replica| async {
            let gpus = || self.gpu_readings(replica);
            let Replica { index, engine, traits, findings, .. } = replica;
            let advising = advise::watch(Advised { replica: *index, engine, setup: &traits.setup, findings }, gpus);
            tokio::join!(self.beat(replica), self.load_files(replica), advising, replica.client.tend())
        });
        tokio::select! {
            _ = futures_util::future::join_all(watching) => end.cancelled().await,
            () = end.cancelled() => {}
        }
    }

    /// Beats for each change of a replica, until its engine has ended for good.
    async fn beat(&self, replica: &Replica) {
        let (mut status, mut samples, mut traffic) =
            (replica.engine.status(), replica.engine.samples(), replica.engine.traffic().changes());
        let (mut cache, mut files, mut findings) =
            (replica.engine.cache().watch(), replica.prompt_files.subscribe(), replica.findings.subscribe());
        let mut deaths = replica.engine.deaths().tidings();
        // They change for all at once, whichever replica they are of.
        let mut readings = self.readings.clone().filter(|_| !replica.traits.setup.gpus.is_empty());
        loop {
            // An engine that has ended for good changes no more.
            let changed = tokio::select! {
                changed = status.changed() => changed.is_ok(),
                changed = samples.changed() => changed.is_ok(),
                changed = traffic.changed() => changed.is_ok(),
                changed = cache.changed() => changed.is_ok(),
                changed = files.changed() => changed.is_ok(),
                changed = deaths.changed() => changed,
                changed = findings.changed() => changed.is_ok(),
                () = read(readings.as_mut()) => true,
            };
            if !changed {
                return;
            }
            self.pulse.send_modify(|beats| *beats += 1);
            tokio::time::sleep(REPORT_INTERVAL).await;
        }
    }

    /// Reads the prompt files anew in each life of the engine, when it is ready: then it has downloaded what it needs.
    async fn load_files(&self, replica: &Replica) {
        let mut status = replica.engine.status();
        let mut loaded = 0;
        while let Ok(epoch) = status.wait_for(|now| now.phase == Phase::Ready && now.epoch != loaded).await.map(|now| now.epoch) {
            loaded = epoch;
            let read = replica.traits.prompt_files.load(replica.engine.socket()).await;
            let may_pass = read.as_ref().is_err_and(FilesError::may_pass);
            if let Err(error) = &read {
                tracing::warn!(replica = replica.index, %error, "routers cannot tokenize for this engine; requests are placed by text");
            }
            let found = match read {
                // Equal bundles share their memory.
                Ok(bundle) => Ok(self.bundle(&bundle.hash).unwrap_or(bundle)),
                Err(error) => Err(format!("{error}: requests are placed by text")),
            };
            replica.prompt_files.send_replace(Some(found));
            if may_pass {
                loaded = 0;
                tokio::time::sleep(FILES_RETRY).await;
            }
        }
    }
}

/// The next readings of GPUs, if there are any.
async fn read(readings: Option<&mut watch::Receiver<Arc<Readings>>>) {
    if let Some(readings) = readings
        && readings.changed().await.is_ok()
    {
        return;
    }
    std::future::pending::<()>().await;
}

/// Makes one router's reports.
#[derive(Debug)]
pub(super) struct Reporter {
    router: RouterKey,
    sequence: u64,
    /// What the router knows of each replica.
    told: Vec<Told>,
}

#[derive(Debug, Clone, Default, PartialEq)]
struct Told {
    epoch: u64,
    /// Deaths so far.
    deaths: u64,
    state: Option<wire::ReplicaState>,
    load: Option<wire::Load>,
    gpus: Option<wire::GpuReadings>,
}

impl Reporter {
    pub(super) fn new(router: RouterKey) -> Self {
        Self { router, sequence: 0, told: Vec::new() }
    }

    /// Everything, as if nothing had been told.
    pub(super) fn snapshot(&mut self, board: &Board) -> wire::Report {
        self.told = vec![Told::default(); board.replicas.len()];
        self.sequence = 0;
        wire::Report { snapshot: true, ..self.report(board) }
    }

    /// The life of a replica's engine that the router was last told of; 0 before the first.
    pub(super) fn told_epoch(&self, index: usize) -> u64 {
        self.told.get(index).map_or(0, |told| told.epoch)
    }

    /// What has changed since the last report, which may be nothing.
    pub(super) fn report(&mut self, board: &Board) -> wire::Report {
        let mut replicas = Vec::new();
        for (replica, told) in board.replicas.iter().zip(&mut self.told) {
            let mut now = Told { gpus: gpu_readings(&board.gpu_readings(replica)), ..now(replica, self.router) };
            if now == *told {
                continue;
            }
            let deaths;
            (deaths, now.deaths) = replica.engine.deaths().since(told.deaths);
            replicas.push(wire::ReplicaReport {
                index: replica.index,
                epoch: now.epoch,
                state: now.state.clone().filter(|_| now.state != told.state),
                load: now.load.filter(|_| now.load != told.load),
                gpus: now.gpus.clone().filter(|_| now.gpus != told.gpus),
                deaths: deaths.iter().map(death).collect(),
            });
            *told = now;
        }
        let sequence = self.sequence;
        self.sequence += 1;
        wire::Report { sequence, snapshot: false, replicas }
    }
}

fn death(death: &Death) -> wire::Death {
    wire::Death {
        epoch: death.epoch,
        age_ms: u64::try_from(death.at.elapsed().as_millis()).unwrap_or(u64::MAX),
        requests: death.requests.iter().map(|name| name.0.into()).collect(),
    }
}

fn now(replica: &Replica, router: RouterKey) -> Told {
    let status = replica.engine.status().borrow().clone();
    // A reading that could not be renewed says nothing any more; the agent's own counts stay true.
    let sample = replica.engine.samples().borrow().filter(|sample| !sample.stale);
    let counts = replica.engine.traffic().changes();
    let counts = counts.borrow();
    let (all, yours) = (counts.sum(), counts.sum_of(router));
    let load = wire::Load {
        in_flight: all.requests,
        in_flight_yours: yours.requests,
        served: counts.served_total(),
        engine: sample.map(|sample| wire::EngineLoad {
            running: sample.figures.running,
            waiting: sample.figures.waiting,
            kv_use: sample.figures.kv_use,
            kv_blocks: sample.figures.kv_blocks.unwrap_or(0),
            block_size: sample.figures.block_size.unwrap_or(0),
            prompt_tokens: sample.figures.prompt_tokens,
            generation_tokens: sample.figures.generation_tokens,
            preemptions: sample.figures.preemptions,
            prefix_queries: sample.figures.prefix_queries,
            prefix_hits: sample.figures.prefix_hits,
        }),
        pending_tokens: all.pending_tokens,
        pending_tokens_yours: yours.pending_tokens,
        context_tokens: all.context_tokens,
        context_tokens_yours: yours.context_tokens,
    };
    Told {
        epoch: status.epoch,
        deaths: replica.engine.deaths().version(),
        state: Some(state(replica, status)),
        load: Some(load),
        gpus: None,
    }
}

fn state(replica: &Replica, status: Status) -> wire::ReplicaState {
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
    let cache = cache(&watched, status.epoch);
    let launch = launch(&replica.traits.setup, &status);
    wire::ReplicaState {
        phase: phase.into(),
        reason: status.reason,
        models: status.models.iter().map(|card| wire::Model { id: card.id.clone(), card: card.raw.clone() }).collect(),
        engine_version: status.version.map(|version| version.to_string()).unwrap_or_default(),
        engine_pid: status.pid.unwrap_or(0),
        engine_socket: replica.engine.socket().display().to_string(),
        restarts: status.restarts,
        gpu: replica.traits.gpu.clone(),
        token_budget: replica.traits.token_budget,
        prompt_files: replica.prompt_files.borrow().as_ref().map(prompt_files),
        cache: Some(cache),
        gpus: replica.traits.setup.gpus.iter().map(gpu).collect(),
        progress: status.progress.map(|progress| wire::Progress {
            stage: progress.stage,
            percent: progress.percent.into(),
            seconds_left: progress.seconds_left.unwrap_or(0),
        }),
        launch: Some(launch),
        findings: replica.findings.borrow().iter().map(finding).collect(),
        failure: status.failure.map(|failure| wire::Failure {
            kind: failure.kind.word().to_owned(),
            cause: failure.cause,
            remedy: failure.remedy,
        }),
    }
}

fn gpu(gpu: &Gpu) -> wire::Gpu {
    let Gpu { index, uuid, name, memory_bytes, .. } = gpu.clone();
    wire::Gpu { index, uuid, name, memory_bytes }
}

/// Nothing on CPU.
fn gpu_readings(readings: &[Reading]) -> Option<wire::GpuReadings> {
    let reading = |reading: &Reading| wire::GpuReading {
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

fn launch(setup: &Setup, status: &Status) -> wire::Launch {
    let front_end = match status.front_end {
        FrontEndInUse::Python => "python",
        FrontEndInUse::Rust => "rust",
    };
    wire::Launch {
        profile: setup.profile.to_owned(),
        tensor_parallel: setup.tensor_parallel,
        front_end: front_end.to_owned(),
        arguments: setup.arguments.clone(),
        kv_tokens: status.facts.kv_tokens.unwrap_or(0),
        max_model_len: status.facts.max_model_len.unwrap_or(0),
    }
}

fn finding(finding: &Finding) -> wire::Finding {
    let Finding { kind, evidence, advice } = finding.clone();
    wire::Finding { kind: kind.word().to_owned(), evidence, advice }
}

/// Without the version of the blocks: the state is not sent again for each of them.
fn cache(watched: &Watch, epoch: u64) -> wire::CacheWatch {
    if watched.epoch != epoch {
        // It tells of the life before, for a moment.
        return wire::CacheWatch { reason: "the engine has just started".into(), ..wire::CacheWatch::default() };
    }
    let Watch { exact, reason, block_size, has_holes, .. } = watched.clone();
    wire::CacheWatch { exact, reason, block_size, has_holes }
}

fn prompt_files(found: &Result<Bundle, String>) -> wire::PromptFiles {
    match found {
        Ok(bundle) => wire::PromptFiles { hash: bundle.hash.clone(), bytes: bundle.bytes.len() as u64, error: String::new() },
        Err(error) => wire::PromptFiles { error: error.clone(), ..wire::PromptFiles::default() },
    }
}
