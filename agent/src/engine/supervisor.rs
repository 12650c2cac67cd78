//! The task behind one engine: waits for commands, its keeper, events and deadlines, feeds them to
//! the state machine, carries out the actions and publishes the status.
//!
//! The machine makes all decisions; all waiting is here.

mod lifecycle;
mod phases;
mod start;
mod status;

use std::future::{Future, pending};
use std::mem::take;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::task::TaskTracker;

use self::phases::{FailureState, PendingWork, StartWait};
use super::control;
use super::diagnosis::EndCause;
use super::engine_life::{EngineLife, KeeperEvent, StartupLog};
use super::health::HealthEvent;
use super::log::EngineLog;
use super::state_machine::{EngineEvent, EngineState, EngineStateMachine, LiveStage, PhaseTimeouts, SupervisorAction};
use super::{AdoptedLife, EngineCommand, EngineSpec, EngineStatus, Phase, ProcessHandle, SUSPENDED_AFTER};
use crate::cache::CacheLog;
use crate::crashes::CrashLog;
use crate::gang::Loss;
use crate::load_turns::Turn;
use crate::probe::LoadSample;
use crate::process::oom_watch::OomWatch;
use crate::stage::PreparedModel;
use crate::traffic::Traffic;
use crate::vllm::FrontEndInUse;
use crate::vllm::directory::socket_path;

/// How often the progress of a start, or its obstacle, is published.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Dependencies of the supervisor.
pub(super) struct SupervisorDeps {
    pub(super) spec: EngineSpec,
    pub(super) commands: mpsc::Receiver<EngineCommand>,
    pub(super) samples: watch::Sender<Option<LoadSample>>,
    pub(super) traffic: Arc<Traffic>,
    pub(super) crashes: Arc<CrashLog>,
    pub(super) cache: Arc<CacheLog>,
    pub(super) log: EngineLog,
    pub(super) process_handle: Arc<Mutex<ProcessHandle>>,
    /// Adapters that every life should have.
    pub(super) desired_adapters: watch::Receiver<control::DesiredAdapters>,
    pub(super) tasks: TaskTracker,
    pub(super) adopted: Option<AdoptedLife>,
}

pub(super) struct Supervisor {
    deps: SupervisorDeps,
    machine: EngineStateMachine,
    status: watch::Sender<EngineStatus>,
    life: Option<EngineLife>,
    start_wait: StartWait,
    /// How this life, or the next one, reads its model.
    model: PreparedModel,
    /// Kept until the weights are read.
    turn: Option<Turn>,
    pending_work: PendingWork,
    failure: FailureState,
    /// Number of lives so far.
    life_count: u32,
    /// Lives under this agent that ended in a hang.
    hang_count: u32,
    last_epoch: u64,
    /// How long the last start took.
    last_start_duration: Option<Duration>,
    /// The previous life had served.
    has_last_life_served: bool,
    /// Why the engine is out of service or asleep.
    out_of_service_reason: String,
    uses_fallback: bool,
    /// Why the warm start before this one failed; then this one is plain.
    plain_because: Option<String>,
    /// Failed starts; `None` once one has succeeded.
    failed_starts: Option<u32>,
    /// Every handle is gone.
    has_no_handles: bool,
}

impl Supervisor {
    /// A supervisor that has not begun, and its status.
    pub(super) fn new(deps: SupervisorDeps) -> (Self, watch::Receiver<EngineStatus>) {
        let spec = &deps.spec;
        let timeouts = PhaseTimeouts {
            startup: spec.startup_timeout,
            drain: spec.drain_timeout,
            grace: spec.stop_grace,
            max_backoff: spec.max_backoff,
        };
        let adopted = deps.adopted.as_ref();
        let fell_back = adopted.is_some_and(|adopted| adopted.uses_fallback);
        let life = adopted.map(|adopted| adopted.survivor.life_record.clone()).unwrap_or_default();
        let (status, receiver) = watch::channel(EngineStatus {
            phase: Phase::Starting,
            epoch: life.epoch,
            reason: "about to start".to_owned(),
            pid: None,
            restarts: life.lives.saturating_sub(1),
            hangs: 0,
            failed_starts: 0,
            version: spec.version,
            models: Arc::default(),
            ready_in: None,
            start: None,
            returns_in: None,
            progress: None,
            failure: None,
            facts: super::LogFacts::default(),
            front_end: FrontEndInUse::default(),
            missing_routes: Arc::default(),
        });
        let machine = EngineStateMachine::new(timeouts, spec.fallback.is_some() && !fell_back);
        let supervisor = Self {
            deps,
            machine,
            status,
            life: None,
            start_wait: StartWait::None,
            model: PreparedModel::default(),
            turn: None,
            pending_work: PendingWork::None,
            failure: FailureState::None,
            life_count: life.lives,
            hang_count: 0,
            last_epoch: life.epoch,
            last_start_duration: None,
            has_last_life_served: false,
            out_of_service_reason: String::new(),
            uses_fallback: fell_back,
            plain_because: None,
            failed_starts: Some(0),
            has_no_handles: false,
        };
        (supervisor, receiver)
    }

    pub(super) async fn run(mut self) {
        let first = self.adopt().await.unwrap_or(EngineEvent::Start);
        self.apply(first).await;
        while !self.machine.is_finished() {
            let starts = matches!(self.machine.state(), EngineState::Alive(LiveStage::Starting | LiveStage::Loading));
            let waited_since = Instant::now();
            let event = self.next_event().await;
            if starts {
                self.discount_suspension(waited_since.elapsed());
            }
            match event {
                // The deadline was just postponed.
                Some(EngineEvent::Tick) if self.machine.next_deadline().is_some_and(|at| at > Instant::now()) => {}
                Some(event) => self.apply(event).await,
                None => {}
            }
        }
    }

    /// Excludes the time for which the job was suspended from the start.
    ///
    /// While an engine starts, something happens each second.
    fn discount_suspension(&mut self, waited: Duration) {
        let held_up = waited.saturating_sub(PROGRESS_INTERVAL);
        if held_up > SUSPENDED_AFTER {
            tracing::info!(
                engine = self.deps.spec.index,
                seconds = held_up.as_secs(),
                "suspended while it started; it gets so much more time"
            );
            self.machine.postpone_readiness(held_up);
        }
    }

    /// Waits for the next event; `None` if it concerned only the status.
    async fn next_event(&mut self) -> Option<EngineEvent> {
        let state = self.machine.state();
        if matches!(state, EngineState::Killing { .. }) && self.life.is_none() {
            return Some(EngineEvent::GroupEmpty);
        }
        let wake_at = self.machine.next_deadline();
        let gang = self.deps.spec.gang.as_ref().filter(|_| matches!(state, EngineState::Alive(_) | EngineState::Draining(_)));
        let gang = gang.cloned();
        let shows_progress = matches!(state, EngineState::Waiting | EngineState::Alive(LiveStage::Starting | LiveStage::Loading));
        let (keeper_events, health_events, startup_log, cache_joined, core_watch) = match &mut self.life {
            Some(life) => (
                Some(&mut life.keeper_events),
                Some(&mut life.health_events),
                Some(&mut life.startup_log),
                life.cache_joined.as_mut(),
                life.core_watch.as_mut(),
            ),
            None => (None, None, None, None, None),
        };
        // Read the keeper before the health check: a refused connection is the consequence of an
        // exit.
        tokio::select! {
            biased;
            command = self.deps.commands.recv(), if !self.has_no_handles => self.handle_command(command),
            event = recv_or_pend(keeper_events) => self.handle_keeper_event(event),
            event = recv_or_pend(health_events) => self.handle_health_event(event),
            loss = await_or_pend(gang.as_ref().map(|gang| gang.wait_lost())) => Some(self.handle_loss(loss)),
            status = await_or_pend(core_watch) => self.handle_core_end(status.unwrap_or_default()),
            // The engine serves from now on, whether or not the cache could be joined.
            _ = await_or_pend(cache_joined) => self.become_ready(),
            () = self.deps.traffic.wait_idle(), if matches!(state, EngineState::Draining(_)) => {
                let computes = self.deps.samples.borrow().is_some_and(|sample| sample.metrics.has_requests());
                Some(if computes { EngineEvent::Unattended } else { EngineEvent::Idle })
            }
            decision = self.start_wait.decision() => Some(self.handle_start_decision(decision)),
            ended = self.pending_work.outcome() => match ended {
                Some(orphans) => self.handle_orphan_cleanup(orphans),
                None => self.handle_keeper_timeout(),
            },
            () = sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => Some(EngineEvent::Tick),
            () = await_change(startup_log) => self.publish_progress(),
            () = tokio::time::sleep(PROGRESS_INTERVAL), if shows_progress => self.publish_progress(),
        }
    }

    /// Feeds one event to the machine, carries out the actions and publishes the outcome.
    async fn apply(&mut self, event: EngineEvent) {
        if event == EngineEvent::Tick && matches!(self.machine.state(), EngineState::Alive(_)) {
            self.failure = FailureState::Suspected(match &self.life {
                Some(life) if life.is_adopted && self.last_start_duration.is_some() => EndCause::SilentSinceAdoption,
                _ => EndCause::NotReadyWithin(self.deps.spec.startup_timeout),
            });
        }
        if event == EngineEvent::GroupEmpty {
            self.finish_life();
        }
        let before = self.machine.state();
        let mut event = Some(event);
        while let Some(now) = event.take() {
            for action in self.machine.handle(now, Instant::now()) {
                match action {
                    SupervisorAction::RequestStart => event = self.request_start().await,
                    SupervisorAction::FallBack => self.fall_back(),
                    SupervisorAction::Spawn => event = self.spawn().err(),
                    SupervisorAction::Terminate => self.terminate(),
                    SupervisorAction::KillGroup => self.kill(),
                    SupervisorAction::Detach => self.detach_keeper(),
                    SupervisorAction::ReportCrash => {
                        self.failure.mark_crashed();
                        // Publish before the streams break, because they tell their clients the
                        // reason.
                        self.publish(Some(self.state_reason()));
                        self.record_crash(now).await;
                    }
                }
            }
        }
        self.release_start_permit();
        let reason = (before != self.machine.state()).then(|| self.state_reason());
        self.publish(reason);
    }

    /// Gives up the permit if the state just entered does not need it.
    fn release_start_permit(&mut self) {
        let state = self.machine.state();
        if !matches!(
            state,
            EngineState::Waiting
                | EngineState::Alive(LiveStage::Starting | LiveStage::Loading)
                | EngineState::Stopping { .. }
                | EngineState::Killing { .. }
        ) && let StartWait::Holding(permit) = take(&mut self.start_wait)
            && state == EngineState::Alive(LiveStage::Ready)
        {
            permit.finish();
        }
    }

    fn handle_command(&mut self, command: Option<EngineCommand>) -> Option<EngineEvent> {
        let Some(EngineCommand { event, reason }) = command else {
            self.has_no_handles = true;
            return Some(EngineEvent::Stop);
        };
        // Only a GPU fault causes these events.
        if matches!(event, EngineEvent::Quarantine | EngineEvent::QuarantineNow | EngineEvent::Fail) {
            self.excuse_recent_crash();
        }
        match event {
            EngineEvent::Quarantine | EngineEvent::QuarantineNow => {
                tracing::warn!(event = "engine_quarantined", engine = self.deps.spec.index, reason, "quarantined");
                self.out_of_service_reason = reason;
                // The reason may be new even if the state stays the same.
                if self.machine.state() == EngineState::Quarantined {
                    self.publish(Some(self.quarantine_reason()));
                }
            }
            EngineEvent::FallAsleep => self.out_of_service_reason = reason,
            EngineEvent::Fail
                if matches!(self.machine.state(), EngineState::Alive(_) | EngineState::Draining(_) | EngineState::Waiting) =>
            {
                self.failure = FailureState::Suspected(EndCause::Failed(reason));
            }
            EngineEvent::Restart if self.machine.is_quarantined() => {
                let refusal = format!("{}; a restart does not", self.quarantine_reason());
                tracing::warn!(engine = self.deps.spec.index, "not restarted: {refusal}");
                self.publish(Some(refusal));
                return None;
            }
            _ => {}
        }
        Some(event)
    }

    fn handle_keeper_event(&mut self, event: KeeperEvent) -> Option<EngineEvent> {
        let killing = matches!(self.machine.state(), EngineState::Killing { .. });
        match event {
            KeeperEvent::Started(leader) => {
                if !killing {
                    self.pending_work = PendingWork::None;
                }
                let life = self.life.as_mut()?;
                life.leader = Some(leader.pid.cast_unsigned());
                life.oom_watch = OomWatch::of_process(leader.pid.cast_unsigned());
                tracing::info!(
                    event = "engine_started",
                    engine = self.deps.spec.index,
                    pid = leader.pid,
                    epoch = self.last_epoch,
                    "engine started"
                );
                self.publish(None);
                None
            }
            KeeperEvent::StartFailed(why) => {
                self.life.as_mut()?.leader = None;
                let is_removed = !self.deps.spec.directory.exists();
                self.failure.suspect(if is_removed { self.directory_removed() } else { EndCause::NotStarted(why) });
                let alive = matches!(self.machine.state(), EngineState::Alive(_));
                Some(if alive { EngineEvent::SpawnFailed } else { EngineEvent::Exited })
            }
            KeeperEvent::Exited(status) => {
                // Only a third party removes the directory of a living engine.
                let is_removed = !self.deps.spec.directory.exists();
                self.failure.suspect(if is_removed { self.directory_removed() } else { EndCause::Exited(status) });
                Some(EngineEvent::Exited)
            }
            KeeperEvent::Stuck(left) => {
                self.pending_work = PendingWork::KeeperUntil(Instant::now() + lifecycle::KEEPER_TIMEOUT);
                self.report_stuck(&left);
                None
            }
            KeeperEvent::Empty if killing => self.await_members(),
            KeeperEvent::Empty => None,
            KeeperEvent::Gone => self.handle_keeper_loss(EndCause::KeeperLost),
        }
    }

    /// Handles the end of a part on another node, which is the end of the engine.
    fn handle_loss(&mut self, loss: Loss) -> EngineEvent {
        self.failure.suspect(EndCause::PartLost(loss));
        EngineEvent::Exited
    }

    /// Waits for the members' parts to end once nothing is left of this one: they may know the
    /// cause.
    fn await_members(&mut self) -> Option<EngineEvent> {
        let Some(gang) = self.deps.spec.gang.clone() else { return Some(EngineEvent::GroupEmpty) };
        self.pending_work = PendingWork::AwaitingMembers(Box::pin(async move { gang.wait_quiet().await }));
        None
    }

    fn handle_core_end(&mut self, status: Option<ExitStatus>) -> Option<EngineEvent> {
        self.life.as_mut()?.core_watch = None;
        // A process that is to leave ends like this, too.
        matches!(self.machine.state(), EngineState::Alive(_) | EngineState::Draining(_)).then(|| {
            self.failure.suspect(EndCause::CoreEnded(status));
            EngineEvent::Exited
        })
    }

    fn socket_exists(&self) -> bool {
        socket_path(&self.deps.spec.directory).exists()
    }

    fn directory_removed(&self) -> EndCause {
        EndCause::DirectoryRemoved(self.deps.spec.directory.clone())
    }

    fn handle_orphan_cleanup(&mut self, ended: Result<usize, Vec<i32>>) -> Option<EngineEvent> {
        self.pending_work = PendingWork::None;
        let Err(left) = ended else {
            return Some(EngineEvent::GroupEmpty);
        };
        self.report_stuck(&left);
        self.end_orphans();
        None
    }

    fn report_stuck(&self, left: &[i32]) {
        let reason = format!("processes {left:?} of the engine do not die; it is not started again before they have");
        tracing::error!(event = "engine_stuck", engine = self.deps.spec.index, "{reason}");
        self.publish(Some(reason));
    }

    fn handle_health_event(&mut self, event: HealthEvent) -> Option<EngineEvent> {
        // Do not publish reports of a dying engine as its state.
        if !matches!(self.machine.state(), EngineState::Alive(_) | EngineState::Draining(_)) {
            return None;
        }
        match event {
            HealthEvent::Loading => Some(EngineEvent::Loading),
            HealthEvent::NotReady(reason) => {
                self.publish(Some(reason));
                None
            }
            HealthEvent::Unhealthy(cause) => {
                let socket_is_gone = self.life.as_ref().is_some_and(|life| life.ready_in.is_some()) && !self.socket_exists();
                self.failure = FailureState::Suspected(if socket_is_gone { self.directory_removed() } else { cause });
                Some(EngineEvent::Unhealthy)
            }
            HealthEvent::LacksRoute(reason) => {
                self.failure = FailureState::Suspected(EndCause::LacksRoute(reason));
                Some(EngineEvent::LacksRoute)
            }
            HealthEvent::Models(models) => {
                let models = self.restore_cards(models);
                if let Some(life) = &mut self.life {
                    life.models = models;
                }
                self.publish(None);
                None
            }
            HealthEvent::MissingRoutes(routes) => {
                self.life.as_mut()?.missing_routes = Some(routes.into());
                None
            }
            HealthEvent::Asleep => {
                self.life.as_mut()?.was_found_asleep = true;
                None
            }
            HealthEvent::Ready(models) => {
                self.follow_cache(models);
                None
            }
        }
    }
}

impl Drop for Supervisor {
    /// Ends the processes together with the task, however it ends.
    fn drop(&mut self) {
        let mut processes = self.deps.process_handle.lock();
        processes.close();
        processes.keeper = None;
    }
}

async fn recv_or_pend<T>(messages: Option<&mut mpsc::Receiver<T>>) -> T {
    if let Some(messages) = messages
        && let Some(message) = messages.recv().await
    {
        return message;
    }
    // All senders are gone, so there is nothing to wait for.
    pending().await
}

async fn await_change(log: Option<&mut watch::Receiver<StartupLog>>) {
    if let Some(log) = log
        && log.changed().await.is_ok()
    {
        return;
    }
    pending::<()>().await;
}

/// Awaits the future; never resolves if there is none.
async fn await_or_pend<T>(wait: Option<impl Future<Output = T>>) -> T {
    match wait {
        Some(wait) => wait.await,
        None => pending().await,
    }
}
