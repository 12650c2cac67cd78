//! The fleet in one router's view: nodes, replicas, GPUs. The field names are those of `--json`,
//! here and in `hostler advise`.

use hostler_proto::agent::v1 as agent;
use hostler_proto::fleet::v1 as wire;
use serde::Serialize;

#[derive(Debug, Serialize)]
pub(crate) struct Node {
    pub(crate) node: String,
    pub(crate) agent_version: String,
    pub(crate) attached: bool,
    pub(crate) replicas: Vec<Replica>,
    /// Batch job in which the agent runs; `null` outside of one.
    pub(crate) job: Option<Job>,
}

/// A run of a batch job.
#[derive(Debug, Serialize)]
pub(crate) struct Job {
    pub(crate) scheduler: String,
    pub(crate) id: String,
    pub(crate) array_index: Option<u32>,
    /// Number of the run, counted from 1; it grows when the job is requeued.
    pub(crate) run: u32,
    /// Seconds until the scheduler ends the job; `null` if unknown.
    pub(crate) ends_in_seconds: Option<u64>,
    /// Seconds until the agent begins to leave.
    pub(crate) leaves_in_seconds: Option<u64>,
}

/// A job whose agent is gone.
#[derive(Debug, Serialize)]
pub(crate) struct GoneJob {
    pub(crate) node: String,
    /// The job with the times that it had left when it went.
    pub(crate) job: Job,
    pub(crate) gone_seconds_ago: u64,
    /// How the agent went, and why its engines failed.
    pub(crate) reason: String,
}

#[derive(Debug, Serialize)]
pub(crate) struct Replica {
    pub(crate) id: String,
    /// Name of a phase, or `suspect` if the agent is silent.
    pub(crate) phase: &'static str,
    pub(crate) reason: String,
    pub(crate) models: Vec<String>,
    pub(crate) gpu: String,
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) progress: Option<Progress>,
    /// Failure of the replica's last life; `null` after a good one.
    pub(crate) failure: Option<Failure>,
    /// Findings that cost the engine speed, gravest first.
    pub(crate) findings: Vec<Finding>,
    pub(crate) launch: Option<Launch>,
    pub(crate) epoch: u64,
    pub(crate) restarts: u32,
    /// Requests in flight over all routers, counted by the agent.
    pub(crate) in_flight: u32,
    /// Requests in flight of the router that was asked.
    pub(crate) local_in_flight: u32,
    pub(crate) served: u64,
    pub(crate) running: u32,
    pub(crate) waiting: u32,
    /// Used share of the KV cache, from 0 to 1.
    pub(crate) kv_use: f64,
    pub(crate) cache: Cache,
    pub(crate) rates: Rates,
    pub(crate) engine_version: String,
    pub(crate) engine_pid: u32,
    pub(crate) engine_socket: String,
}

/// A GPU of a replica and its reading; values that its driver does not report are `null`.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Gpu {
    /// Index in PCI order.
    pub(crate) index: u32,
    pub(crate) uuid: String,
    pub(crate) name: String,
    pub(crate) memory_bytes: u64,
    pub(crate) memory_used_bytes: Option<u64>,
    /// Utilisation in percent.
    pub(crate) utilisation: Option<u32>,
    pub(crate) watts: Option<f32>,
    pub(crate) watts_limit: Option<f32>,
    pub(crate) sm_mhz: Option<u32>,
    pub(crate) celsius: Option<u32>,
    pub(crate) throttled: Vec<String>,
    pub(crate) ecc_corrected: Option<u64>,
    pub(crate) ecc_uncorrected: Option<u64>,
    /// The driver's last XID for this GPU; 0 for none.
    pub(crate) last_xid: u32,
}

#[derive(Debug, Serialize)]
pub(crate) struct Progress {
    pub(crate) stage: String,
    pub(crate) percent: u32,
    pub(crate) seconds_left: Option<u32>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Failure {
    pub(crate) kind: String,
    pub(crate) cause: String,
    pub(crate) remedy: String,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Finding {
    pub(crate) kind: String,
    pub(crate) evidence: String,
    pub(crate) advice: String,
}

/// How the engine was started.
#[derive(Debug, Serialize)]
pub(crate) struct Launch {
    pub(crate) profile: String,
    pub(crate) tensor_parallel: u32,
    pub(crate) front_end: String,
    pub(crate) arguments: Vec<String>,
    pub(crate) kv_tokens: Option<u64>,
    pub(crate) max_model_len: Option<u64>,
}

/// The router's knowledge of the blocks that a replica has cached.
#[derive(Debug, Serialize)]
pub(crate) struct Cache {
    /// Whether the blocks are known exactly. Otherwise requests are placed by their text.
    pub(crate) exact: bool,
    pub(crate) blocks: u64,
    /// Whether number and digest of the blocks match the agent's last report.
    pub(crate) matches: bool,
    /// How often they differed.
    pub(crate) resyncs: u64,
    /// Whether the agent's reports contradict themselves.
    pub(crate) distrusted: bool,
    /// State of the router's tokenizer for the model.
    pub(crate) tokenizer: String,
    /// Why the cache is not known exactly, or which requests are still placed by text.
    pub(crate) reason: String,
}

/// A replica's speed as the router has learned it, in seconds.
#[derive(Debug, Serialize)]
pub(crate) struct Rates {
    pub(crate) step: f64,
    pub(crate) prefill: f64,
    pub(crate) attention: f64,
    pub(crate) decode: f64,
    pub(crate) context: f64,
    pub(crate) slowness: f64,
}

impl From<wire::Cache> for Cache {
    fn from(cache: wire::Cache) -> Self {
        let wire::Cache { exact, blocks, matches, resyncs, distrusted, tokenizer, reason } = cache;
        Self { exact, blocks, matches, resyncs, distrusted, tokenizer, reason }
    }
}

impl From<wire::Rates> for Rates {
    fn from(rates: wire::Rates) -> Self {
        let wire::Rates { step, prefill, attention, decode, context, slowness } = rates;
        Self { step, prefill, attention, decode, context, slowness }
    }
}

impl From<agent::Progress> for Progress {
    fn from(progress: agent::Progress) -> Self {
        let agent::Progress { stage, percent, seconds_left } = progress;
        Self { stage, percent, seconds_left: Some(seconds_left).filter(|seconds| *seconds > 0) }
    }
}

impl From<agent::Failure> for Failure {
    fn from(failure: agent::Failure) -> Self {
        let agent::Failure { kind, cause, remedy } = failure;
        Self { kind, cause, remedy }
    }
}

impl From<agent::Finding> for Finding {
    fn from(finding: agent::Finding) -> Self {
        let agent::Finding { kind, evidence, advice } = finding;
        Self { kind, evidence, advice }
    }
}

impl From<agent::Launch> for Launch {
    fn from(launch: agent::Launch) -> Self {
        let agent::Launch { profile, tensor_parallel, front_end, arguments, kv_tokens, max_model_len, missing_routes: _ } = launch;
        let known = |number: u64| Some(number).filter(|number| *number > 0);
        Self { profile, tensor_parallel, front_end, arguments, kv_tokens: known(kv_tokens), max_model_len: known(max_model_len) }
    }
}

impl Progress {
    /// `loading weights 45 %, about 20 s left`.
    pub(crate) fn sentence(&self) -> String {
        let Self { stage, percent, seconds_left } = self;
        let left = seconds_left.map(|seconds| format!(", about {seconds} s left")).unwrap_or_default();
        format!("{stage} {percent} %{left}")
    }
}

impl Gpu {
    /// A GPU of a replica, with its reading if there is one.
    fn new(gpu: agent::Gpu, readings: &[agent::GpuReading]) -> Self {
        let agent::Gpu { index, uuid, name, memory_bytes } = gpu;
        let reading = readings.iter().find(|reading| reading.uuid == uuid).cloned().unwrap_or_default();
        Self {
            index,
            uuid,
            name,
            memory_bytes,
            memory_used_bytes: reading.memory_used_bytes,
            utilisation: reading.utilisation,
            watts: reading.watts,
            watts_limit: reading.watts_limit,
            sm_mhz: reading.sm_mhz,
            celsius: reading.celsius,
            throttled: reading.throttled,
            ecc_corrected: reading.ecc_corrected,
            ecc_uncorrected: reading.ecc_uncorrected,
            last_xid: reading.last_xid,
        }
    }
}

impl From<agent::Job> for Job {
    fn from(job: agent::Job) -> Self {
        let agent::Job { scheduler, id, array_index, run, ends_in_ms, leaves_in_ms } = job;
        let seconds = |ms: u64| ms / 1000;
        Self { scheduler, id, array_index, run, ends_in_seconds: ends_in_ms.map(seconds), leaves_in_seconds: leaves_in_ms.map(seconds) }
    }
}

impl From<wire::GoneJob> for GoneJob {
    fn from(gone: wire::GoneJob) -> Self {
        let wire::GoneJob { node, job, gone_ms_ago, reason } = gone;
        Self { node, job: job.unwrap_or_default().into(), gone_seconds_ago: gone_ms_ago / 1000, reason }
    }
}

impl From<wire::Node> for Node {
    fn from(node: wire::Node) -> Self {
        Self {
            node: node.name,
            agent_version: node.agent_version,
            attached: node.attached,
            replicas: node.replicas.into_iter().map(Replica::from).collect(),
            job: node.job.map(Job::from),
        }
    }
}

impl From<wire::Replica> for Replica {
    fn from(replica: wire::Replica) -> Self {
        let state = replica.state.unwrap_or_default();
        let load = replica.load.unwrap_or_default();
        let engine = load.engine.unwrap_or_default();
        let phase = if replica.suspect { "suspect" } else { state.phase().as_str() };
        Self {
            id: replica.id,
            phase,
            reason: state.reason,
            models: state.models.into_iter().map(|model| model.id).collect(),
            gpu: state.gpu,
            gpus: state.gpus.into_iter().map(|gpu| Gpu::new(gpu, &replica.gpus)).collect(),
            progress: state.progress.map(Progress::from),
            failure: state.failure.map(Failure::from),
            findings: state.findings.into_iter().map(Finding::from).collect(),
            launch: state.launch.map(Launch::from),
            epoch: replica.epoch,
            restarts: state.restarts,
            in_flight: load.in_flight,
            local_in_flight: replica.local_in_flight,
            served: load.served,
            running: engine.running,
            waiting: engine.waiting,
            kv_use: engine.kv_use,
            cache: replica.cache.unwrap_or_default().into(),
            rates: replica.rates.unwrap_or_default().into(),
            engine_version: state.engine_version,
            engine_pid: state.engine_pid,
            engine_socket: state.engine_socket,
        }
    }
}

impl Replica {
    pub(crate) fn is_coming(&self) -> bool {
        matches!(self.phase, "starting" | "loading" | "suspect")
    }

    /// First line of the reason for the phase.
    pub(crate) fn first_reason(&self) -> &str {
        self.reason.lines().next().unwrap_or_default()
    }
}
