//! The part of an engine that a member runs: its keeper, its processes and what they print.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use rustix::process::Signal;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::engine::EngineSpec;
use crate::engine::diagnosis::{EndCause, LifeEnd, diagnose};
use crate::engine::log::EngineLog;
use crate::gang::wire::{MAX_OUTPUT_BYTES, PartActivity, PartEnd};
use crate::keeper::wire::{KeeperFrame, KeeperNotice, KeeperRequest, LaunchSpec, LifeRecord, PROTOCOL, ProcessSpec};
use crate::keeper::{self, KeeperClient, KeeperNotices};
use crate::process::activity::{ProcessActivity, ProcessSnapshot};
use crate::process::core_exit::CoreWatch;
use crate::process::oom_watch::OomWatch;
use crate::process::orphans::end_orphans;
use crate::process::table::ProcessStat;
use crate::vllm::MeetingPoint;
use crate::vllm::directory::prepare;

/// Notices that may wait for the member's loop.
const EVENT_QUEUE_LEN: usize = 64;

/// Looks that may miss a process whose keeper is about to say that it has ended.
const MISSED_LOOKS: u32 = 3;

/// Greatest process id of Linux; ids of tests' engines that are no processes are beyond it.
const MAX_PROCESS_ID: u32 = 1 << 22;

/// What happens to a part.
#[derive(Debug)]
pub(super) enum PartEvent {
    Output(String),
    Ended(EndCause),
    /// These processes do not die.
    Stuck(Vec<i32>),
    /// No process is left.
    Empty,
}

#[derive(Debug)]
pub(super) struct Part {
    pub(super) epoch: u64,
    keeper: KeeperClient,
    events: mpsc::Receiver<PartEvent>,
    reader: AbortOnDropHandle<()>,
    /// Waits for the end of the first computing process.
    core_watch: Option<AbortOnDropHandle<()>>,
    events_out: mpsc::Sender<PartEvent>,
    leader: tokio::sync::watch::Receiver<Option<u32>>,
    log: EngineLog,
    oom_watch: OomWatch,
    life: LifeRecord,
    last_look: Option<(ProcessSnapshot, Instant)>,
    has_served: bool,
    /// Looks in a row that did not find the first process.
    missed_looks: u32,
    /// Its end was asked for, or has been told.
    pub(super) is_ending: bool,
}

impl Part {
    /// Starts this node's part of an epoch.
    ///
    /// # Errors
    /// Why there is none, in a sentence.
    pub(super) fn start(spec: &EngineSpec, epoch: u64, point: &MeetingPoint) -> Result<Self, String> {
        let line = point.complete(&spec.command, |name| std::env::var_os(name).is_some());
        let restored = spec.run_dirs.as_deref().map_or(Ok(()), crate::run_dir::HeldDirectories::restore);
        restored.map_err(|error| error.to_string())?;
        prepare(&spec.directory).map_err(|error| format!("the engine's directory {} cannot be made: {error}", spec.directory.display()))?;
        let life = LifeRecord { node: spec.node.clone(), index: spec.index, epoch, ..LifeRecord::default() };
        let launch = LaunchSpec {
            process: ProcessSpec::new(spec.keepers.program(), &line, &spec.directory),
            forks: false,
            log: spec.log.clone().into(),
            wait_seconds: None,
            cpus: spec.cpu_binding.as_ref().map(|binding| binding.cpus.clone()).unwrap_or_default(),
            file_pool: None,
            life: life.clone(),
        };
        let started = keeper::start(&spec.keepers, launch);
        let (keeper, notices) = started.map_err(|error| format!("cannot start {}: {error}", spec.keepers.program().display()))?;
        let (events_out, events) = mpsc::channel(EVENT_QUEUE_LEN);
        let (leader_out, leader) = tokio::sync::watch::channel(None);
        let log = EngineLog::default();
        let reader = PartReader { log: log.clone(), events: events_out.clone(), leader: leader_out, directory: spec.directory.clone() };
        Ok(Self {
            epoch,
            keeper,
            events,
            reader: AbortOnDropHandle::new(tokio::spawn(reader.run(notices))),
            core_watch: None,
            events_out,
            leader,
            log,
            oom_watch: OomWatch::of_host(),
            life,
            last_look: None,
            has_served: false,
            missed_looks: 0,
            is_ending: false,
        })
    }

    /// Next event. Cancel safe.
    pub(super) async fn next(&mut self) -> PartEvent {
        match self.events.recv().await {
            Some(event) => event,
            // This object has a sender.
            None => std::future::pending().await,
        }
    }

    /// Kills every process; `Empty` follows.
    pub(super) fn kill(&mut self) {
        self.is_ending = true;
        self.core_watch = None;
        self.keeper.send(&KeeperRequest::Kill);
    }

    /// From now on the end of a computing process is the end of the part, whose front-end would
    /// notice it 3 to 6 s later (vLLM 0.32 and 0.33).
    pub(super) fn mark_served(&mut self) {
        self.has_served = true;
        // The keeper looks now which shared memory is the part's: what somebody else kills later
        // leaves its own behind.
        self.keeper.send(&KeeperRequest::Note(self.life.clone()));
        let Some(leader) = *self.leader.borrow() else { return };
        self.oom_watch = OomWatch::of_process(leader);
        let events = self.events_out.clone();
        self.core_watch = Some(AbortOnDropHandle::new(tokio::spawn(async move {
            let status = CoreWatch::begin(leader).await.first_exit().await;
            // A full queue belongs to a member that is told of the end by the process itself.
            let _ = events.send(PartEvent::Ended(EndCause::CoreEnded(status))).await;
        })));
    }

    /// What the processes have done since the last call.
    pub(super) async fn look(&mut self) -> PartActivity {
        let leader = *self.leader.borrow();
        let look = ProcessSnapshot::take(leader).await;
        let now = Instant::now();
        let activity = self.last_look.as_ref().map(|(earlier, at)| look.activity_since(earlier, now.saturating_duration_since(*at)));
        self.last_look = Some((look, now));
        let is_missed = leader.is_some_and(|leader| leader <= MAX_PROCESS_ID && !is_alive(leader));
        self.missed_looks = if is_missed { self.missed_looks + 1 } else { 0 };
        match activity {
            Some(ProcessActivity::Stopped(process)) => PartActivity::Stopped(process),
            None | Some(ProcessActivity::Computing) => PartActivity::Computing,
            Some(ProcessActivity::Idle | ProcessActivity::Unknown) => PartActivity::Idle,
        }
    }

    /// Whether the first process is gone and the keeper, which should say so, is silent.
    pub(super) fn is_keeper_silent(&self) -> bool {
        !self.is_ending && self.missed_looks >= MISSED_LOOKS
    }

    /// Finds out why the part has ended.
    pub(super) fn diagnose(&self, cause: EndCause) -> PartEnd {
        let status = match cause {
            EndCause::Exited(status) | EndCause::CoreEnded(Some(status)) => Some(status),
            _ => None,
        };
        let oom_killed = self.oom_watch.has_killed();
        let is_outside_kill = status.and_then(|status| status.signal()) == Some(Signal::KILL.as_raw()) && oom_killed == Some(false);
        let ended = LifeEnd { cause, was_ready: self.has_served, oom_killed };
        let diagnosis = diagnose(&ended, &self.log.last_lines_of_life(usize::MAX));
        PartEnd { kind: diagnosis.kind.as_str().to_owned(), cause: diagnosis.cause, remedy: diagnosis.remedy, is_outside_kill }
    }

    /// Ends the keeper itself when it does not obey; its engine goes with it.
    pub(super) fn end_keeper(&self) {
        self.keeper.end_keeper();
    }

    /// Whether the task that reads the keeper has ended.
    pub(super) fn is_reader_gone(&self) -> bool {
        self.reader.is_finished()
    }
}

fn is_alive(pid: u32) -> bool {
    ProcessStat::read(pid.cast_signed()).is_some_and(|process| !process.is_zombie)
}

/// Reads what a keeper tells.
struct PartReader {
    log: EngineLog,
    events: mpsc::Sender<PartEvent>,
    leader: tokio::sync::watch::Sender<Option<u32>>,
    directory: std::path::PathBuf,
}

impl PartReader {
    async fn run(self, mut notices: KeeperNotices) {
        loop {
            let event = match notices.next().await {
                Ok(Some(KeeperFrame::Output(output))) => {
                    let mut lines = String::new();
                    self.log.push_output(&output, &mut |line: &str| {
                        if lines.len() + line.len() < MAX_OUTPUT_BYTES {
                            lines.push_str(line);
                            lines.push('\n');
                        }
                    });
                    // The log file has what a slow connection does not take.
                    let _ = self.events.try_send(PartEvent::Output(lines));
                    continue;
                }
                Ok(Some(KeeperFrame::Notice(notice))) => match self.classify(notice) {
                    Some(event) => event,
                    None => continue,
                },
                Ok(None) | Err(_) => {
                    // The keeper is dead, and perhaps not all of its engine.
                    let _ = self.events.send(PartEvent::Ended(EndCause::KeeperLost)).await;
                    self.end_processes().await;
                    PartEvent::Empty
                }
            };
            let is_last = matches!(event, PartEvent::Empty);
            if self.events.send(event).await.is_err() || is_last {
                return;
            }
        }
    }

    fn classify(&self, notice: KeeperNotice) -> Option<PartEvent> {
        match notice {
            KeeperNotice::Started(leader) => {
                self.leader.send_replace(Some(leader.pid.cast_unsigned()));
                None
            }
            KeeperNotice::Hello { protocol: PROTOCOL, .. } | KeeperNotice::Prepared | KeeperNotice::SpareEnded(_) => None,
            KeeperNotice::Hello { protocol, .. } => Some(PartEvent::Ended(EndCause::NotStarted(format!(
                "the program that keeps engines is another build than this agent (protocol {protocol}, not {PROTOCOL}): restart the agent"
            )))),
            KeeperNotice::StartFailed(why) => Some(PartEvent::Ended(EndCause::NotStarted(why))),
            KeeperNotice::Exited(status) => Some(PartEvent::Ended(EndCause::Exited(ExitStatus::from_raw(status)))),
            KeeperNotice::Stuck(left) => Some(PartEvent::Stuck(left)),
            KeeperNotice::Empty => Some(PartEvent::Empty),
            KeeperNotice::Warning(text) => {
                tracing::warn!("{text}");
                None
            }
            KeeperNotice::Lost(bytes) => {
                tracing::debug!(bytes, "output of the engine is in the log file only");
                None
            }
        }
    }

    /// Ends the processes in the keeper's place; returns once none is left.
    async fn end_processes(&self) {
        loop {
            let directory = self.directory.clone();
            match tokio::task::spawn_blocking(move || end_orphans(&directory)).await {
                Ok(Ok(_)) => return,
                Ok(Err(left)) => tracing::error!(event = "engine_stuck", ?left, "processes of the engine do not die"),
                Err(_) => tokio::time::sleep(Duration::from_secs(1)).await,
            }
        }
    }
}
