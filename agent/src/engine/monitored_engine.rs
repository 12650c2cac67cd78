//! One engine as those see it who watch its health, and what changes when it gets on.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::control::DesiredAdapters;
use super::{EngineStatus, Phase};
use crate::probe::LoadSample;
use crate::traffic::Traffic;

/// One engine, as those see it who watch its health.
#[derive(Debug)]
pub(crate) struct MonitoredEngine {
    /// Where it listens.
    pub(crate) socket: PathBuf,
    /// Its requests.
    pub(crate) traffic: Arc<Traffic>,
    /// What it says of its load.
    pub(crate) samples: watch::Receiver<Option<LoadSample>>,
    /// What the supervisor says of it.
    pub(crate) status: watch::Receiver<EngineStatus>,
    /// How long it may show no progress with work, at least.
    pub(crate) stall_timeout: Duration,
    /// After this time without requests it is asked for one token; zero turns it off.
    pub(crate) canary_interval: Duration,
    /// What is to be seen to about its models.
    pub(super) desired_adapters: watch::Receiver<DesiredAdapters>,
    /// It computes on GPUs.
    pub(super) uses_gpus: bool,
    /// It has the routes for sleeping.
    pub(super) may_sleep: bool,
}

/// What changes when an engine gets on: the answers that moved last, and its own counters of steps, prompt tokens and generated tokens. A long prefill
/// in pieces, or an answer that does not stream, shows in the counters alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WorkCounters {
    last_progress: u64,
    counters: [u64; 3],
}

impl MonitoredEngine {
    /// What has come out of the engine so far.
    pub(super) fn work_counters(&self) -> WorkCounters {
        let figures = self.samples.borrow().map(|sample| sample.metrics).unwrap_or_default();
        WorkCounters {
            last_progress: self.traffic.flow().last_progress(),
            counters: [figures.steps, figures.prompt_tokens, figures.generation_tokens],
        }
    }

    /// Whether the engine itself says that it has requests. One that hung before they came says that it has none.
    pub(super) fn has_requests(&self) -> bool {
        self.samples.borrow().is_some_and(|sample| sample.metrics.has_requests())
    }

    /// The engine's process group, while there is one.
    pub(super) fn process_group(&self) -> Option<u32> {
        self.status.borrow().pid
    }

    /// A model for a test, while the engine serves: one that starts, drains or sleeps need not get on.
    pub(super) fn model_if_ready(&self) -> Option<String> {
        let status = self.status.borrow();
        status.models.first().filter(|_| status.phase == Phase::Ready).map(|model| model.id.clone())
    }
}
