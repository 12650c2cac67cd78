//! Replicas of this node, as the rest of the agent sees them.
//!
//! Each has its engine, its traits, its prompt files and findings. The node also signals every
//! change. Sessions report the state, relays look up replicas in it, and the metrics page reads it.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::advise::{self, AdvisedReplica, EngineSetup, Finding};
use crate::cache::FileLog;
use crate::engine::{Engine, Phase};
use crate::engine_client::EngineClient;
use crate::gpu::{GpuReading, GpuReadings};
use crate::job::JobClock;
use crate::prompt_files::{Bundle, PromptFileSource, PromptFilesError};

/// Delay before prompt files that a shared filesystem could not give are read again.
///
/// Such a filesystem may have a bad minute.
const FILES_RETRY: Duration = Duration::from_secs(30);

/// Minimum time between two signals, and so between two reports.
pub const REPORT_INTERVAL: Duration = Duration::from_millis(10);

/// A replica of this node: its engine and the facts about it.
#[derive(Debug)]
pub struct Replica {
    pub index: u32,
    pub engine: Engine,
    /// Traits known before the engine starts.
    pub traits: ReplicaTraits,
    pub(crate) client: EngineClient,
    /// Prompt files of the replica's model, or why there are none; `None` before it has been ready.
    prompt_files: watch::Sender<Option<Result<Bundle, String>>>,
    /// Findings that slow the engine down, the gravest first.
    findings: watch::Sender<Vec<Finding>>,
}

/// Traits of a replica before its engine starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaTraits {
    /// Name of the replica's GPU, empty on CPU.
    pub gpu: String,
    /// Most tokens that the engine computes in one step; 0 if unknown.
    pub token_budget: u32,
    /// Routers use it while no other replica serves its model.
    pub is_standby: bool,
    /// Location of the model's prompt files.
    pub prompt_files: PromptFileSource,
    /// How the engine is started.
    pub setup: EngineSetup,
}

impl Replica {
    #[must_use]
    pub fn new(index: u32, engine: Engine, traits: ReplicaTraits) -> Self {
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

    /// Findings that slow the engine down, the gravest first.
    #[must_use]
    pub fn findings(&self) -> Vec<Finding> {
        self.findings.borrow().clone()
    }

    /// Prompt files of the replica, or why there are none; `None` before it has been ready.
    pub(crate) fn prompt_files(&self) -> watch::Ref<'_, Option<Result<Bundle, String>>> {
        self.prompt_files.borrow()
    }

    fn bundle(&self) -> Option<Bundle> {
        self.prompt_files.borrow().clone()?.ok()
    }
}

/// Replicas of the node, and a signal that something about them has changed.
#[derive(Debug)]
pub struct NodeState {
    replicas: Vec<Replica>,
    changes: watch::Sender<u64>,
    /// Readings of the node's GPUs; `None` on a host without GPUs.
    readings: Option<watch::Receiver<Arc<GpuReadings>>>,
    /// Batch job that the agent runs in.
    job: Option<Arc<JobClock>>,
    /// Log of the files with KV blocks that the engines share.
    file_log: Option<Arc<FileLog>>,
    cut_off: CutOff,
}

/// End of all running requests, because the node leaves.
#[derive(Debug, Default)]
struct CutOff {
    /// Message to the clients.
    reason: OnceLock<String>,
    has_come: CancellationToken,
}

impl NodeState {
    /// State of these replicas, in the order of their index.
    #[must_use]
    pub fn new(replicas: Vec<Replica>) -> Self {
        Self { replicas, changes: watch::Sender::new(0), readings: None, job: None, file_log: None, cut_off: CutOff::default() }
    }

    /// Adds the readings of the node's GPUs.
    #[must_use]
    pub fn with_readings(self, readings: Option<watch::Receiver<Arc<GpuReadings>>>) -> Self {
        Self { readings, ..self }
    }

    /// Adds the batch job.
    #[must_use]
    pub(crate) fn with_job(self, job: Option<Arc<JobClock>>) -> Self {
        Self { job, ..self }
    }

    /// Adds the log of the files with KV blocks that the engines share.
    #[must_use]
    pub(crate) fn with_file_log(self, file_log: Option<Arc<FileLog>>) -> Self {
        Self { file_log, ..self }
    }

    /// Log of the files with KV blocks that the engines share, if they do.
    pub(crate) fn file_log(&self) -> Option<Arc<FileLog>> {
        self.file_log.clone()
    }

    /// Batch job that the agent runs in.
    pub(crate) fn job(&self) -> Option<&JobClock> {
        self.job.as_deref()
    }

    /// Readings of a replica's GPUs, in their order; empty if the driver has not answered.
    #[must_use]
    pub fn gpu_readings(&self, replica: &Replica) -> Vec<GpuReading> {
        let Some(readings) = &self.readings else { return Vec::new() };
        let readings = readings.borrow();
        replica.traits.setup.gpus.iter().filter_map(|gpu| readings.of(&gpu.uuid).cloned()).collect()
    }

    #[must_use]
    pub fn replicas(&self) -> &[Replica] {
        &self.replicas
    }

    #[must_use]
    pub fn replica(&self, index: u32) -> Option<&Replica> {
        self.replicas.get(index as usize)
    }

    /// Replicas with these indices; all if none is given.
    pub(crate) fn select<'a>(&'a self, indices: &'a [u32]) -> impl Iterator<Item = &'a Replica> {
        self.replicas.iter().filter(move |replica| indices.is_empty() || indices.contains(&replica.index))
    }

    /// Wakes when something has changed, at most every 10 ms.
    pub(crate) fn changed(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Ends all running requests, and tells their clients why.
    pub(crate) fn cut_off(&self, reason: String) {
        let _ = self.cut_off.reason.set(reason);
        self.cut_off.has_come.cancel();
    }

    /// Resolves when running requests must end.
    pub(crate) fn wait_cut_off(&self) -> impl Future<Output = ()> + Send + 'static {
        self.cut_off.has_come.clone().cancelled_owned()
    }

    /// Why running requests had to end; `None` while they may run.
    pub(crate) fn cut_off_reason(&self) -> Option<&str> {
        self.cut_off.reason.get().map(String::as_str)
    }

    /// Bundle of prompt files with this hash, if a replica has it.
    pub(crate) fn bundle(&self, hash: &[u8]) -> Option<Bundle> {
        self.replicas.iter().filter_map(Replica::bundle).find(|bundle| bundle.hash == hash)
    }

    pub async fn watch(&self, end: CancellationToken) {
        let watching = self.replicas.iter().map(|replica| async {
            let gpus = || self.gpu_readings(replica);
            let Replica { index, engine, traits, findings, .. } = replica;
            let advising = advise::watch(AdvisedReplica { replica: *index, engine, setup: &traits.setup, findings }, gpus);
            tokio::join!(self.signal_changes(replica), self.load_files(replica), advising, replica.client.prune_idle())
        });
        let watching = async {
            tokio::join!(futures_util::future::join_all(watching), self.signal_job());
        };
        tokio::select! {
            () = watching => end.cancelled().await,
            () = end.cancelled() => {}
        }
    }

    /// Signals each change of the facts about the job.
    async fn signal_job(&self) {
        let Some(job) = &self.job else { return };
        let mut facts = job.facts();
        while facts.changed().await.is_ok() {
            self.changes.send_modify(|changes| *changes += 1);
        }
    }

    /// Signals each change of a replica, until its engine has ended for good.
    async fn signal_changes(&self, replica: &Replica) {
        let (mut status, mut samples, mut traffic) =
            (replica.engine.status(), replica.engine.samples(), replica.engine.traffic().subscribe());
        let (mut cache, mut files, mut findings) =
            (replica.engine.cache().watch(), replica.prompt_files.subscribe(), replica.findings.subscribe());
        let mut deaths = replica.engine.crashes().subscribe();
        // The readings change for all GPUs at once, whichever replica they belong to.
        let mut readings = self.readings.clone().filter(|_| !replica.traits.setup.gpus.is_empty());
        loop {
            // An engine that has ended for good no longer changes.
            let changed = tokio::select! {
                changed = status.changed() => changed.is_ok(),
                changed = samples.changed() => changed.is_ok(),
                changed = traffic.changed() => changed.is_ok(),
                changed = cache.changed() => changed.is_ok(),
                changed = files.changed() => changed.is_ok(),
                changed = deaths.changed() => changed,
                changed = findings.changed() => changed.is_ok(),
                () = next_readings(readings.as_mut()) => true,
            };
            if !changed {
                return;
            }
            self.changes.send_modify(|changes| *changes += 1);
            tokio::time::sleep(REPORT_INTERVAL).await;
        }
    }

    /// Reads the prompt files anew in each life of the engine, once it is ready.
    ///
    /// By then it has downloaded everything it needs.
    async fn load_files(&self, replica: &Replica) {
        let mut status = replica.engine.status();
        let mut loaded = 0;
        while let Ok(epoch) = status.wait_for(|now| now.phase == Phase::Ready && now.epoch != loaded).await.map(|now| now.epoch) {
            loaded = epoch;
            let read = replica.traits.prompt_files.load(replica.engine.socket()).await;
            let may_pass = read.as_ref().is_err_and(PromptFilesError::is_transient);
            if let Err(error) = &read {
                tracing::warn!(replica = replica.index, %error, "routers cannot read the prompts of this engine: they are placed by text, or the engine is asked for their tokens");
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

/// Next readings of GPUs, if there are any.
async fn next_readings(readings: Option<&mut watch::Receiver<Arc<GpuReadings>>>) {
    if let Some(readings) = readings
        && readings.changed().await.is_ok()
    {
        return;
    }
    std::future::pending::<()>().await;
}
