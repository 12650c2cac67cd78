//! Work of the supervisor beside the state machine's own state: a start, the end of the engine's
//! processes, a failure.

use std::future::{Future, pending};
use std::mem::take;
use std::pin::Pin;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::engine::diagnosis::{Diagnosis, EndCause, diagnose_decision};
use crate::engine::start_order::StartPermit;
use crate::load_turns::Turn;
use crate::stage::PreparedModel;

/// What an engine has that may start.
pub(super) struct StartGrant {
    pub(super) permit: StartPermit,
    pub(super) model: PreparedModel,
    /// Turn to read the model where it lies.
    pub(super) turn: Option<Turn>,
}

/// Permit to start, or the obstacle.
pub(super) type StartDecision = Result<StartGrant, Diagnosis>;

/// Progress of an engine towards a start.
#[derive(Default)]
pub(super) enum StartWait {
    /// The engine does not want to start, or has started.
    #[default]
    None,
    Waiting(Pin<Box<dyn Future<Output = StartDecision> + Send>>),
    /// Permit kept until the engine is ready or its processes are gone.
    Holding(StartPermit),
}

/// Pending work on the engine's processes, and who does it.
pub(super) enum PendingWork {
    None,
    /// Deadline for the keeper's last order.
    KeeperUntil(Instant),
    /// The keeper is gone, so the supervisor ends the processes.
    EndingOrphans(JoinHandle<Result<usize, Vec<i32>>>),
    /// Nothing is left here, and the parts on other nodes end.
    AwaitingMembers(Pin<Box<dyn Future<Output = ()> + Send>>),
}

/// Knowledge of the engine's last failure, until the engine is ready again.
#[derive(Default)]
pub(super) enum FailureState {
    #[default]
    None,
    /// A sign that the life ends. The state machine decides whether it is a crash.
    Suspected(EndCause),
    /// A crash whose last lines have not been read yet.
    Undiagnosed(EndCause),
    Diagnosed(Diagnosis),
}

impl StartWait {
    /// Resolves with the decision, if one is awaited.
    pub(super) async fn decision(&mut self) -> StartDecision {
        match self {
            Self::Waiting(decision) => decision.await,
            Self::None | Self::Holding(_) => pending().await,
        }
    }
}

impl PendingWork {
    /// Resolves with how the orphans ended, or `None` if the keeper has missed its deadline.
    pub(super) async fn outcome(&mut self) -> Option<Result<usize, Vec<i32>>> {
        match self {
            Self::None => pending().await,
            Self::KeeperUntil(deadline) => {
                sleep_until(*deadline).await;
                None
            }
            // An aborted task has ended nothing.
            Self::AwaitingMembers(quiet) => {
                quiet.await;
                Some(Ok(0))
            }
            Self::EndingOrphans(task) => Some(task.await.unwrap_or_else(|_| Err(Vec::new()))),
        }
    }
}

impl FailureState {
    /// Records a sign of an end.
    ///
    /// After a crash the sign is only a consequence of the agent's own kill.
    pub(super) fn suspect(&mut self, cause: EndCause) {
        if !matches!(self, Self::Undiagnosed(_)) {
            *self = Self::Suspected(cause);
        }
    }

    /// Turns the suspicion into a crash.
    pub(super) fn mark_crashed(&mut self) {
        *self = match take(self) {
            Self::Suspected(cause) => Self::Undiagnosed(cause),
            other => other,
        };
    }

    /// Diagnosis of the failure as known so far.
    pub(super) fn diagnosis(&self) -> Option<Diagnosis> {
        match self {
            Self::Diagnosed(diagnosis) => Some(diagnosis.clone()),
            Self::Undiagnosed(cause) => diagnose_decision(cause),
            Self::None | Self::Suspected(_) => None,
        }
    }
}
