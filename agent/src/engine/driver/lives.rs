//! How a driver begins a life of its engine, goes on with one that another agent began, and ends one: what the keeper is told, and what is known of the engine when it has served or died.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::Driver;
use crate::cache;
use crate::engine::Adopted;
use crate::engine::diagnosis::{Diagnosis, Ended, diagnose};
use crate::engine::health::{self, ModelCard};
use crate::engine::life::{Follower, Life, Story};
use crate::engine::progress::StartReader;
use crate::engine::state::{Event, State, Then};
use crate::engine::subject::Subject;
use crate::keeper::wire::{self, Order, Request};
use crate::keeper::{self, Fate, Notices};
use crate::probe;
use crate::process::orphans::end_orphans;
use crate::process::{STUCK_AFTER, table};
use crate::vllm::CommandLine;
use crate::vllm::directory::socket_in;

/// News waiting for the driver, and the same of what the keeper tells.
const WAITING_NEWS: usize = 8;

/// How long a keeper may take to start the engine. It reads nothing but the program, which may be on a cold parallel filesystem.
const START_DEADLINE: Duration = Duration::from_secs(60);

/// How long a keeper may take to end the engine or to say what is left, after which it is ended itself.
pub(super) const KEEPER_DEADLINE: Duration = STUCK_AFTER.saturating_add(Duration::from_secs(5));

impl Driver {
    /// Goes on with a life that another agent began, if there is one; else the first one begins.
    pub(super) async fn adopt(&mut self) -> Option<Event> {
        let Adopted { survivor, .. } = self.parts.adopted.take()?;
        let (leader, life) = (survivor.leader, survivor.life.clone());
        self.usual_start = life.ready_in_ms.map(Duration::from_millis);
        let (link, notices) = match survivor.adopt() {
            Ok(connection) => connection,
            Err(error) => {
                tracing::warn!(engine = self.parts.spec.index, %error, "cannot take an engine over; it ends and starts anew");
                let directory = self.parts.spec.directory.clone();
                // Never two in one directory. Whoever does not die is seen again by the GPU's check.
                let _ = tokio::task::spawn_blocking(move || end_orphans(&directory)).await;
                return None;
            }
        };
        self.parts.log.begin(&format!("hostler: life {} of this engine goes on under a new agent", life.epoch));
        self.parts.grip.lock().link = Some(link);
        let mut present = self.begin_life(notices, life.epoch);
        present.leader = Some(leader.pid.cast_unsigned());
        present.adopted = true;
        self.life = Some(present);
        tracing::info!(
            engine = self.parts.spec.index,
            pid = leader.pid,
            epoch = life.epoch,
            "engine taken over from an agent that had died"
        );
        Some(Event::Adopt { was_ready: life.ready_in_ms.is_some() })
    }

    pub(super) fn line(&self) -> &CommandLine {
        let fallback = self.parts.spec.fallback.as_ref().filter(|_| self.fell_back);
        fallback.unwrap_or(&self.parts.spec.command)
    }

    pub(super) fn fall_back(&mut self) {
        self.fell_back = true;
        self.crashed = true;
    }

    pub(super) fn spawn(&mut self) -> Result<(), Event> {
        self.cause.clear();
        self.crashed = false;
        self.parts.samples.send_replace(None);
        let epoch = self.next_epoch();
        self.lives += 1;
        self.parts.log.begin(&format!("hostler: life {epoch} of this engine begins"));
        let order = self.order(epoch);
        let started = self.parts.grip.lock().start(order);
        match started {
            Ok(notices) => {
                self.life = Some(self.begin_life(notices, epoch));
                self.keeper_by = Some(Instant::now() + START_DEADLINE);
                Ok(())
            }
            Err(error) => {
                self.cause = format!("cannot start {}: {error}", self.parts.spec.keeper.display());
                Err(Event::SpawnFailed)
            }
        }
    }

    /// What the keeper is told.
    pub(super) fn order(&self, epoch: u64) -> Order {
        let (spec, line) = (&self.parts.spec, self.line());
        Order {
            keeper: spec.keeper.clone().into(),
            program: line.program.clone().into(),
            arguments: line.arguments.clone(),
            set: line.set.iter().map(|(name, value)| ((*name).into(), value.clone())).collect(),
            unset: line.unset.iter().map(Into::into).collect(),
            directory: spec.directory.clone().into(),
            log: spec.log.clone().into(),
            wait_seconds: match spec.if_agent_dies {
                Fate::Kill => None,
                Fate::Keep { wait } => Some(wait.as_secs()),
            },
            cpus: spec.binding.as_ref().map(|binding| binding.cpus.clone()).unwrap_or_default(),
            life: self.note(epoch, None),
        }
    }

    /// What the next agent must know of this life.
    pub(super) fn note(&self, epoch: u64, ready_in: Option<Duration>) -> wire::Life {
        wire::Life {
            node: self.parts.spec.node.clone(),
            index: self.parts.spec.index,
            fingerprint: keeper::fingerprint(self.line(), self.parts.spec.version),
            epoch,
            lives: self.lives,
            ready_in_ms: ready_in.map(|took| u64::try_from(took.as_millis()).unwrap_or(u64::MAX)),
        }
    }

    pub(super) fn begin_life(&self, notices: Notices, epoch: u64) -> Life {
        let (news_out, news) = mpsc::channel(WAITING_NEWS);
        let (told_out, told) = mpsc::channel(WAITING_NEWS);
        let (story_out, story) = watch::channel(Story::default());
        let reader = Arc::new(Mutex::new(StartReader::new(self.usual_start)));
        let (spec, spawned) = (&self.parts.spec, Instant::now());
        let follower = Follower {
            log: self.parts.log.clone(),
            told: told_out,
            news: news_out.clone(),
            story: story_out,
            reader: Arc::clone(&reader),
            spawned,
            engine: spec.index,
        };
        let subject = Subject {
            socket: socket_in(&spec.directory),
            traffic: Arc::clone(&self.parts.traffic),
            samples: self.parts.samples.subscribe(),
            status: self.status.subscribe(),
            stall_timeout: spec.stall_timeout,
            canary_interval: spec.canary_interval,
            wanted: self.parts.wanted.clone(),
            on_gpus: spec.ready_to_start.is_some(),
            may_sleep: spec.command.unlocks_sleep(),
        };
        Life {
            spawned,
            leader: None,
            exit: None,
            unkept: false,
            models: Arc::default(),
            ready_in: None,
            adopted: false,
            asleep: false,
            told,
            news,
            story,
            reader,
            oom_kills: table::oom_kills(),
            _follower: AbortOnDropHandle::new(self.parts.tasks.spawn(follower.run(notices))),
            _health: AbortOnDropHandle::new(self.parts.tasks.spawn(health::watch(subject, news_out))),
            probe: None,
            cache: Some(self.parts.cache.begin_life(epoch)),
            follows_cache: None,
            joining: None,
        }
    }

    /// Increases even if the clock was set back.
    pub(super) fn next_epoch(&mut self) -> u64 {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(since_1970.as_micros()).unwrap_or(u64::MAX);
        self.last_epoch = now.max(self.last_epoch + 1);
        self.last_epoch
    }

    pub(super) fn terminate(&mut self) {
        if let Some(life) = &mut self.life {
            // An engine that stops refuses to be read, which is nothing to warn of.
            life.probe = None;
            life.follows_cache = None;
        }
        self.parts.grip.lock().say(&Request::Terminate);
    }

    pub(super) fn kill(&mut self) {
        let Some(life) = &self.life else { return };
        if life.unkept {
            self.end_orphans();
            return;
        }
        self.keeper_by = Some(Instant::now() + KEEPER_DEADLINE);
        self.parts.grip.lock().say(&Request::Kill);
    }

    /// With our end of the connection gone, the keeper waits for the next agent.
    pub(super) fn let_go(&mut self) {
        self.parts.grip.lock().link = None;
        self.parts.cache.end_life();
        (self.life, self.keeper_by) = (None, None);
    }

    /// Does what the keeper would have done.
    pub(super) fn end_orphans(&mut self) {
        self.keeper_by = None;
        let directory = self.parts.spec.directory.clone();
        self.ending.get_or_insert_with(|| tokio::task::spawn_blocking(move || end_orphans(&directory)));
    }

    /// The keeper did not do in time what it was told.
    pub(super) fn miss_keeper(&mut self) -> Option<Event> {
        self.keeper_by = None;
        tracing::error!(engine = self.parts.spec.index, "the engine's keeper does not answer; it is ended");
        if let Some(link) = &self.parts.grip.lock().link {
            link.end_keeper();
        }
        self.lose_keeper("the engine's keeper did not answer")
    }

    pub(super) fn lose_keeper(&mut self, why: &str) -> Option<Event> {
        self.life.as_mut()?.unkept = true;
        match self.machine.state() {
            State::Killing { .. } => {
                self.end_orphans();
                None
            }
            _ => {
                why.clone_into(&mut self.cause);
                // No request's doing, nor the front-end's.
                Some(Event::Fail)
            }
        }
    }

    /// Ends a life of which no process is left: forgets it and its files, and finds out why it ended.
    pub(super) fn bury(&mut self) {
        self.parts.grip.lock().link = None;
        self.keeper_by = None;
        self.ending = None;
        self.parts.cache.end_life();
        if self.crashed {
            self.failure = Some(self.diagnose());
        }
        if self.crashed && self.fell_back && self.front_end_failed() {
            let why = self.failure.as_ref().map(|failure| failure.cause.clone()).unwrap_or_default();
            tracing::warn!(engine = self.parts.spec.index, "the Rust front-end does not serve ({why}); the Python one is used from now on");
        }
        self.life = None;
        remove(&self.parts.spec.directory);
    }

    /// Whether the life that ended was the last one with the first command line.
    pub(super) fn front_end_failed(&self) -> bool {
        matches!(self.machine.state(), State::Killing { then: Then::Spawn })
    }

    pub(super) fn diagnose(&self) -> Diagnosis {
        let life = self.life.as_ref();
        let ended = Ended {
            status: life.and_then(|life| life.exit),
            cause: self.cause.clone(),
            was_ready: life.is_some_and(|life| life.ready_in.is_some()),
            oom_killed: life.is_some_and(|life| table::oom_kills() > life.oom_kills),
        };
        diagnose(&ended, &self.parts.log.last_of_life(usize::MAX))
    }

    /// The engine answers. Before requests come, its cache is listened to: what it stores from now on is known.
    pub(super) fn join_cache(&mut self, models: Vec<ModelCard>) {
        let Some(life) = &mut self.life else { return };
        life.models = models.into();
        let Some(writer) = life.cache.take() else { return };
        let (connected, joining) = oneshot::channel();
        let (source, index) = (self.parts.spec.cache.clone(), self.parts.spec.index);
        let since = if life.adopted { cache::FollowFrom::FirstEvent } else { cache::FollowFrom::Now };
        let follows = self.parts.tasks.spawn(async move { cache::follow(&source, writer, index, since, connected).await });
        life.follows_cache = Some(AbortOnDropHandle::new(follows));
        life.joining = Some(joining);
    }

    pub(super) fn become_ready(&mut self) -> Option<Event> {
        let life = self.life.as_mut()?;
        life.joining = None;
        // An engine that stops meanwhile must not be told as ready.
        if !matches!(self.machine.state(), State::Alive(_)) {
            return None;
        }
        // An adopted engine had been ready long before, as a rule.
        let took = self.usual_start.filter(|_| life.adopted).unwrap_or_else(|| life.spawned.elapsed());
        life.ready_in = Some(took);
        self.usual_start = Some(took);
        self.failure = None;
        let (spec, samples) = (&self.parts.spec, self.parts.samples.clone());
        let (socket, interval) = (socket_in(&spec.directory), spec.probe_interval);
        let traffic = Arc::clone(&self.parts.traffic);
        let probe = self.parts.tasks.spawn(async move {
            probe::watch(&socket, &traffic, interval, &samples).await;
        });
        life.probe = Some(AbortOnDropHandle::new(probe));
        tracing::info!(engine = spec.index, seconds = format_args!("{:.1}", took.as_secs_f32()), "engine is ready");
        let note = Request::Note(self.note(self.last_epoch, Some(took)));
        self.parts.grip.lock().say(&note);
        if self.life.as_ref().is_some_and(|life| life.asleep) {
            "the engine has slept since before this agent began; `hostler wake` brings it back".clone_into(&mut self.order);
            return Some(Event::FoundAsleep);
        }
        Some(Event::Ready)
    }
}

/// Sockets and temporary files of a life that is over.
fn remove(directory: &Path) {
    match std::fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(%error, path = %directory.display(), "cannot remove the engine's directory");
        }
        _ => {}
    }
}
