//! One engine as those see it who watch its health, and what changes when it gets on.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::control::DesiredAdapters;
use super::{EngineStatus, Phase};
use crate::probe::LoadSample;
use crate::traffic::Traffic;

/// One engine, for the tasks that watch its health.
#[derive(Debug)]
pub(crate) struct MonitoredEngine {
    pub(crate) socket: PathBuf,
    pub(crate) traffic: Arc<Traffic>,
    /// The load that it reports.
    pub(crate) samples: watch::Receiver<Option<LoadSample>>,
    /// What the supervisor says of it.
    pub(crate) status: watch::Receiver<EngineStatus>,
    /// It counts as hung after at least this time with work and without progress.
    pub(crate) stall_timeout: Duration,
    /// After this time without requests it is asked for one token; zero turns it off.
    pub(crate) canary_interval: Duration,
    pub(super) desired_adapters: watch::Receiver<DesiredAdapters>,
    pub(super) uses_gpus: bool,
    pub(super) may_sleep: bool,
}

/// Changes whenever an engine makes progress: the answers that moved last, and its own counters of
/// steps, prompt tokens and generated tokens. A long prefill in pieces, or an answer that does not
/// stream, shows only in the counters.
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

    /// Whether the engine itself says that it has requests. One that hung before they came says
    /// that it has none.
    pub(super) fn has_requests(&self) -> bool {
        self.samples.borrow().is_some_and(|sample| sample.metrics.has_requests())
    }

    pub(super) fn process_group(&self) -> Option<u32> {
        self.status.borrow().pid
    }

    /// A model for a test, while the engine serves. One that starts, drains or sleeps need not make
    /// progress.
    pub(super) fn model_if_ready(&self) -> Option<String> {
        let status = self.status.borrow();
        status.models.first().filter(|_| status.phase == Phase::Ready).map(|model| model.id.clone())
    }
}
