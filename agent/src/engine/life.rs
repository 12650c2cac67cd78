//! One life of an engine: what its keeper tells and what it prints, sorted for the driver, and all that begins and ends with it.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::health::{ModelCard, News};
use super::log::{Log, is_sign_of_loading};
use super::progress::{Facts, Progress, StartReader};
use crate::cache;
use crate::keeper::Notices;
use crate::keeper::wire::{FromKeeper, Notice, PROTOCOL};
use crate::process::Leader;

/// What the keeper told, as far as the driver decides about it.
#[derive(Debug)]
pub(super) enum Told {
    /// The first process exists.
    Started(Leader),
    /// It could not be made.
    StartFailed(String),
    /// It has ended.
    Exited(ExitStatus),
    /// These processes do not die.
    Stuck(Vec<i32>),
    /// No process is left.
    Empty,
    /// The keeper itself is gone.
    Gone,
}

/// What the log has told so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Story {
    /// How far the start is; `None` before the first line that says so.
    pub(super) progress: Option<Progress>,
    /// Facts on the way.
    pub(super) facts: Facts,
}

/// What belongs to one life of the engine and ends with it.
pub(super) struct Life {
    pub(super) spawned: Instant,
    /// The first process, once it is known.
    pub(super) leader: Option<u32>,
    /// How the first process ended, if it did by itself.
    pub(super) exit: Option<ExitStatus>,
    /// The keeper is gone, so its part is ours.
    pub(super) unkept: bool,
    pub(super) models: Arc<[ModelCard]>,
    pub(super) ready_in: Option<Duration>,
    /// Begun by an agent that has died.
    pub(super) adopted: bool,
    /// It slept when it was found.
    pub(super) asleep: bool,
    pub(super) told: mpsc::Receiver<Told>,
    pub(super) news: mpsc::Receiver<News>,
    pub(super) story: watch::Receiver<Story>,
    pub(super) reader: Arc<Mutex<StartReader>>,
    /// What the kernel had killed for want of memory before.
    pub(super) oom_kills: u64,
    pub(super) _follower: AbortOnDropHandle<()>,
    pub(super) _health: AbortOnDropHandle<()>,
    pub(super) probe: Option<AbortOnDropHandle<()>>,
    /// For the task that follows the engine's cache, which begins with the engine's readiness.
    pub(super) cache: Option<cache::CacheLogWriter>,
    pub(super) follows_cache: Option<AbortOnDropHandle<()>>,
    /// The engine answers, and its cache is about to be followed.
    pub(super) joining: Option<oneshot::Receiver<()>>,
}

/// Reads what a keeper tells.
pub(super) struct Follower {
    pub(super) log: Log,
    pub(super) told: mpsc::Sender<Told>,
    pub(super) news: mpsc::Sender<News>,
    pub(super) story: watch::Sender<Story>,
    pub(super) reader: Arc<Mutex<StartReader>>,
    pub(super) spawned: Instant,
    pub(super) engine: u32,
}

impl Follower {
    /// Until the keeper is gone or the life is over.
    pub(super) async fn run(self, mut notices: Notices) {
        loop {
            let told = match notices.next().await {
                Ok(Some(FromKeeper::Output(output))) => {
                    self.log.take(&output, &mut |line: &str| self.read(line));
                    continue;
                }
                Ok(Some(FromKeeper::Notice(notice))) => self.sort(notice),
                Ok(None) => Some(Told::Gone),
                Err(error) => {
                    tracing::warn!(engine = self.engine, %error, "cannot understand an engine's keeper");
                    Some(Told::Gone)
                }
            };
            let Some(told) = told else { continue };
            self.log.end();
            let last = matches!(told, Told::Gone);
            if self.told.send(told).await.is_err() || last {
                return;
            }
        }
    }

    fn sort(&self, notice: Notice) -> Option<Told> {
        match notice {
            Notice::Hello { protocol: PROTOCOL, .. } => None,
            Notice::Hello { protocol, .. } => Some(Told::StartFailed(format!(
                "the program that keeps engines is another build than this agent (protocol {protocol}, not {PROTOCOL}): restart the agent"
            ))),
            Notice::Started(leader) => Some(Told::Started(leader)),
            Notice::StartFailed(text) => Some(Told::StartFailed(text)),
            Notice::Exited(status) => Some(Told::Exited(ExitStatus::from_raw(status))),
            Notice::Stuck(left) => Some(Told::Stuck(left)),
            Notice::Empty => Some(Told::Empty),
            Notice::Warning(text) => {
                tracing::warn!(engine = self.engine, "{text}");
                self.log.note(&format!("hostler: {text}"));
                None
            }
            Notice::Lost(bytes) => {
                self.log.note(&format!("hostler: {bytes} bytes of output are in the log file only"));
                None
            }
        }
    }

    fn read(&self, line: &str) {
        if is_sign_of_loading(line) {
            // Full or closed: it is past loading.
            let _ = self.news.try_send(News::Loading);
        }
        let mut reader = self.reader.lock();
        let progress = reader.line(line, self.spawned.elapsed());
        let facts = reader.facts();
        drop(reader);
        self.story.send_if_modified(|story| {
            let changed = progress.is_some() || story.facts != facts;
            if changed {
                story.progress = progress.or_else(|| story.progress.take());
                story.facts = facts;
            }
            changed
        });
    }
}
