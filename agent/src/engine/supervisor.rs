//! The task behind one engine: waits for commands, its keeper, news and deadlines, feeds them to the state machine, carries out what it says and publishes the status. All decisions are the machine's; all waiting is here.

mod lifecycle;
mod status;

use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::poll_immediate;
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tokio_util::task::TaskTracker;

use super::control;
use super::diagnosis::{Diagnosis, FailureKind};
use super::engine_life::{EngineLife, KeeperEvent, StartupLog};
use super::health::HealthEvent;
use super::log::EngineLog;
use super::start_order::StartPermit;
use super::state_machine::{EngineEvent, EngineState, EngineStateMachine, LiveStage, PhaseTimeouts, SupervisorAction};
use super::{AdoptedLife, EngineCommand, EngineSpec, EngineStatus, Phase, ProcessHandle};
use crate::cache::CacheLog;
use crate::crashes::CrashLog;
use crate::gpu::StartObstacle;
use crate::keeper::wire::KeeperRequest;
use crate::probe::LoadSample;
use crate::traffic::Traffic;
use crate::vllm::FrontEndInUse;

/// How often the progress of a start, and what an engine waits for, is told anew.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// The turn to start, or what is in the way.
type StartDecision = Result<StartPermit, StartObstacle>;

/// What the driver is made of.
pub(super) struct SupervisorDeps {
    pub(super) spec: EngineSpec,
    pub(super) commands: mpsc::Receiver<EngineCommand>,
    pub(super) samples: watch::Sender<Option<LoadSample>>,
    pub(super) traffic: Arc<Traffic>,
    pub(super) crashes: Arc<CrashLog>,
    pub(super) cache: Arc<CacheLog>,
    pub(super) log: EngineLog,
    pub(super) process_handle: Arc<Mutex<ProcessHandle>>,
    /// The adapters that every life is to have.
    pub(super) desired_adapters: watch::Receiver<control::DesiredAdapters>,
    pub(super) tasks: TaskTracker,
    /// A life that another agent began.
    pub(super) adopted: Option<AdoptedLife>,
}

/// One engine's task.
pub(super) struct Supervisor {
    deps: SupervisorDeps,
    machine: EngineStateMachine,
    status: watch::Sender<EngineStatus>,
    life: Option<EngineLife>,
    /// The turn to start, and the wait for it.
    start_permit: Option<StartPermit>,
    start_wait: Option<Pin<Box<dyn Future<Output = StartDecision> + Send>>>,
    /// The wait for the end of processes whose keeper is gone.
    orphan_cleanup: Option<JoinHandle<Result<usize, Vec<i32>>>>,
    /// When the keeper must have done what it was told last.
    keeper_deadline: Option<Instant>,
    /// Lives so far.
    life_count: u32,
    last_epoch: u64,
    /// How long the last start took.
    last_start_duration: Option<Duration>,
    /// Why the present life ended, as far as that is known.
    end_cause: String,
    /// Why the engine is out of service, or asleep.
    out_of_service_reason: String,
    /// What the last life died of.
    last_failure: Option<Diagnosis>,
    /// A crash whose last lines have not been read yet.
    has_crashed: bool,
    /// The other command line is used.
    uses_fallback: bool,
    /// Every handle is gone.
    has_no_handles: bool,
}

impl Supervisor {
    /// A driver that has not begun, and its status.
    pub(super) fn new(parts: SupervisorDeps) -> (Self, watch::Receiver<EngineStatus>) {
        let spec = &parts.spec;
        let limits = PhaseTimeouts { startup: spec.startup_timeout, drain: spec.drain_timeout, grace: spec.stop_grace };
        let adopted = parts.adopted.as_ref();
        let fell_back = adopted.is_some_and(|adopted| adopted.uses_fallback);
        let life = adopted.map(|adopted| adopted.survivor.life_record.clone()).unwrap_or_default();
        let (status, receiver) = watch::channel(EngineStatus {
            phase: Phase::Starting,
            epoch: life.epoch,
            reason: "about to start".to_owned(),
            pid: None,
            restarts: life.lives.saturating_sub(1),
            version: spec.version,
            models: Arc::default(),
            ready_in: None,
            progress: None,
            failure: None,
            facts: super::LogFacts::default(),
            front_end: FrontEndInUse::default(),
            missing_routes: Arc::default(),
        });
        let machine = EngineStateMachine::new(limits, spec.fallback.is_some() && !fell_back);
        let driver = Self {
            deps: parts,
            machine,
            status,
            life: None,
            start_permit: None,
            start_wait: None,
            orphan_cleanup: None,
            keeper_deadline: None,
            life_count: life.lives,
            last_epoch: life.epoch,
            last_start_duration: None,
            end_cause: String::new(),
            out_of_service_reason: String::new(),
            last_failure: None,
            has_crashed: false,
            uses_fallback: fell_back,
            has_no_handles: false,
        };
        (driver, receiver)
    }

    /// Runs the engine until it is stopped for good.
    pub(super) async fn run(mut self) {
        let first = self.adopt().await.unwrap_or(EngineEvent::Start);
        self.apply(first).await;
        while !self.machine.is_finished() {
            if let Some(event) = self.next_event().await {
                self.apply(event).await;
            }
        }
    }

    /// Waits for the next thing to happen; `None` if it concerned the status only.
    async fn next_event(&mut self) -> Option<EngineEvent> {
        let state = self.machine.state();
        if matches!(state, EngineState::Killing { .. }) && self.life.is_none() {
            return Some(EngineEvent::GroupEmpty);
        }
        let (wake_at, keeper_by) = (self.machine.next_deadline(), self.keeper_deadline);
        let comments = matches!(state, EngineState::Waiting | EngineState::Alive(LiveStage::Starting | LiveStage::Loading));
        let (told, news, story, joining) = match &mut self.life {
            Some(life) => {
                (Some(&mut life.keeper_events), Some(&mut life.health_events), Some(&mut life.startup_log), life.cache_joined.as_mut())
            }
            None => (None, None, None, None),
        };
        // What the keeper tells comes before the news: a refused connection is the consequence of an exit.
        tokio::select! {
            biased;
            command = self.deps.commands.recv(), if !self.has_no_handles => self.handle_command(command),
            told = recv_or_pend(told) => self.handle_keeper_event(told),
            news = recv_or_pend(news) => self.handle_health_event(news),
            // Whether or not the cache could be joined, the engine serves then.
            _ = await_or_pend(joining) => self.become_ready(),
            () = self.deps.traffic.wait_idle(), if matches!(state, EngineState::Draining { .. }) => Some(EngineEvent::Idle),
            turn = await_or_pend(self.start_wait.as_mut()) => Some(self.handle_start_decision(turn)),
            // An end that broke off has ended nothing; it is begun again.
            ended = await_or_pend(self.orphan_cleanup.as_mut()) => self.handle_orphan_cleanup(ended.unwrap_or_else(|_| Err(Vec::new()))),
            () = sleep_until(keeper_by.unwrap_or_else(Instant::now)), if keeper_by.is_some() => self.handle_keeper_timeout(),
            () = sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => Some(EngineEvent::Tick),
            () = await_change(story) => self.publish_progress(),
            () = tokio::time::sleep(PROGRESS_INTERVAL), if comments => self.publish_progress(),
        }
    }

    /// Feeds one event to the machine, carries out the actions and publishes the outcome.
    async fn apply(&mut self, event: EngineEvent) {
        if event == EngineEvent::Tick && matches!(self.machine.state(), EngineState::Alive(_)) {
            self.end_cause = match &self.life {
                Some(life) if life.is_adopted && self.last_start_duration.is_some() => {
                    "the engine that a dead agent left does not answer".to_owned()
                }
                _ => format!("the engine was not ready within {} s", self.deps.spec.startup_timeout.as_secs_f32()),
            };
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
                        self.has_crashed = true;
                        // Only an end of its own accord, a hang included, can be a request's doing.
                        if matches!(now, EngineEvent::Exited | EngineEvent::Unhealthy) {
                            self.deps.crashes.record(self.last_epoch, self.deps.traffic.crash_suspects(self.last_epoch));
                        }
                    }
                }
            }
        }
        self.release_start_permit();
        let reason = (before != self.machine.state()).then(|| self.state_reason());
        self.publish(reason);
    }

    /// Gives up what the state just entered has no use for.
    fn release_start_permit(&mut self) {
        match self.machine.state() {
            EngineState::Waiting => return,
            EngineState::Alive(LiveStage::Starting | LiveStage::Loading) | EngineState::Stopping { .. } | EngineState::Killing { .. } => {}
            EngineState::Alive(LiveStage::Ready) => {
                if let Some(turn) = self.start_permit.take() {
                    turn.finish();
                }
            }
            _ => self.start_permit = None,
        }
        self.start_wait = None;
    }

    fn handle_command(&mut self, command: Option<EngineCommand>) -> Option<EngineEvent> {
        let Some(EngineCommand { event, reason }) = command else {
            self.has_no_handles = true;
            return Some(EngineEvent::Stop);
        };
        match event {
            EngineEvent::Quarantine | EngineEvent::QuarantineNow => {
                tracing::warn!(engine = self.deps.spec.index, reason, "quarantined");
                self.out_of_service_reason = reason;
                // Also where the state stays the same, the reason may be new.
                if self.machine.state() == EngineState::Quarantined {
                    self.publish(Some(self.quarantine_reason()));
                }
            }
            EngineEvent::FallAsleep => self.out_of_service_reason = reason,
            EngineEvent::Fail
                if matches!(self.machine.state(), EngineState::Alive(_) | EngineState::Draining { .. } | EngineState::Waiting) =>
            {
                self.end_cause = reason;
                // What an earlier life died of is another story.
                self.last_failure = None;
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

    async fn request_start(&mut self) -> Option<EngineEvent> {
        self.start_permit = None;
        let (turns, index, free) = (Arc::clone(&self.deps.spec.start_order), self.deps.spec.index, self.deps.spec.gpu_availability.clone());
        let mut waiting: Pin<Box<dyn Future<Output = StartDecision> + Send>> = Box::pin(async move {
            let turn = turns.acquire(index).await;
            match free {
                Some(free) => free.check().await.map(|()| turn),
                None => Ok(turn),
            }
        });
        match poll_immediate(&mut waiting).await {
            Some(turn) => Some(self.handle_start_decision(turn)),
            None => {
                self.start_wait = Some(waiting);
                None
            }
        }
    }

    /// An engine whose GPUs are not free waits as after a crash, and is then asked about again.
    fn handle_start_decision(&mut self, turn: StartDecision) -> EngineEvent {
        self.start_wait = None;
        match turn {
            Ok(turn) => {
                self.start_permit = Some(turn);
                EngineEvent::MayStart
            }
            Err(StartObstacle { in_use, cause, remedy }) => {
                let kind = if in_use { FailureKind::GpuInUse } else { FailureKind::Hardware };
                // What the life before has printed is not shown with this.
                self.deps.log.begin_life(&format!("hostler: the engine is not started: {cause}"));
                self.end_cause.clone_from(&cause);
                self.last_failure = Some(Diagnosis { kind, cause, remedy });
                EngineEvent::Fail
            }
        }
    }

    fn handle_keeper_event(&mut self, told: KeeperEvent) -> Option<EngineEvent> {
        let killing = matches!(self.machine.state(), EngineState::Killing { .. });
        match told {
            KeeperEvent::Started(leader) => {
                self.keeper_deadline = self.keeper_deadline.filter(|_| killing);
                self.life.as_mut()?.leader = Some(leader.pid.cast_unsigned());
                tracing::info!(engine = self.deps.spec.index, pid = leader.pid, epoch = self.last_epoch, "engine started");
                self.publish(None);
                None
            }
            KeeperEvent::StartFailed(why) => {
                self.life.as_mut()?.leader = None;
                if !self.has_crashed {
                    self.end_cause = why;
                }
                let alive = matches!(self.machine.state(), EngineState::Alive(_));
                Some(if alive { EngineEvent::SpawnFailed } else { EngineEvent::Exited })
            }
            KeeperEvent::Exited(status) => {
                // After a crash this is only the end of our own kill.
                if !self.has_crashed {
                    self.life.as_mut()?.exit = Some(status);
                    self.end_cause = format!("the engine ended without having been asked to ({status})");
                }
                Some(EngineEvent::Exited)
            }
            KeeperEvent::Stuck(left) => {
                self.keeper_deadline = Some(Instant::now() + lifecycle::KEEPER_TIMEOUT);
                self.handle_orphan_cleanup(Err(left))
            }
            KeeperEvent::Empty if killing => Some(EngineEvent::GroupEmpty),
            KeeperEvent::Empty => None,
            KeeperEvent::Gone => self.handle_keeper_loss("the engine's keeper was lost, and the engine with it"),
        }
    }

    fn handle_orphan_cleanup(&mut self, ended: Result<usize, Vec<i32>>) -> Option<EngineEvent> {
        self.orphan_cleanup = None;
        let Err(left) = ended else {
            return Some(EngineEvent::GroupEmpty);
        };
        let reason = format!("processes {left:?} of the engine do not die; it is not started again before they have");
        tracing::error!(engine = self.deps.spec.index, "{reason}");
        self.publish(Some(reason));
        if self.life.as_ref().is_some_and(|life| life.is_keeper_lost) {
            self.end_orphans();
        }
        None
    }

    fn handle_health_event(&mut self, news: HealthEvent) -> Option<EngineEvent> {
        // What a dying engine still says must not be told as its state.
        if !matches!(self.machine.state(), EngineState::Alive(_) | EngineState::Draining { .. }) {
            return None;
        }
        match news {
            HealthEvent::Loading => Some(EngineEvent::Loading),
            HealthEvent::Unhealthy(reason) => {
                self.end_cause = reason;
                Some(EngineEvent::Unhealthy)
            }
            HealthEvent::LacksRoute(reason) => {
                self.end_cause = reason;
                Some(EngineEvent::LacksRoute)
            }
            HealthEvent::Models(models) => {
                if let Some(life) = &mut self.life {
                    life.models = models.into();
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
    /// However the task ends, its processes end with it.
    fn drop(&mut self) {
        let mut grip = self.deps.process_handle.lock();
        grip.is_closed = true;
        grip.send(&KeeperRequest::Kill);
        grip.keeper = None;
    }
}

async fn recv_or_pend<T>(messages: Option<&mut mpsc::Receiver<T>>) -> T {
    if let Some(messages) = messages
        && let Some(message) = messages.recv().await
    {
        return message;
    }
    // When all that could tell something has ended, there is nothing to wait for.
    pending().await
}

async fn await_change(story: Option<&mut watch::Receiver<StartupLog>>) {
    if let Some(story) = story
        && story.changed().await.is_ok()
    {
        return;
    }
    pending::<()>().await;
}

/// What is waited for; never, where nothing is.
async fn await_or_pend<T>(wait: Option<impl Future<Output = T>>) -> T {
    match wait {
        Some(wait) => wait.await,
        None => pending().await,
    }
}
