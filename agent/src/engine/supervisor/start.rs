//! What an engine waits for before its process begins, and where it then finds its model.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::poll_immediate;
use tokio::time::Instant;

use super::Supervisor;
use super::phases::{FailureState, StartDecision, StartGrant, StartWait};
use crate::engine::diagnosis::{Diagnosis, FailureKind, remedies};
use crate::engine::model_card::ModelCard;
use crate::engine::startup_progress::{PastStage, StartPart};
use crate::engine::state_machine::EngineEvent;
use crate::gpu::StartObstacle;
use crate::stage::PreparedModel;
use crate::vllm::CommandLine;

impl Supervisor {
    /// Asks for the model, a permit, free GPUs, the members and a turn, in this order.
    pub(super) async fn request_start(&mut self) -> Option<EngineEvent> {
        self.start_wait = StartWait::None;
        let spec = &self.deps.spec;
        let (start_order, index, gpus) = (Arc::clone(&spec.start_order), spec.index, spec.gpu_availability.clone());
        let (gang, limit, stage) = (spec.gang.clone(), spec.startup_timeout, spec.stage.clone());
        (self.model, self.turn) = (PreparedModel::default(), None);
        let mut decision: Pin<Box<dyn Future<Output = StartDecision> + Send>> = Box::pin(async move {
            let mut model = match &stage {
                Some(stage) => stage.prepare().await,
                None => PreparedModel::default(),
            };
            let permit = start_order.acquire(index).await;
            if let Some(gpus) = gpus {
                gpus.check().await.map_err(gpu_obstacle)?;
            }
            if let Some(gang) = gang {
                gang.prepare(limit).await.map_err(member_obstacle)?;
            }
            // Last, so that nobody holds a turn who waits for something else.
            let began = Instant::now();
            let turn = match stage.filter(|_| model.folder().is_none()) {
                Some(stage) => stage.wait_turn().await,
                None => None,
            };
            model.waited += turn.as_ref().map_or(Duration::ZERO, |_| began.elapsed());
            Ok(StartGrant { permit, model, turn })
        });
        match poll_immediate(&mut decision).await {
            Some(decision) => Some(self.handle_start_decision(decision)),
            None => {
                self.start_wait = StartWait::Waiting(decision);
                None
            }
        }
    }

    /// Handles the outcome of the wait for a start.
    ///
    /// An engine whose GPUs are not free waits as after a crash, and then they are checked again.
    pub(super) fn handle_start_decision(&mut self, decision: StartDecision) -> EngineEvent {
        match decision {
            Ok(StartGrant { permit, model, turn }) => {
                self.start_wait = StartWait::Holding(permit);
                (self.model, self.turn) = (model, turn);
                EngineEvent::MayStart
            }
            Err(obstacle) => {
                self.start_wait = StartWait::None;
                // Do not show the output of the previous life with this.
                self.deps.log.begin_life(&format!("hostler: the engine is not started: {}", obstacle.cause));
                self.failure = FailureState::Diagnosed(obstacle);
                self.count_failed_start();
                EngineEvent::Fail
            }
        }
    }

    /// The command line with the copy of the model, if there is one.
    pub(super) fn redirected_line(&self) -> CommandLine {
        match (&self.deps.spec.stage, self.model.folder()) {
            (Some(stage), Some(copy)) => stage.redirect(self.command_line(), &copy),
            _ => self.command_line().clone(),
        }
    }

    /// Cards that name the model's own place, wherever its copy lies.
    pub(super) fn restore_cards(&self, cards: Vec<ModelCard>) -> Arc<[ModelCard]> {
        match (&self.deps.spec.stage, self.model.folder()) {
            (Some(stage), Some(copy)) => {
                cards.into_iter().map(|card| ModelCard { raw: stage.restore_card(&card.raw, &copy), ..card }).collect()
            }
            _ => cards.into(),
        }
    }
}

/// Stages of a start before the engine's own.
pub(super) fn model_stages(model: &PreparedModel) -> impl Iterator<Item = PastStage> + use<> {
    let turn = PastStage { stage: "waiting for its turn to read", part: StartPart::Turn, took: model.waited };
    let copy = PastStage { stage: "staging the model", part: StartPart::Stage, took: model.staged_in };
    [turn, copy].into_iter().filter(|stage| !stage.took.is_zero())
}

fn gpu_obstacle(StartObstacle { in_use, cause, remedy }: StartObstacle) -> Diagnosis {
    Diagnosis { kind: if in_use { FailureKind::GpuInUse } else { FailureKind::Hardware }, cause, remedy }
}

fn member_obstacle(cause: String) -> Diagnosis {
    Diagnosis { kind: FailureKind::Member, cause, remedy: remedies::MEMBER.to_owned() }
}
