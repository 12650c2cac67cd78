//! How the supervisor begins, adopts and ends a life of its engine: the orders to the keeper, and
//! the state of the engine once it has served or died.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::Supervisor;
use super::phases::{FailureState, PendingWork};
use super::start::model_stages;
use crate::cache;
use crate::engine::diagnosis::{Diagnosis, EndCause, FailureKind, LifeEnd, diagnose, remedies};
use crate::engine::engine_life::{EngineLife, KeeperReader, StartupLog};
use crate::engine::health;
use crate::engine::model_card::ModelCard;
use crate::engine::monitored_engine::MonitoredEngine;
use crate::engine::outside_kill::EndEvidence;
use crate::engine::startup_progress::StartupLogParser;
use crate::engine::state_machine::{AfterExit, EngineEvent, EngineState};
use crate::engine::warm_starts::StartOrigin;
use crate::engine::{AdoptedLife, LaunchError, PastStart};
use crate::epoch::next_epoch;
use crate::keeper::wire::{self, KeeperRequest, LaunchSpec, ProcessSpec};
use crate::keeper::{self, KeeperNotices};
use crate::probe;
use crate::process::STUCK_AFTER;
use crate::process::core_exit::CoreWatch;
use crate::process::oom_watch::OomWatch;
use crate::process::orphans::end_orphans;
use crate::vllm::CommandLine;
use crate::vllm::directory::socket_path;

/// Capacity of the health event queue, and of the keeper event queue.
const EVENT_QUEUE_LEN: usize = 8;

/// Time limit for a keeper to start the engine.
///
/// The keeper reads nothing but the program, which may be on a cold parallel filesystem.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Time limit for a keeper to end the engine or to report remaining processes.
///
/// After that the keeper itself is ended.
pub(super) const KEEPER_TIMEOUT: Duration = STUCK_AFTER.saturating_add(Duration::from_secs(5));

/// Time in which a front-end ends its answers and reports what it knows, once a process behind it
/// has ended.
///
/// The front-end would live on for 5 s (vLLM 0.32 after kill -9 of its core), and the streams of
/// its clients stand still meanwhile.
const FRONT_END_FAREWELL: Duration = Duration::from_millis(250);

/// How long a crash waits for answers that the engine had sent before it exited: a request with an
/// answer is not to blame.
///
/// A connection stays open longer only if a router reads nothing from it, or another process holds
/// it.
const LAST_ANSWERS_TIMEOUT: Duration = Duration::from_millis(500);

impl Supervisor {
    /// Continues a life that another agent began.
    ///
    /// `None` if there is no such life; then the first one begins.
    pub(super) async fn adopt(&mut self) -> Option<EngineEvent> {
        let AdoptedLife { survivor, .. } = self.deps.adopted.take()?;
        let (leader, life) = (survivor.leader, survivor.life_record.clone());
        self.last_start_duration = life.ready_in_ms.map(Duration::from_millis);
        let (keeper, notices) = match survivor.adopt(self.deps.spec.if_agent_dies) {
            Ok(connection) => connection,
            Err(error) => {
                tracing::warn!(engine = self.deps.spec.index, %error, "cannot take an engine over; it ends and starts anew");
                let directory = self.deps.spec.directory.clone();
                // Never run two engines in one directory. The GPU check will find processes that do
                // not die.
                let _ = tokio::task::spawn_blocking(move || end_orphans(&directory)).await;
                return None;
            }
        };
        self.deps.log.begin_life(&format!("hostler: life {} of this engine goes on under a new agent", life.epoch));
        self.deps.process_handle.lock().keeper = Some(keeper);
        let mut adopted = self.begin_life(notices, life.epoch);
        adopted.leader = Some(leader.pid.cast_unsigned());
        adopted.oom_watch = OomWatch::of_process(leader.pid.cast_unsigned());
        adopted.is_adopted = true;
        self.life = Some(adopted);
        tracing::info!(
            event = "engine_adopted",
            engine = self.deps.spec.index,
            pid = leader.pid,
            epoch = life.epoch,
            "engine taken over from an agent that had died"
        );
        Some(EngineEvent::Adopt { was_ready: life.ready_in_ms.is_some() })
    }

    pub(super) fn command_line(&self) -> &CommandLine {
        let fallback = self.deps.spec.fallback.as_ref().filter(|_| self.uses_fallback);
        fallback.unwrap_or(&self.deps.spec.command)
    }

    pub(super) fn fall_back(&mut self) {
        self.uses_fallback = true;
        self.failure.mark_crashed();
    }

    pub(super) fn spawn(&mut self) -> Result<(), EngineEvent> {
        self.deps.samples.send_replace(None);
        let epoch = next_epoch(self.last_epoch);
        self.last_epoch = epoch;
        self.life_count += 1;
        self.deps.log.begin_life(&format!("hostler: life {epoch} of this engine begins"));
        let line = self.redirected_line();
        let line = match self.deps.spec.gang.as_ref().map(|gang| gang.start()) {
            None => line,
            Some(Ok(point)) => point.complete(&line, |name| std::env::var_os(name).is_some()),
            Some(Err(error)) => {
                self.failure =
                    FailureState::Suspected(EndCause::NotStarted(format!("the parts of the engine have no place to meet: {error}")));
                return Err(EngineEvent::SpawnFailed);
            }
        };
        let launch_spec = self.launch_spec(epoch, &line);
        let warm = self.plain_because.is_none().then(|| self.deps.spec.warm_starts.as_ref()?.take()).flatten();
        let origin = warm.as_ref().map_or(StartOrigin::Plain, |warm| warm.origin);
        if origin == StartOrigin::Spare {
            self.deps.log.note("hostler: it starts from the spare, which has imported vLLM");
        }
        let started = self.deps.process_handle.lock().start(&self.deps.spec, launch_spec, warm.map(|warm| warm.keeper));
        match started {
            Ok(notices) => {
                self.life = Some(EngineLife { origin, ..self.begin_life(notices, epoch) });
                self.pending_work = PendingWork::KeeperUntil(Instant::now() + START_TIMEOUT);
                Ok(())
            }
            Err(error) => {
                self.failure = FailureState::Suspected(match error {
                    LaunchError::Directory { .. } | LaunchError::RunDir(_) => EndCause::NoDirectory(error.to_string()),
                    LaunchError::Closed | LaunchError::Keeper { .. } => EndCause::NotStarted(error.to_string()),
                });
                Err(EngineEvent::SpawnFailed)
            }
        }
    }

    fn launch_spec(&self, epoch: u64, line: &CommandLine) -> LaunchSpec {
        let spec = &self.deps.spec;
        LaunchSpec {
            process: ProcessSpec::new(spec.keepers.program(), line, &spec.directory),
            forks: spec.may_fork,
            log: spec.log.clone().into(),
            wait_seconds: spec.if_agent_dies.wait_seconds(),
            cpus: spec.cpu_binding.as_ref().map(|binding| binding.cpus.clone()).unwrap_or_default(),
            file_pool: spec.file_pool.clone().map(Into::into),
            life: self.life_record(epoch, None),
        }
    }

    /// Record of this life for the next agent.
    pub(super) fn life_record(&self, epoch: u64, ready_in: Option<Duration>) -> wire::LifeRecord {
        wire::LifeRecord {
            node: self.deps.spec.node.clone(),
            index: self.deps.spec.index,
            fingerprint: keeper::fingerprint(self.command_line(), self.deps.spec.version),
            epoch,
            lives: self.life_count,
            ready_in_ms: ready_in.map(|took| u64::try_from(took.as_millis()).unwrap_or(u64::MAX)),
        }
    }

    pub(super) fn begin_life(&self, notices: KeeperNotices, epoch: u64) -> EngineLife {
        let (health_events_out, health_events) = mpsc::channel(EVENT_QUEUE_LEN);
        let (keeper_sender, keeper_receiver) = mpsc::channel(EVENT_QUEUE_LEN);
        let (startup_log_out, startup_log) = watch::channel(StartupLog::default());
        let reader = Arc::new(Mutex::new(StartupLogParser::new(self.last_start_duration)));
        let (spec, spawned) = (&self.deps.spec, Instant::now());
        let gave_up_at = Arc::<OnceLock<Instant>>::default();
        let follower = KeeperReader {
            log: self.deps.log.clone(),
            keeper_events: keeper_sender,
            health_events: health_events_out.clone(),
            startup_log: startup_log_out,
            log_parser: Arc::clone(&reader),
            gave_up_at: Arc::clone(&gave_up_at),
            spawned,
            engine: spec.index,
        };
        let subject = MonitoredEngine {
            socket: socket_path(&spec.directory),
            traffic: Arc::clone(&self.deps.traffic),
            samples: self.deps.samples.subscribe(),
            status: self.status.subscribe(),
            stall_timeout: spec.stall_timeout,
            canary_interval: spec.canary_interval,
            desired_adapters: self.deps.desired_adapters.clone(),
            gang: spec.gang.clone(),
            uses_gpus: spec.gpu_availability.is_some(),
            may_sleep: spec.command.unlocks_sleep(),
            attached_to: spec.attached_to.clone(),
        };
        EngineLife {
            spawned,
            leader: None,
            is_keeper_lost: false,
            models: Arc::default(),
            missing_routes: None,
            ready_in: None,
            is_adopted: false,
            was_found_asleep: false,
            origin: StartOrigin::Plain,
            start: None,
            keeper_events: keeper_receiver,
            health_events,
            startup_log,
            log_parser: reader,
            oom_watch: OomWatch::of_host(),
            gave_up_at,
            core_exit: Arc::default(),
            core_watch: None,
            _follower: AbortOnDropHandle::new(self.deps.tasks.spawn(follower.run(notices))),
            _health: AbortOnDropHandle::new(self.deps.tasks.spawn(health::watch(subject, health_events_out))),
            probe: None,
            cache: Some(self.deps.cache.begin_life(epoch)),
            cache_follower: None,
            cache_joined: None,
        }
    }

    pub(super) fn terminate(&mut self) {
        if let Some(life) = &mut self.life {
            // A stopping engine refuses to be read, which deserves no warning.
            life.probe = None;
            life.cache_follower = None;
        }
        self.deps.process_handle.lock().send(&KeeperRequest::Terminate);
    }

    pub(super) fn kill(&mut self) {
        if let Some(gang) = &self.deps.spec.gang {
            gang.kill();
        }
        let Some(life) = &self.life else { return };
        if life.is_keeper_lost {
            self.end_orphans();
            return;
        }
        self.pending_work = PendingWork::KeeperUntil(Instant::now() + KEEPER_TIMEOUT);
        self.deps.process_handle.lock().send(&KeeperRequest::Kill);
    }

    /// Detaches the keeper.
    ///
    /// Once the agent's end of the connection is gone, the keeper waits for the next agent.
    pub(super) fn detach_keeper(&mut self) {
        self.deps.process_handle.lock().keeper = None;
        self.deps.cache.end_life();
        (self.life, self.pending_work) = (None, PendingWork::None);
    }

    /// Ends the processes in the keeper's place.
    pub(super) fn end_orphans(&mut self) {
        if !matches!(self.pending_work, PendingWork::EndingOrphans(_)) {
            let directory = self.deps.spec.directory.clone();
            self.pending_work = PendingWork::EndingOrphans(tokio::task::spawn_blocking(move || end_orphans(&directory)));
        }
    }

    /// Handles a keeper that did not obey in time.
    pub(super) fn handle_keeper_timeout(&mut self) -> Option<EngineEvent> {
        self.pending_work = PendingWork::None;
        tracing::error!(engine = self.deps.spec.index, "the engine's keeper does not answer; it is ended");
        if let Some(keeper) = &self.deps.process_handle.lock().keeper {
            keeper.end_keeper();
        }
        self.handle_keeper_loss(EndCause::KeeperSilent)
    }

    pub(super) fn handle_keeper_loss(&mut self, cause: EndCause) -> Option<EngineEvent> {
        self.life.as_mut()?.is_keeper_lost = true;
        match self.machine.state() {
            EngineState::Killing { .. } => {
                self.end_orphans();
                None
            }
            _ => {
                self.failure = FailureState::Suspected(cause);
                // Neither a request nor the front-end caused this.
                Some(EngineEvent::Fail)
            }
        }
    }

    /// Ends a life without any process left: forgets it and its files, and finds out why it ended.
    pub(super) fn finish_life(&mut self) {
        self.deps.process_handle.lock().keeper = None;
        self.pending_work = PendingWork::None;
        self.deps.cache.end_life();
        if let FailureState::Undiagnosed(cause) = &self.failure {
            let diagnosis = self.diagnose(cause.clone());
            let diagnosis = self.members_diagnosis(&diagnosis).unwrap_or(diagnosis);
            self.hang_count += u32::from(diagnosis.kind == FailureKind::Hang);
            if !self.is_switching_to_fallback() {
                self.count_failed_start();
            }
            self.plain_because = self.is_warm_start_suspect().then(|| diagnosis.cause.clone());
            if self.uses_fallback && self.is_switching_to_fallback() {
                let why = &diagnosis.cause;
                tracing::warn!(
                    event = "front_end_replaced",
                    engine = self.deps.spec.index,
                    "the Rust front-end does not serve ({why}); the Python one is used from now on"
                );
            }
            self.failure = FailureState::Diagnosed(diagnosis);
        }
        self.has_last_life_served = self.life.as_ref().is_some_and(|life| life.ready_in.is_some());
        (self.life, self.turn) = (None, None);
        remove_life_files(&self.deps.spec.directory);
    }

    /// What a member's agent has found, if this diagnosis may only describe a consequence of it.
    fn members_diagnosis(&self, own: &Diagnosis) -> Option<Diagnosis> {
        let loss = self.deps.spec.gang.as_ref()?.loss()?;
        own.kind.may_be_consequence().then(|| Diagnosis::of_part(&loss))
    }

    /// Counts a failed start, as long as none has succeeded.
    pub(super) fn count_failed_start(&mut self) {
        self.failed_starts = self.failed_starts.map(|starts| starts.saturating_add(1));
    }

    /// Whether the life that ended was the last one with the first command line.
    pub(super) fn is_switching_to_fallback(&self) -> bool {
        matches!(self.machine.state(), EngineState::Killing { then: AfterExit::Spawn })
    }

    /// Whether the life that ended may have failed because its start was warm.
    fn is_warm_start_suspect(&self) -> bool {
        let is_warm_unready = self.life.as_ref().is_some_and(|life| life.origin != StartOrigin::Plain && life.ready_in.is_none());
        let was_killed = self.end_evidence().is_some_and(|evidence| evidence.is_outside_kill(Instant::now()));
        is_warm_unready && !was_killed && !self.is_switching_to_fallback()
    }

    fn diagnose(&self, cause: EndCause) -> Diagnosis {
        let life = self.life.as_ref();
        let ended = LifeEnd {
            cause,
            was_ready: life.is_some_and(|life| life.ready_in.is_some()),
            oom_killed: life.and_then(|life| life.oom_watch.has_killed()),
        };
        let diagnosis = diagnose(&ended, &self.deps.log.last_lines_of_life(usize::MAX));
        let name = format!("{}/{}", self.deps.spec.node, self.deps.spec.index);
        Diagnosis { remedy: diagnosis.remedy.replace(remedies::REPLICA, &name), ..diagnosis }
    }

    /// Starts to follow the cache of an engine that answers.
    ///
    /// Following begins before requests arrive, so that everything stored from now on is known.
    pub(super) fn follow_cache(&mut self, models: Vec<ModelCard>) {
        let models = self.restore_cards(models);
        let Some(life) = &mut self.life else { return };
        life.models = models;
        let Some(writer) = life.cache.take() else { return };
        let (connected, joining) = oneshot::channel();
        let (source, index) = (self.deps.spec.cache.clone(), self.deps.spec.index);
        let since = if life.is_adopted { cache::FollowFrom::FirstEvent } else { cache::FollowFrom::Now };
        let follows = self.deps.tasks.spawn(async move { cache::follow(&source, writer, index, since, connected).await });
        life.cache_follower = Some(AbortOnDropHandle::new(follows));
        life.cache_joined = Some(joining);
    }

    pub(super) fn become_ready(&mut self) -> Option<EngineEvent> {
        let life = self.life.as_mut()?;
        life.cache_joined = None;
        // An engine that stops meanwhile must not be published as ready.
        if !matches!(self.machine.state(), EngineState::Alive(_)) {
            return None;
        }
        // An adopted engine was usually ready long before.
        let took = self.last_start_duration.filter(|_| life.is_adopted).unwrap_or_else(|| life.spawned.elapsed());
        life.ready_in = Some(took);
        let stages = model_stages(&self.model).chain(life.log_parser.lock().stages(took)).collect();
        let start = PastStart { origin: life.origin, stages };
        self.turn = None;
        life.start = (!life.is_adopted).then(|| Arc::new(start));
        self.last_start_duration = Some(took);
        self.failure = FailureState::None;
        self.failed_starts = None;
        if let Some(gang) = &self.deps.spec.gang {
            gang.mark_ready();
        }
        if let Some(warm_starts) = &self.deps.spec.warm_starts {
            match self.plain_because.take() {
                Some(because) => warm_starts.turn_off(&format!("an engine did not start from one ({because}), and did without")),
                None => warm_starts.request_spare(),
            }
        }
        let (spec, samples) = (&self.deps.spec, self.deps.samples.clone());
        let (socket, interval) = (socket_path(&spec.directory), spec.probe_interval);
        let traffic = Arc::clone(&self.deps.traffic);
        let probe = self.deps.tasks.spawn(async move {
            probe::watch(&socket, &traffic, interval, &samples).await;
        });
        life.probe = Some(AbortOnDropHandle::new(probe));
        if let Some(leader) = life.leader {
            let core_exit = Arc::clone(&life.core_exit);
            life.core_watch = Some(AbortOnDropHandle::new(self.deps.tasks.spawn(async move {
                let status = CoreWatch::begin(leader).await.first_exit().await;
                if let Some(status) = status {
                    let _ = core_exit.set((status, Instant::now()));
                }
                sleep(FRONT_END_FAREWELL).await;
                status
            })));
        }
        tracing::info!(
            event = "engine_ready",
            engine = spec.index,
            seconds = (took.as_secs_f64() * 10.0).round() / 10.0,
            origin = life.origin.as_str(),
            "engine is ready"
        );
        let note = KeeperRequest::Note(self.life_record(self.last_epoch, Some(took)));
        self.deps.process_handle.lock().send(&note);
        if self.life.as_ref().is_some_and(|life| life.was_found_asleep) {
            "the engine has slept since before this agent began; `hostler wake` brings it back".clone_into(&mut self.out_of_service_reason);
            return Some(EngineEvent::FoundAsleep);
        }
        Some(EngineEvent::Ready)
    }

    /// Records the requests in flight if the engine ended by itself, hangs included.
    ///
    /// Requests can cause only such an end.
    pub(super) async fn record_crash(&mut self, event: EngineEvent) {
        if !matches!(event, EngineEvent::Exited | EngineEvent::Unhealthy) {
            return;
        }
        let is_part_killed = matches!(&self.failure, FailureState::Undiagnosed(EndCause::PartLost(loss)) if loss.end.is_outside_kill);
        let is_outside_kill = is_part_killed || self.end_evidence().is_some_and(|evidence| evidence.is_outside_kill(Instant::now()));
        if is_outside_kill || self.machine.is_on_its_way_out() {
            if self.deps.traffic.crash_suspects(self.last_epoch).is_empty() {
                return;
            }
            // Routers whose requests broke here learn at once that those are not to blame.
            self.deps.crashes.record_blameless(self.last_epoch);
            let reason = if is_outside_kill { "the engine was killed, and not by its agent" } else { "the engine was to leave" };
            tracing::info!(
                event = "crash_excused",
                engine = self.deps.spec.index,
                epoch = self.last_epoch,
                "{reason}: no request is to blame"
            );
            return;
        }
        if event == EngineEvent::Exited {
            let _ = timeout(LAST_ANSWERS_TIMEOUT, self.deps.traffic.wait_idle()).await;
        }
        self.deps.crashes.record(self.last_epoch, self.deps.traffic.crash_suspects(self.last_epoch));
    }

    fn end_evidence(&self) -> Option<EndEvidence> {
        let life = self.life.as_ref()?;
        let leader = match &self.failure {
            FailureState::Undiagnosed(EndCause::Exited(status)) => Some(*status),
            _ => None,
        };
        let signs = [life.gave_up_at.get().copied(), self.deps.traffic.failing_since(self.last_epoch)];
        Some(EndEvidence {
            leader,
            core: life.core_exit.get().copied(),
            oom_killed: life.oom_watch.has_killed(),
            failing_since: signs.into_iter().flatten().min(),
        })
    }

    /// Excuses the requests of a recent crash: a GPU of the engine has failed, and that was the
    /// cause.
    pub(super) fn excuse_recent_crash(&self) {
        if self.deps.crashes.excuse(self.last_epoch) {
            let engine = self.deps.spec.index;
            tracing::info!(event = "crash_excused", engine, epoch = self.last_epoch, "the engine's GPU has failed: no request is to blame");
        }
    }
}

/// Removes sockets and temporary files of a life that is over.
fn remove_life_files(directory: &Path) {
    match std::fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(%error, path = %directory.display(), "cannot remove the engine's directory");
        }
        _ => {}
    }
}
