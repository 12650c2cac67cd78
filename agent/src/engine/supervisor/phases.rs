//! What the supervisor is in the middle of, beside the state machine's own state: a start, the end of the engine's processes, a failure.

use std::future::{Future, pending};
use std::mem::take;
use std::pin::Pin;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::engine::diagnosis::Diagnosis;
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
pub(super) enum FailureState {
    None,
    /// A sign that the life ends, in our own words. The state machine decides whether it is a crash.
    Suspected(String),
    /// A crash, in our own words. The life's last lines have not been read yet.
    Undiagnosed(String),
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
    /// Notes a sign of an end; false after a crash, when it is only a consequence of our own kill.
    pub(super) fn suspect(&mut self, cause: String) -> bool {
        let is_news = !matches!(self, Self::Undiagnosed(_));
        if is_news {
            *self = Self::Suspected(cause);
        }
        is_news
    }

    /// What was suspected is a crash.
    pub(super) fn mark_crashed(&mut self) {
        if let Self::Suspected(cause) = self {
            *self = Self::Undiagnosed(take(cause));
        }
    }
}
