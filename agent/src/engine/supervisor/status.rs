//! Reports of the supervisor about its engine: the sentence for each state, and the status that
//! everybody reads.

use tokio::time::Instant;

use super::Supervisor;
use super::phases::{FailureState, StartWait};
use crate::engine::EngineStatus;
use crate::engine::diagnosis::Diagnosis;
use crate::engine::engine_life::EngineLife;
use crate::engine::state_machine::{AfterExit, Drain, EngineEvent, EngineState, LiveStage};
use crate::vllm::FrontEndInUse;

/// Lines of the engine's log shown with a failure.
const SHOWN_LINES: usize = 10;

const RELEASE_HINT: &str = "`hostler release` brings it back";

impl Supervisor {
    /// Publishes the progress of a start, or its obstacle.
    pub(super) fn publish_progress(&mut self) -> Option<EngineEvent> {
        let warm = self.life.as_ref().is_some_and(|life| life.startup_log.borrow().facts.compiled);
        if warm && let StartWait::Holding(permit) = &self.start_wait {
            permit.mark_cache_warm();
        }
        if self.life.as_ref().is_some_and(|life| life.ready_in.is_some() || life.log_parser.lock().has_weights()) {
            self.turn = None;
        }
        let reason = (self.machine.state() == EngineState::Waiting).then(|| self.state_reason());
        self.publish(reason);
        None
    }

    pub(super) fn quarantine_reason(&self) -> String {
        let why = if self.out_of_service_reason.is_empty() { "the engine is out of service" } else { &self.out_of_service_reason };
        format!("{why}; {RELEASE_HINT}")
    }

    pub(super) fn state_reason(&self) -> String {
        match self.machine.state() {
            EngineState::Waiting => {
                let blocked_by = self.deps.spec.start_order.blocked_by(self.deps.spec.index);
                let stage = || self.deps.spec.stage.as_ref()?.waits_for();
                let members = || self.deps.spec.gang.as_ref()?.waits_for();
                blocked_by.or_else(stage).or_else(members).unwrap_or_else(|| "about to start".to_owned())
            }
            EngineState::Quarantined | EngineState::Killing { then: AfterExit::Quarantine } => self.quarantine_reason(),
            EngineState::Stopped if self.machine.is_quarantined() => format!("the engine was asked to stop; {}", self.quarantine_reason()),
            EngineState::Alive(LiveStage::Sleeping) if self.out_of_service_reason.is_empty() => {
                "the engine sleeps until it is woken".to_owned()
            }
            EngineState::Alive(LiveStage::Sleeping) => self.out_of_service_reason.clone(),
            // The process is a bridge, and the report says whom it waits for.
            EngineState::Alive(LiveStage::Starting | LiveStage::Loading) if self.deps.spec.attached_to.is_some() => String::new(),
            EngineState::Alive(LiveStage::Starting) => "the engine's process has started".to_owned(),
            EngineState::Alive(LiveStage::Loading) => "the engine loads its model".to_owned(),
            EngineState::Alive(LiveStage::Ready) => "the engine serves".to_owned(),
            EngineState::Draining(Drain { then: AfterExit::Quarantine, .. })
            | EngineState::Stopping { then: AfterExit::Quarantine, .. } => {
                format!("the engine leaves service: {}", self.quarantine_reason())
            }
            EngineState::Draining(Drain { then, .. }) => {
                format!("requests may finish; then the engine {}", then.describe())
            }
            EngineState::Stopping { then, .. } => {
                format!("the engine was told to stop; then it {}", then.describe())
            }
            EngineState::Killing { .. } => match &self.failure {
                FailureState::Undiagnosed(cause) => cause.to_string(),
                _ => "the engine's processes are being ended".to_owned(),
            },
            EngineState::Stopped => "the engine was asked to stop".to_owned(),
            EngineState::BackingOff { until } => self.describe_failure(until),
        }
    }

    /// Describes what happened, the remedy, the time of the restart, and the engine's last lines.
    pub(super) fn describe_failure(&self, until: Instant) -> String {
        let pause = until.saturating_duration_since(Instant::now()).as_secs_f32().ceil();
        let mut text = match &self.failure {
            FailureState::None => String::new(),
            FailureState::Suspected(cause) | FailureState::Undiagnosed(cause) => cause.to_string(),
            FailureState::Diagnosed(Diagnosis { cause, remedy, .. }) if remedy.is_empty() => cause.clone(),
            FailureState::Diagnosed(Diagnosis { cause, remedy, .. }) => format!("{cause}; {remedy}"),
        };
        text.push_str(&format!("; next start in {pause} s"));
        let shown = self.deps.log.last_lines_of_life(SHOWN_LINES);
        if !shown.is_empty() {
            text.push_str("; its last lines:\n");
            text.push_str(&shown.join("\n"));
        }
        let kind = self.failure.diagnosis().map_or("unknown", |diagnosis| diagnosis.kind.as_str());
        tracing::error!(event = "engine_failed", engine = self.deps.spec.index, kind, log = %self.deps.spec.log.display(), "{text}");
        text
    }

    /// Seconds until an engine that had served does so again, if it restarts after the present
    /// phase.
    fn expected_return(&self) -> Option<u32> {
        let has_served = self.life.as_ref().map_or(self.has_last_life_served, |life| life.ready_in.is_some());
        let start = self.last_start_duration.filter(|_| has_served)?;
        let down_for = self.machine.time_until_next_start(Instant::now())?;
        u32::try_from((down_for + start).as_secs()).ok().map(|seconds| seconds.max(1))
    }

    pub(super) fn publish(&self, reason: Option<String>) {
        let life = self.life.as_ref();
        let starts = matches!(self.machine.state(), EngineState::Alive(LiveStage::Starting | LiveStage::Loading));
        let log = life.map(|life| life.startup_log.borrow().clone()).unwrap_or_default();
        let elapsed = |life: &EngineLife| life.log_parser.lock().progress(life.spawned.elapsed());
        // Once the log reports progress, the clock advances it between two lines.
        let progress = log.progress.and(life.map(elapsed)).filter(|_| starts);
        let failure = self.failure.diagnosis();
        let returns_in = self.expected_return();
        self.status.send_if_modified(|status| {
            let next = EngineStatus {
                phase: self.machine.state().into(),
                epoch: self.last_epoch,
                reason: reason.unwrap_or_else(|| status.reason.clone()),
                pid: life.and_then(|life| life.leader),
                restarts: self.life_count.saturating_sub(1),
                hangs: self.hang_count,
                failed_starts: self.failed_starts.unwrap_or(0),
                version: self.deps.spec.version,
                // Until the engine answers again, clients learn of these what it does.
                models: life.map(|life| &life.models).filter(|models| !models.is_empty()).unwrap_or(&status.models).clone(),
                ready_in: life.and_then(|life| life.ready_in),
                start: life.and_then(|life| life.start.clone()),
                returns_in,
                progress,
                failure,
                facts: log.facts,
                front_end: self.command_line().front_end(),
                missing_routes: match self.command_line().front_end() {
                    FrontEndInUse::Python => self.command_line().withheld_routes.into(),
                    // Keep the previous life's routes until this life's are known.
                    FrontEndInUse::Rust => {
                        life.and_then(|life| life.missing_routes.clone()).unwrap_or_else(|| status.missing_routes.clone())
                    }
                },
            };
            let changed = *status != next;
            *status = next;
            changed
        });
    }
}
