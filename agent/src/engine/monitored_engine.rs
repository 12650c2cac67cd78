//! View of one engine for the tasks that watch its health, and the counters that show its progress.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::control::DesiredAdapters;
use super::{EngineStatus, Phase};
use crate::bridge::AttachTarget;
use crate::gang::{FarActivity, Gang};
use crate::probe::LoadSample;
use crate::process::activity::{ProcessActivity, ProcessSnapshot};
use crate::traffic::Traffic;

/// One engine, for the tasks that watch its health.
#[derive(Debug)]
pub(crate) struct MonitoredEngine {
    pub(crate) socket: PathBuf,
    pub(crate) traffic: Arc<Traffic>,
    /// Load that the engine reports.
    pub(crate) samples: watch::Receiver<Option<LoadSample>>,
    /// Status from the supervisor.
    pub(crate) status: watch::Receiver<EngineStatus>,
    /// Minimum time with work and without progress after which the engine counts as hung.
    pub(crate) stall_timeout: Duration,
    /// Time without requests after which the engine is tested with one token; zero turns the test
    /// off.
    pub(crate) canary_interval: Duration,
    pub(super) desired_adapters: watch::Receiver<DesiredAdapters>,
    /// Members of the replica on other nodes.
    pub(super) gang: Option<Arc<Gang>>,
    pub(super) uses_gpus: bool,
    pub(super) may_sleep: bool,
    /// The engine that somebody else runs, to which the socket leads.
    pub(super) attached_to: Option<AttachTarget>,
}

/// Counters that change whenever an engine makes progress: the answers that moved last, and its own
/// counters of steps, prompt tokens and generated tokens.
///
/// A long prefill in pieces, or an answer that does not stream, shows only in the engine's
/// counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WorkCounters {
    last_progress: u64,
    counters: [u64; 3],
}

impl MonitoredEngine {
    pub(super) fn work_counters(&self) -> WorkCounters {
        let figures = self.samples.borrow().map(|sample| sample.metrics).unwrap_or_default();
        WorkCounters {
            last_progress: self.traffic.flow().last_progress(),
            counters: [figures.steps, figures.prompt_tokens, figures.generation_tokens],
        }
    }

    /// Whether the engine itself reports requests.
    ///
    /// An engine that hung before they arrived reports none.
    pub(super) fn has_requests(&self) -> bool {
        self.samples.borrow().is_some_and(|sample| sample.metrics.has_requests())
    }

    /// What the engine's processes have done on all nodes since an earlier look.
    ///
    /// While the other nodes compile or load, this node's part only waits for them.
    pub(super) fn activity(&self, look: &ProcessSnapshot, earlier: &ProcessSnapshot, elapsed: Duration) -> ProcessActivity {
        let own = look.activity_since(earlier, elapsed);
        let Some(gang) = &self.gang else { return own };
        match (own, gang.activity()) {
            (own @ ProcessActivity::Stopped(_), _) => own,
            (_, FarActivity::Stopped(process)) => ProcessActivity::Stopped(process),
            (ProcessActivity::Computing, _) | (_, FarActivity::Computing) => ProcessActivity::Computing,
            (ProcessActivity::Idle, FarActivity::Unknown) => ProcessActivity::Unknown,
            (own, _) => own,
        }
    }

    /// Whether another node's part is out of reach, as while the network between them is down.
    pub(super) fn is_cut_off(&self) -> bool {
        self.gang.as_ref().is_some_and(|gang| gang.is_cut_off())
    }

    pub(super) fn process_group(&self) -> Option<u32> {
        self.status.borrow().pid
    }

    /// Model for a test, while the engine serves.
    ///
    /// An engine that starts, drains or sleeps need not make progress.
    pub(super) fn model_if_ready(&self) -> Option<String> {
        let status = self.status.borrow();
        status.models.first().filter(|_| status.phase == Phase::Ready).map(|model| model.id.clone())
    }
}
