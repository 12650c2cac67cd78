//! One life of an engine: its keeper's notices and its output, sorted for the supervisor, and
//! everything that begins and ends with the life.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::PastStart;
use super::crash_output::is_fatal;
use super::health::HealthEvent;
use super::log::{EngineLog, is_loading_marker};
use super::model_card::ModelCard;
use super::startup_progress::{LogFacts, StartupLogParser, StartupProgress};
use super::warm_starts::StartOrigin;
use crate::cache;
use crate::keeper::KeeperNotices;
use crate::keeper::wire::{KeeperFrame, KeeperNotice, PROTOCOL};
use crate::process::LeaderProcess;
use crate::process::oom_watch::OomWatch;

/// Notices of the keeper that the supervisor acts on.
#[derive(Debug)]
pub(super) enum KeeperEvent {
    Started(LeaderProcess),
    StartFailed(String),
    Exited(ExitStatus),
    /// These processes do not die.
    Stuck(Vec<i32>),
    /// No process is left.
    Empty,
    Gone,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct StartupLog {
    /// Progress of the start; `None` before the first line that reports it.
    pub(super) progress: Option<StartupProgress>,
    pub(super) facts: LogFacts,
}

/// State that belongs to one life of the engine and ends with it.
pub(super) struct EngineLife {
    pub(super) spawned: Instant,
    pub(super) leader: Option<u32>,
    /// The keeper is gone, so the agent does the keeper's part itself.
    pub(super) is_keeper_lost: bool,
    pub(super) models: Arc<[ModelCard]>,
    /// Routes that clients may ask for and the engine's front-end lacks, once known.
    pub(super) missing_routes: Option<Arc<[&'static str]>>,
    pub(super) ready_in: Option<Duration>,
    /// An agent that has died began this life.
    pub(super) is_adopted: bool,
    pub(super) was_found_asleep: bool,
    pub(super) origin: StartOrigin,
    /// How it became ready, if this agent has seen it.
    pub(super) start: Option<Arc<PastStart>>,
    pub(super) keeper_events: mpsc::Receiver<KeeperEvent>,
    pub(super) health_events: mpsc::Receiver<HealthEvent>,
    pub(super) startup_log: watch::Receiver<StartupLog>,
    pub(super) log_parser: Arc<Mutex<StartupLogParser>>,
    /// Reports which processes the kernel kills for lack of memory.
    pub(super) oom_watch: OomWatch,
    /// Time when the engine first printed that it cannot go on.
    pub(super) gave_up_at: Arc<OnceLock<Instant>>,
    /// How and when the first of the computing processes ended, if that was seen.
    pub(super) core_exit: Arc<OnceLock<(ExitStatus, Instant)>>,
    /// Task that waits for that end, and then for the front-end's last words.
    pub(super) core_watch: Option<AbortOnDropHandle<Option<ExitStatus>>>,
    pub(super) _follower: AbortOnDropHandle<()>,
    pub(super) _health: AbortOnDropHandle<()>,
    pub(super) probe: Option<AbortOnDropHandle<()>>,
    /// Writer for the task that follows the engine's cache, which begins with the engine's
    /// readiness.
    pub(super) cache: Option<cache::CacheLogWriter>,
    pub(super) cache_follower: Option<AbortOnDropHandle<()>>,
    /// Signals that the engine answers and its cache is about to be followed.
    pub(super) cache_joined: Option<oneshot::Receiver<()>>,
}

pub(super) struct KeeperReader {
    pub(super) log: EngineLog,
    pub(super) keeper_events: mpsc::Sender<KeeperEvent>,
    pub(super) health_events: mpsc::Sender<HealthEvent>,
    pub(super) startup_log: watch::Sender<StartupLog>,
    pub(super) log_parser: Arc<Mutex<StartupLogParser>>,
    pub(super) gave_up_at: Arc<OnceLock<Instant>>,
    pub(super) spawned: Instant,
    pub(super) engine: u32,
}

impl KeeperReader {
    /// Runs until the keeper is gone or the life is over.
    pub(super) async fn run(self, mut notices: KeeperNotices) {
        loop {
            let event = match notices.next().await {
                Ok(Some(KeeperFrame::Output(output))) => {
                    self.log.push_output(&output, &mut |line: &str| self.parse_line(line));
                    continue;
                }
                Ok(Some(KeeperFrame::Notice(notice))) => self.classify(notice),
                Ok(None) => Some(KeeperEvent::Gone),
                Err(error) => {
                    tracing::warn!(engine = self.engine, %error, "cannot understand an engine's keeper");
                    Some(KeeperEvent::Gone)
                }
            };
            let Some(event) = event else { continue };
            self.log.finish_line();
            let last = matches!(event, KeeperEvent::Gone);
            if self.keeper_events.send(event).await.is_err() || last {
                return;
            }
        }
    }

    fn classify(&self, notice: KeeperNotice) -> Option<KeeperEvent> {
        match notice {
            KeeperNotice::Hello { protocol: PROTOCOL, .. } | KeeperNotice::Prepared => None,
            KeeperNotice::Hello { protocol, .. } => Some(KeeperEvent::StartFailed(format!(
                "the program that keeps engines is another build than this agent (protocol {protocol}, not {PROTOCOL}): restart the agent"
            ))),
            KeeperNotice::SpareEnded(cause) => {
                self.log.note(&format!("hostler: the spare has ended ({cause}), so vLLM is imported anew"));
                None
            }
            KeeperNotice::Started(leader) => Some(KeeperEvent::Started(leader)),
            KeeperNotice::StartFailed(text) => Some(KeeperEvent::StartFailed(text)),
            KeeperNotice::Exited(status) => Some(KeeperEvent::Exited(ExitStatus::from_raw(status))),
            KeeperNotice::Stuck(left) => Some(KeeperEvent::Stuck(left)),
            KeeperNotice::Empty => Some(KeeperEvent::Empty),
            KeeperNotice::Warning(text) => {
                tracing::warn!(engine = self.engine, "{text}");
                self.log.note(&format!("hostler: {text}"));
                None
            }
            KeeperNotice::Lost(bytes) => {
                self.log.note(&format!("hostler: {bytes} bytes of output are in the log file only"));
                None
            }
        }
    }

    fn parse_line(&self, line: &str) {
        if is_loading_marker(line) {
            // A full or closed channel means that loading is over.
            let _ = self.health_events.try_send(HealthEvent::Loading);
        }
        if is_fatal(line) {
            self.gave_up_at.get_or_init(Instant::now);
        }
        let mut reader = self.log_parser.lock();
        let progress = reader.parse_line(line, self.spawned.elapsed());
        let facts = reader.facts();
        drop(reader);
        self.startup_log.send_if_modified(|startup_log| {
            let changed = progress.is_some() || startup_log.facts != facts;
            if changed {
                startup_log.progress = progress.or_else(|| startup_log.progress.take());
                startup_log.facts = facts;
            }
            changed
        });
    }
}
