//! What the supervisor is in the middle of, beside the state machine's own state: a start, the end of the engine's processes, a failure.

use std::future::{Future, pending};
use std::mem::take;
use std::pin::Pin;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::engine::diagnosis::{Diagnosis, EndCause, diagnose_decision};
use crate::engine::start_order::StartPermit;
use crate::gpu::StartObstacle;

/// The permit to start, or what is in the way.
pub(super) type StartDecision = Result<StartPermit, StartObstacle>;

/// How far an engine is on its way to a start.
#[derive(Default)]
pub(super) enum StartWait {
    /// It does not want to start, or has started.
    #[default]
    None,
    Waiting(Pin<Box<dyn Future<Output = StartDecision> + Send>>),
    /// Kept until the engine is ready or its processes are gone.
    Holding(StartPermit),
}

/// What has to be done to the engine's processes, and by whom.
pub(super) enum PendingWork {
    None,
    /// The keeper must have done by then what it was told last.
    KeeperUntil(Instant),
    /// The keeper is gone, so the supervisor ends the processes.
    EndingOrphans(JoinHandle<Result<usize, Vec<i32>>>),
}

/// What is known of the engine's last failure, until the engine is ready again.
#[derive(Default)]
pub(super) enum FailureState {
    #[default]
    None,
    /// A sign that the life ends. The state machine decides whether it is a crash.
    Suspected(EndCause),
    /// A crash. The life's last lines have not been read yet.
    Undiagnosed(EndCause),
    Diagnosed(Diagnosis),
}

impl StartWait {
    /// Resolves with the decision where one is awaited.
    pub(super) async fn decision(&mut self) -> StartDecision {
        match self {
            Self::Waiting(decision) => decision.await,
            Self::None | Self::Holding(_) => pending().await,
        }
    }
}

impl PendingWork {
    /// Resolves with how the orphans ended, or `None` when the keeper has missed its deadline.
    pub(super) async fn outcome(&mut self) -> Option<Result<usize, Vec<i32>>> {
        match self {
            Self::None => pending().await,
            Self::KeeperUntil(deadline) => {
                sleep_until(*deadline).await;
                None
            }
            // A task that broke off has ended nothing.
            Self::EndingOrphans(task) => Some(task.await.unwrap_or_else(|_| Err(Vec::new()))),
        }
    }
}

impl FailureState {
    /// Notes a sign of an end; after a crash it is only a consequence of our own kill.
    pub(super) fn suspect(&mut self, cause: EndCause) {
        if !matches!(self, Self::Undiagnosed(_)) {
            *self = Self::Suspected(cause);
        }
    }

    /// What was suspected is a crash.
    pub(super) fn mark_crashed(&mut self) {
        *self = match take(self) {
            Self::Suspected(cause) => Self::Undiagnosed(cause),
            other => other,
        };
    }

    /// What is known of the failure by now.
    pub(super) fn diagnosis(&self) -> Option<Diagnosis> {
        match self {
            Self::Diagnosed(diagnosis) => Some(diagnosis.clone()),
            Self::Undiagnosed(cause) => diagnose_decision(cause),
            Self::None | Self::Suspected(_) => None,
        }
    }
}
