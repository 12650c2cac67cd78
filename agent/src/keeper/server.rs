//! The keeper's own process.
//!
//! It starts the engine, reads its output for as long as it lives, obeys the agent, and exits only
//! when no process of the engine is left.

use std::future::pending;
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, geteuid, getpid, kill_process, kill_process_group};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{self, SignalKind};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::agent_connection::{AgentConnection, AgentWriter, read_request, write_queued};
use super::agent_process::{self, AgentProcess, AgentState};
use super::launch::{bind_to_cpus, describe_start_error, spawn};
use super::log_file::{LogFileThread, LogFileWriter};
use super::output_replay::OutputReplay;
use super::spare::{FirstProcess, Spare};
use super::suspension::Suspension;
use super::wire::{KeeperNotice, KeeperRequest, LaunchSpec, LifeRecord, PROTOCOL};
use super::{exec_error_path, socket_path};
use crate::file_pool::FolderHold;
use crate::process::leftovers::SharedMemoryLeftovers;
use crate::process::{LeaderProcess, STUCK_AFTER, table};

/// Time limit for the starting agent to send the launch spec.
const LAUNCH_SPEC_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit for reading the rest of a dead engine's output.
///
/// A process that went to another parent may hold the pipe open; its output does not matter.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_millis(500);

/// Time limit for the last notices to reach the agent, and the last lines the disk.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Time after which processes that outlive SIGKILL count as stuck in the kernel; they die when it
/// releases them.
///
/// An agent that waits for them gets repeated reports instead of losing its keeper: otherwise it
/// would take the engine's memory for free.
const MAX_KILL_WAIT: Duration = Duration::from_secs(5 * 60);

/// First and longest pause between two checks of a killed group.
const KILL_RETRY_DELAYS: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(100));

/// How long a kill waits while the engine's shared memory is listed.
///
/// Listing usually takes milliseconds, but forever while a driver holds a process.
const LEFTOVERS_TIMEOUT: Duration = Duration::from_millis(100);

/// Pause between two attempts to accept a connection when there are no file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

const READ_CHUNK_BYTES: usize = 16 * 1024;

#[derive(Debug)]
struct Keeper {
    agent: Option<AgentConnection>,
    /// The agent's process, if it can be watched.
    agent_process: Option<AgentProcess>,
    suspension: Suspension,
    /// Listener for the next agent; `None` if the engine ends with this one.
    listener: Option<UnixListener>,
    adoption_timeout: Option<Duration>,
    /// When the wait for an agent ends; `None` while an agent has the engine.
    adoption_deadline: Option<Instant>,
    life_record: LifeRecord,
    leader: LeaderProcess,
    group: Pid,
    /// The first process was not reaped yet.
    is_leader_unreaped: bool,
    output: Option<pipe::Receiver>,
    /// Open for as long as the engine may read its order.
    _gate: Option<std::os::unix::net::UnixStream>,
    replay: OutputReplay,
    log_file: Option<LogFileWriter>,
    log_thread: LogFileThread,
    killing: Option<KillProgress>,
    leftovers: SharedMemoryLeftovers,
    /// Hold on the files that the engine shares with others.
    file_pool: Option<FolderHold>,
    directory: PathBuf,
}

/// Progress of ending the engine.
#[derive(Debug)]
struct KillProgress {
    since: Instant,
    next_attempt: Instant,
    pause: Duration,
    /// When the agent next gets a report of remaining processes.
    next_report: Instant,
}

enum KeeperStep {
    Requested(io::Result<Option<KeeperRequest>>),
    AgentSeen(AgentState),
    Sent(io::Result<()>),
    Connected(AgentConnection, io::Result<AgentProcess>),
    Printed(BytesMut),
    Complained(String),
    ChildEnded,
    Signalled,
    Tick,
    Nothing,
}

/// Keeps one engine for the agent at the other end of `agent`.
///
/// Returns when nothing is left of the engine.
pub(super) async fn run(agent: std::os::unix::net::UnixStream) -> io::Result<()> {
    let process = AgentProcess::of_peer(&agent);
    let mut agent = AgentConnection::new(agent)?;
    agent.queue_notice(&KeeperNotice::Hello { protocol: PROTOCOL, running: None });
    // Register before the engine exists: the exit of a process would be missed without a listener.
    // The engine does not inherit the handlers.
    let mut children = unix::signal(SignalKind::child())?;
    let mut signals = [unix::signal(SignalKind::terminate())?, unix::signal(SignalKind::interrupt())?, unix::signal(SignalKind::hangup())?];
    let Some((order, spare)) = wait_for_order(&mut agent, &mut children).await? else { return Ok(()) };
    let mut keeper = match Keeper::start(agent, process, &order, spare) {
        Ok(keeper) => keeper,
        Err((mut agent, text)) => {
            agent.queue_notice(&KeeperNotice::StartFailed(text));
            agent.queue_notice(&KeeperNotice::Empty);
            agent.flush(FLUSH_TIMEOUT).await;
            return Ok(());
        }
    };
    loop {
        let step = keeper.next(&mut children, &mut signals).await;
        if keeper.handle(step).is_break() {
            break;
        }
    }
    keeper.finish().await;
    Ok(())
}

/// Waits for the agent to start the engine, with a spare if it is to prepare one. `None` if the
/// agent leaves.
///
/// A spare dies with this process, which the kernel sees to.
async fn wait_for_order(agent: &mut AgentConnection, children: &mut unix::Signal) -> io::Result<Option<(LaunchSpec, Option<Spare>)>> {
    let mut deadline = Some(Instant::now() + LAUNCH_SPEC_TIMEOUT);
    let mut spare = None;
    loop {
        let (reader, writer) = agent.split();
        let writer = Some(writer).filter(AgentWriter::has_work);
        tokio::select! {
            request = read_request(Some(reader)) => match request? {
                Some(KeeperRequest::Start(order)) => return Ok(Some((*order, spare))),
                Some(KeeperRequest::Prepare(process)) if deadline.take().is_some() => match Spare::spawn(&process) {
                    Ok(made) => spare = Some(made),
                    Err(error) => agent.queue_notice(&KeeperNotice::SpareEnded(describe_start_error(&process.program, &error))),
                },
                None | Some(KeeperRequest::Kill) => return Ok(None),
                other => return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{other:?} is no order"))),
            },
            sent = write_queued(writer) => sent?,
            _ = children.recv() => if let Some(cause) = spare.as_ref().and_then(Spare::end) {
                spare = None;
                agent.queue_notice(&KeeperNotice::SpareEnded(cause));
            },
            () = Spare::imported(spare.as_mut()) => agent.queue_notice(&KeeperNotice::Prepared),
            () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "no order came"));
            }
        }
    }
}

impl Keeper {
    fn start(
        mut agent: AgentConnection,
        process: io::Result<AgentProcess>,
        order: &LaunchSpec,
        spare: Option<Spare>,
    ) -> Result<Self, (AgentConnection, String)> {
        if let Err(error) = bind_to_cpus(None, &order.cpus) {
            agent.queue_notice(&KeeperNotice::Warning(format!(
                "the engine cannot be bound to CPUs {:?}: {error}; it runs on all",
                order.cpus
            )));
        }
        let directory = Path::new(&order.process.directory);
        let leftovers = SharedMemoryLeftovers::new();
        let wait = order.wait_seconds.map(Duration::from_secs);
        let made = || {
            let listener = wait.map(|_| UnixListener::bind(socket_path(directory))).transpose()?;
            let (mut file, thread) = LogFileWriter::open(Path::new(&order.log).to_owned())?;
            file.write(Bytes::from(format!("hostler: life {} of this engine begins\n", order.life.epoch)));
            let file_pool = order.file_pool.as_ref().map(|folder| FolderHold::take(Path::new(folder))).transpose()?;
            let first = first_process(order, spare)?;
            first.record.write(directory)?;
            Ok((listener, file, thread, file_pool, first))
        };
        let (listener, file, thread, file_pool, FirstProcess { record, output, printed, gate }) = match made() {
            Ok(made) => made,
            Err(error) => {
                let error: io::Error = error;
                return Err((agent, describe_start_error(&order.process.program, &error)));
            }
        };
        let leader = record.leader();
        agent.queue_notice(&KeeperNotice::Started(leader));
        let agent_process = watchable(process, &mut agent);
        let mut keeper = Self {
            agent: Some(agent),
            agent_process,
            suspension: Suspension::default(),
            listener,
            adoption_timeout: wait,
            adoption_deadline: None,
            life_record: order.life.clone(),
            leader,
            group: Pid::from_raw(leader.pid).expect("a process that was just made has an id"),
            is_leader_unreaped: true,
            output: Some(output),
            _gate: gate,
            replay: OutputReplay::default(),
            log_file: Some(file),
            log_thread: thread,
            killing: None,
            leftovers,
            file_pool,
            directory: directory.to_owned(),
        };
        keeper.forward_output(printed);
        Ok(keeper)
    }

    async fn next(&mut self, children: &mut unix::Signal, signals: &mut [unix::Signal; 3]) -> KeeperStep {
        let [terminate, interrupt, hang_up] = signals;
        let wake_at = self.killing.as_ref().map(|killing| killing.next_attempt).or(self.adoption_deadline);
        let accepts = self.agent.is_none() && self.killing.is_none();
        let listener = self.listener.as_ref().filter(|_| accepts);
        let (reader, writer) = self.agent.as_mut().map(AgentConnection::split).unzip();
        let writer = writer.filter(AgentWriter::has_work);
        // Watch only an agent that has the engine. An engine being killed needs no stop.
        let watched = self.agent_process.as_mut().filter(|_| self.adoption_deadline.is_none() && self.killing.is_none());
        let mut chunk = BytesMut::with_capacity(READ_CHUNK_BYTES);
        tokio::select! {
            biased;
            _ = children.recv() => KeeperStep::ChildEnded,
            request = read_request(reader) => KeeperStep::Requested(request),
            state = agent_process::watch(watched, self.suspension.is_on()) => KeeperStep::AgentSeen(state),
            _ = terminate.recv() => KeeperStep::Signalled,
            _ = interrupt.recv() => KeeperStep::Signalled,
            _ = hang_up.recv() => KeeperStep::Signalled,
            () = sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => KeeperStep::Tick,
            sent = write_queued(writer) => KeeperStep::Sent(sent),
            Some(complaint) = self.log_thread.errors.recv() => KeeperStep::Complained(complaint),
            stream = accept_agent(listener) => check_agent(stream),
            read = read_output(self.output.as_mut(), &mut chunk) => match read {
                Ok(1..) => KeeperStep::Printed(chunk),
                _ => {
                    self.output = None;
                    KeeperStep::Nothing
                }
            },
        }
    }

    fn handle(&mut self, step: KeeperStep) -> ControlFlow<()> {
        match step {
            KeeperStep::Requested(Ok(Some(request))) => self.handle_request(request),
            KeeperStep::Requested(Ok(None) | Err(_)) | KeeperStep::Sent(Err(_)) | KeeperStep::AgentSeen(AgentState::Gone) => {
                self.handle_agent_loss();
            }
            KeeperStep::AgentSeen(AgentState::Suspended) => self.suspension.enforce(own_id()),
            KeeperStep::AgentSeen(AgentState::Running) => self.suspension.end(own_id()),
            KeeperStep::Connected(mut peer, process) => {
                peer.queue_notice(&KeeperNotice::Hello { protocol: PROTOCOL, running: Some((self.leader, self.life_record.clone())) });
                self.agent_process = watchable(process, &mut peer);
                self.agent = Some(peer);
            }
            KeeperStep::Printed(chunk) => self.forward_output(chunk.freeze()),
            KeeperStep::Complained(text) => self.notify_agent(&KeeperNotice::Warning(text)),
            KeeperStep::ChildEnded => {
                self.reap();
            }
            // While an agent is connected, it decides: a batch system's signal to all processes
            // must not cut short the agent's drain.
            KeeperStep::Signalled if self.agent.is_none() => self.kill(),
            KeeperStep::Tick if self.killing.is_none() => self.kill(),
            KeeperStep::Sent(Ok(())) | KeeperStep::Signalled | KeeperStep::Tick | KeeperStep::Nothing => {}
        }
        if self.killing.is_some() { self.retry_kill() } else { ControlFlow::Continue(()) }
    }

    fn handle_request(&mut self, request: KeeperRequest) {
        match request {
            KeeperRequest::Adopt { wait_seconds } => {
                self.adoption_timeout = wait_seconds.map(Duration::from_secs);
                self.adoption_deadline = None;
                for piece in self.replay.chunks().iter().flat_map(|piece| piece.chunks(READ_CHUNK_BYTES)) {
                    if let Some(agent) = &mut self.agent {
                        agent.queue_output(piece);
                    }
                }
            }
            KeeperRequest::Note(life) => {
                self.life_record = life;
                // Record the mappings now that the engine is ready; later everything may be killed
                // at once.
                self.leftovers.record_mappings(self.processes(), Duration::ZERO);
            }
            KeeperRequest::Terminate if self.is_leader_unreaped => {
                // If the process has just ended, its exit is about to be seen.
                let _ = kill_process(self.group, Signal::TERM);
            }
            KeeperRequest::Kill => self.kill(),
            // Only the first agent sends a launch spec, and it has already done so.
            KeeperRequest::Terminate | KeeperRequest::Prepare(_) | KeeperRequest::Start(_) => {}
        }
    }

    fn handle_agent_loss(&mut self) {
        (self.agent, self.agent_process) = (None, None);
        match self.adoption_timeout {
            Some(wait) if self.is_leader_unreaped => {
                // An agent may be killed while it is suspended, and the next one needs an engine
                // that answers.
                self.suspension.end(own_id());
                // An agent that came and left without taking the engine over has not prolonged the
                // wait.
                self.adoption_deadline.get_or_insert_with(|| Instant::now() + wait);
            }
            _ => self.kill(),
        }
    }

    fn forward_output(&mut self, chunk: Bytes) {
        self.replay.push(&chunk);
        // An agent that has not taken the engine over yet gets this output with the replay when it
        // does.
        if let Some(agent) = self.agent.as_mut().filter(|_| self.adoption_deadline.is_none()) {
            agent.queue_output(&chunk);
        }
        if let Some(file) = &mut self.log_file {
            file.write(chunk);
        }
    }

    /// Reaps every process that has ended, adopted ones included, and returns whether any is left.
    ///
    /// Every living process has an ancestor here, so the result is certain. Reading `/proc` is not
    /// certain while processes are created and adopted.
    fn reap(&mut self) -> bool {
        loop {
            let (pid, status) = match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some(ended)) => ended,
                Ok(None) | Err(Errno::INTR) => return true,
                Err(_) => return false,
            };
            if pid != self.group || !self.is_leader_unreaped {
                continue;
            }
            self.is_leader_unreaped = false;
            let notice = match std::fs::read_to_string(exec_error_path(&self.directory)) {
                Ok(text) => KeeperNotice::StartFailed(text),
                Err(_) => KeeperNotice::Exited(status.as_raw()),
            };
            self.notify_agent(&notice);
            if self.agent.is_none() {
                self.kill();
            }
        }
    }

    fn kill(&mut self) {
        if self.killing.is_none() {
            self.leftovers.record_mappings(self.processes(), LEFTOVERS_TIMEOUT);
        }
        let now = Instant::now();
        self.killing.get_or_insert(KillProgress {
            since: now,
            next_attempt: now,
            pause: KILL_RETRY_DELAYS.0,
            next_report: now + STUCK_AFTER,
        });
    }

    /// Kills the remaining processes, and breaks when there are none.
    ///
    /// All of the engine's processes are descendants, even those that left their group or parent,
    /// because orphans come to this process.
    fn retry_kill(&mut self) -> ControlFlow<()> {
        if self.is_leader_unreaped {
            // Kill the whole group at once, so that no member can start another one meanwhile.
            let _ = kill_process_group(self.group, Signal::KILL);
        }
        let any = self.reap();
        let left = self.processes();
        for pid in left.iter().filter_map(|pid| Pid::from_raw(*pid)) {
            // A process that is already gone is fine.
            let _ = kill_process(pid, Signal::KILL);
        }
        let Some(killing) = &mut self.killing else { return ControlFlow::Continue(()) };
        let now = Instant::now();
        let stuck = now.saturating_duration_since(killing.since);
        if !any || (stuck >= MAX_KILL_WAIT && self.agent.is_none()) {
            return ControlFlow::Break(());
        }
        killing.next_attempt = now + killing.pause;
        killing.pause = (killing.pause * 2).min(KILL_RETRY_DELAYS.1);
        if now >= killing.next_report {
            killing.next_report = now + STUCK_AFTER;
            self.notify_agent(&KeeperNotice::Stuck(left));
        }
        ControlFlow::Continue(())
    }

    /// Processes of the engine, including those that left its group.
    fn processes(&self) -> Vec<i32> {
        table::descendants(own_id()).iter().map(|process| process.pid).collect()
    }

    /// Flushes the last lines to the disk and the last notices to the agent.
    async fn finish(mut self) {
        self.leftovers.remove();
        // Let go before the agent hears of the end. It would remove the files itself.
        if let Some(hold) = self.file_pool.take().filter(|_| self.agent.is_none()) {
            hold.remove_if_last();
        }
        let deadline = Instant::now() + OUTPUT_DRAIN_TIMEOUT;
        while let Some(output) = &mut self.output {
            let mut chunk = BytesMut::with_capacity(READ_CHUNK_BYTES);
            match timeout_at(deadline, output.read_buf(&mut chunk)).await {
                Ok(Ok(1..)) => self.forward_output(chunk.freeze()),
                _ => break,
            }
        }
        self.log_file = None;
        self.notify_agent(&KeeperNotice::Empty);
        if let Some(agent) = &mut self.agent {
            agent.flush(FLUSH_TIMEOUT).await;
        }
        // A disk that is slower than this loses the last lines, but does not delay the shutdown.
        let _ = timeout(FLUSH_TIMEOUT, &mut self.log_thread.written).await;
    }

    fn notify_agent(&mut self, notice: &KeeperNotice) {
        if let Some(agent) = &mut self.agent {
            agent.queue_notice(notice);
        }
    }
}

/// The engine's first process: the spare if there is one that can be used, else a new one.
fn first_process(order: &LaunchSpec, spare: Option<Spare>) -> io::Result<FirstProcess> {
    if let Some(Ok(first)) = spare.map(|spare| spare.start(order)) {
        return Ok(first);
    }
    let (record, output) = spawn(&order.process, Stdio::null())?;
    Ok(FirstProcess { record, output, printed: Bytes::new(), gate: None })
}

async fn accept_agent(listener: Option<&UnixListener>) -> io::Result<UnixStream> {
    let Some(listener) = listener else { return pending().await };
    let accepted = listener.accept().await;
    if accepted.is_err() {
        tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
    }
    accepted.map(|(stream, _)| stream)
}

async fn read_output(output: Option<&mut pipe::Receiver>, chunk: &mut BytesMut) -> io::Result<usize> {
    match output {
        Some(output) => output.read_buf(chunk).await,
        None => pending().await,
    }
}

/// Accepts an agent.
///
/// Others cannot reach the directory anyway; this check is for a directory whose permissions
/// somebody has opened.
fn check_agent(accepted: io::Result<UnixStream>) -> KeeperStep {
    let Ok(stream) = accepted else { return KeeperStep::Nothing };
    match stream.peer_cred() {
        Ok(peer) if peer.uid() == geteuid().as_raw() => {
            let process = AgentProcess::of_peer(&stream);
            KeeperStep::Connected(AgentConnection::of(stream), process)
        }
        _ => KeeperStep::Nothing,
    }
}

/// The agent's process, if it can be watched.
///
/// Otherwise the agent gets a warning; its end still shows on its connection.
fn watchable(process: io::Result<AgentProcess>, agent: &mut AgentConnection) -> Option<AgentProcess> {
    let warn = |error: &io::Error| {
        agent.queue_notice(&KeeperNotice::Warning(format!(
            "the engine's keeper cannot see its agent in /proc ({error}): while the agent is suspended, the engine goes on"
        )));
    };
    process.inspect_err(warn).ok()
}

fn own_id() -> i32 {
    getpid().as_raw_nonzero().get()
}
