//! The keeper's own process: starts the engine, reads what it prints for as long as it lives, obeys the agent, and leaves only when no process of the engine is left.

use std::ffi::OsStr;
use std::future::pending;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, geteuid, getpid, kill_process, kill_process_group};
use rustix::thread::{CpuSet, sched_setaffinity};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{self, SignalKind};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::echo::Echo;
use super::file::{Output, Thread};
use super::peer::{Peer, Writer, requested, sent};
use super::wire::{Life, Notice, Order, PROTOCOL, Request};
use super::{failure_in, socket_in};
use crate::process::leftovers::Leftovers;
use crate::process::record::Record;
use crate::process::{KEEPER_OF, Leader, STUCK_AFTER, table};

/// How long the agent that started this keeper may take to say what is wanted.
const ORDER_DEADLINE: Duration = Duration::from_secs(10);

/// How long the rest of a dead engine's output may take to be read. A process that was let go to another parent may hold the pipe open; what it prints is nobody's.
const REST_DEADLINE: Duration = Duration::from_millis(500);

/// How long the last words may take to reach the agent and the last lines the disk.
const GOODBYE: Duration = Duration::from_secs(2);

/// Processes that do not die within this time of SIGKILL are in the kernel's hands; they die when it lets go of them. An agent that waits for
/// them is told so again and again instead: with the keeper's end it would take the engine's memory for free.
const LAST_HOPE: Duration = Duration::from_secs(5 * 60);

/// Pauses between two looks at a group that was killed.
const KILL_PAUSES: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(100));

/// How long a kill waits for a look at what the engine has in shared memory: milliseconds as a rule, for ever while a driver holds a process.
const LOOK_DEADLINE: Duration = Duration::from_millis(100);

/// Between two tries to take a connection, when there are no file descriptors for it.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Bytes read from the engine at once.
const CHUNK: usize = 16 * 1024;

/// One engine's keeper.
#[derive(Debug)]
struct Guard {
    agent: Option<Peer>,
    /// For the next agent; `None` where the engine ends with this one.
    listener: Option<UnixListener>,
    /// How long the engine lives without an agent.
    wait: Option<Duration>,
    /// When that time is over; `None` while an agent has it.
    abandoned_until: Option<Instant>,
    life: Life,
    leader: Leader,
    group: Pid,
    /// The first process was not reaped yet.
    leads: bool,
    output: Option<pipe::Receiver>,
    echo: Echo,
    file: Option<Output>,
    thread: Thread,
    killing: Option<Killing>,
    leftovers: Leftovers,
    directory: PathBuf,
}

/// The end of the engine under way.
#[derive(Debug)]
struct Killing {
    since: Instant,
    next: Instant,
    pause: Duration,
    /// When the agent is told next what is left.
    tell: Instant,
}

/// What happens to a keeper.
enum Step {
    Requested(io::Result<Option<Request>>),
    Sent(io::Result<()>),
    Connected(Peer),
    Printed(BytesMut),
    Complained(String),
    ChildEnded,
    Signalled,
    Tick,
    Nothing,
}

/// Keeps one engine, for the agent at the other end of `agent`. Returns when nothing is left of the engine.
pub(super) async fn keep(agent: std::os::unix::net::UnixStream) -> io::Result<()> {
    let mut agent = Peer::new(agent)?;
    agent.say(&Notice::Hello { protocol: PROTOCOL, running: None });
    let order = match timeout(ORDER_DEADLINE, agent.order()).await {
        Ok(Ok(order)) => order,
        Ok(Err(error)) => return Err(error),
        Err(_) => return Err(io::Error::new(io::ErrorKind::TimedOut, "no order came")),
    };
    // Before the engine is there: the exit of a process that nobody listens for would be missed. Handlers do not pass on to the engine.
    let mut children = unix::signal(SignalKind::child())?;
    let mut signals = [unix::signal(SignalKind::terminate())?, unix::signal(SignalKind::interrupt())?, unix::signal(SignalKind::hangup())?];
    let mut guard = match Guard::start(agent, &order) {
        Ok(guard) => guard,
        Err((mut agent, text)) => {
            agent.say(&Notice::StartFailed(text));
            agent.say(&Notice::Empty);
            agent.flush(GOODBYE).await;
            return Ok(());
        }
    };
    loop {
        let step = guard.next(&mut children, &mut signals).await;
        if guard.take(step).is_break() {
            break;
        }
    }
    guard.leave().await;
    Ok(())
}

impl Guard {
    fn start(mut agent: Peer, order: &Order) -> Result<Self, (Peer, String)> {
        if let Err(error) = bind(&order.cpus) {
            agent.say(&Notice::Warning(format!("the engine cannot be bound to CPUs {:?}: {error}; it runs on all", order.cpus)));
        }
        let directory = Path::new(&order.directory);
        let leftovers = Leftovers::new();
        let wait = order.wait_seconds.map(Duration::from_secs);
        let made = || {
            let listener = wait.map(|_| UnixListener::bind(socket_in(directory))).transpose()?;
            let (mut file, thread) = Output::open(Path::new(&order.log).to_owned())?;
            file.write(Bytes::from(format!("hostler: life {} of this engine begins\n", order.life.epoch)));
            let (leader, output) = spawn(order)?;
            Ok((listener, file, thread, leader, output))
        };
        let (listener, file, thread, leader, output) = match made() {
            Ok(made) => made,
            Err(error) => {
                let error: io::Error = error;
                return Err((agent, cannot_start(&order.program, &error)));
            }
        };
        agent.say(&Notice::Started(leader));
        Ok(Self {
            agent: Some(agent),
            listener,
            wait,
            abandoned_until: None,
            life: order.life.clone(),
            leader,
            group: Pid::from_raw(leader.pid).expect("a process that was just made has an id"),
            leads: true,
            output: Some(output),
            echo: Echo::default(),
            file: Some(file),
            thread,
            killing: None,
            leftovers,
            directory: directory.to_owned(),
        })
    }

    async fn next(&mut self, children: &mut unix::Signal, signals: &mut [unix::Signal; 3]) -> Step {
        let [terminate, interrupt, hang_up] = signals;
        let wake_at = self.killing.as_ref().map(|killing| killing.next).or(self.abandoned_until);
        let accepts = self.agent.is_none() && self.killing.is_none();
        let listener = self.listener.as_ref().filter(|_| accepts);
        let (reader, writer) = self.agent.as_mut().map(Peer::halves).unzip();
        let writer = writer.filter(Writer::has_work);
        let mut chunk = BytesMut::with_capacity(CHUNK);
        tokio::select! {
            biased;
            _ = children.recv() => Step::ChildEnded,
            request = requested(reader) => Step::Requested(request),
            _ = terminate.recv() => Step::Signalled,
            _ = interrupt.recv() => Step::Signalled,
            _ = hang_up.recv() => Step::Signalled,
            () = sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => Step::Tick,
            sent = sent(writer) => Step::Sent(sent),
            Some(complaint) = self.thread.complaints.recv() => Step::Complained(complaint),
            stream = accepted(listener) => connected(stream),
            read = printed(self.output.as_mut(), &mut chunk) => match read {
                Ok(1..) => Step::Printed(chunk),
                _ => {
                    self.output = None;
                    Step::Nothing
                }
            },
        }
    }

    fn take(&mut self, step: Step) -> ControlFlow<()> {
        match step {
            Step::Requested(Ok(Some(request))) => self.obey(request),
            Step::Requested(Ok(None) | Err(_)) | Step::Sent(Err(_)) => self.lose_agent(),
            Step::Connected(mut peer) => {
                peer.say(&Notice::Hello { protocol: PROTOCOL, running: Some((self.leader, self.life.clone())) });
                self.agent = Some(peer);
            }
            Step::Printed(chunk) => self.pass_on(chunk.freeze()),
            Step::Complained(text) => self.say(&Notice::Warning(text)),
            Step::ChildEnded => {
                self.reap();
            }
            // As long as an agent is there it decides: a batch system's signal to everybody must not cut short what the agent drains.
            Step::Signalled if self.agent.is_none() => self.kill(),
            Step::Tick if self.killing.is_none() => self.kill(),
            Step::Sent(Ok(())) | Step::Signalled | Step::Tick | Step::Nothing => {}
        }
        if self.killing.is_some() { self.kill_again() } else { ControlFlow::Continue(()) }
    }

    fn obey(&mut self, request: Request) {
        match request {
            Request::Adopt => {
                self.abandoned_until = None;
                for piece in self.echo.pieces().iter().flat_map(|piece| piece.chunks(CHUNK)) {
                    if let Some(agent) = &mut self.agent {
                        agent.print(piece);
                    }
                }
            }
            Request::Note(life) => {
                self.life = life;
                // It is ready now; later, all of it may be killed at once.
                self.leftovers.look(self.processes(), Duration::ZERO);
            }
            Request::Terminate if self.leads => {
                // If it has just ended, its exit is about to be seen.
                let _ = kill_process(self.group, Signal::TERM);
            }
            Request::Kill => self.kill(),
            // Only the first agent gives an order, and it has.
            Request::Terminate | Request::Start(_) => {}
        }
    }

    fn lose_agent(&mut self) {
        self.agent = None;
        match self.wait {
            Some(wait) if self.leads => {
                // An agent that came and left without taking the engine over has not prolonged its life.
                self.abandoned_until.get_or_insert_with(|| Instant::now() + wait);
            }
            _ => self.kill(),
        }
    }

    fn pass_on(&mut self, chunk: Bytes) {
        self.echo.take(&chunk);
        // An agent that has not taken the engine over yet gets this with all the rest when it does.
        if let Some(agent) = self.agent.as_mut().filter(|_| self.abandoned_until.is_none()) {
            agent.print(&chunk);
        }
        if let Some(file) = &mut self.file {
            file.write(chunk);
        }
    }

    /// Collects every process that has ended, adopted ones included. Returns whether any is left: whoever lives has an ancestor here, so this is
    /// certain, which a look at `/proc` is not while processes are made and adopted.
    fn reap(&mut self) -> bool {
        loop {
            let (pid, status) = match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some(ended)) => ended,
                Ok(None) | Err(Errno::INTR) => return true,
                Err(_) => return false,
            };
            if pid != self.group || !self.leads {
                continue;
            }
            self.leads = false;
            let notice = match std::fs::read_to_string(failure_in(&self.directory)) {
                Ok(text) => Notice::StartFailed(text),
                Err(_) => Notice::Exited(status.as_raw()),
            };
            self.say(&notice);
            if self.agent.is_none() {
                self.kill();
            }
        }
    }

    fn kill(&mut self) {
        if self.killing.is_none() {
            self.leftovers.look(self.processes(), LOOK_DEADLINE);
        }
        let now = Instant::now();
        self.killing.get_or_insert(Killing { since: now, next: now, pause: KILL_PAUSES.0, tell: now + STUCK_AFTER });
    }

    /// Kills what is left; done when nothing is. All of the engine's processes are descendants, also those that left its group or their parent: orphans come to this process.
    fn kill_again(&mut self) -> ControlFlow<()> {
        if self.leads {
            // At once, so that no member can make another one meanwhile.
            let _ = kill_process_group(self.group, Signal::KILL);
        }
        let any = self.reap();
        let left = self.processes();
        for pid in left.iter().filter_map(|pid| Pid::from_raw(*pid)) {
            // One that is gone is what was wanted.
            let _ = kill_process(pid, Signal::KILL);
        }
        let Some(killing) = &mut self.killing else { return ControlFlow::Continue(()) };
        let now = Instant::now();
        let stuck = now.saturating_duration_since(killing.since);
        if !any || (stuck >= LAST_HOPE && self.agent.is_none()) {
            return ControlFlow::Break(());
        }
        killing.next = now + killing.pause;
        killing.pause = (killing.pause * 2).min(KILL_PAUSES.1);
        if now >= killing.tell {
            killing.tell = now + STUCK_AFTER;
            self.say(&Notice::Stuck(left));
        }
        ControlFlow::Continue(())
    }

    /// The engine's processes, those that left its group among them.
    fn processes(&self) -> Vec<i32> {
        table::descendants(getpid().as_raw_nonzero().get())
    }

    /// The last lines and the last word.
    async fn leave(mut self) {
        self.leftovers.remove();
        let deadline = Instant::now() + REST_DEADLINE;
        while let Some(output) = &mut self.output {
            let mut chunk = BytesMut::with_capacity(CHUNK);
            match timeout_at(deadline, output.read_buf(&mut chunk)).await {
                Ok(Ok(1..)) => self.pass_on(chunk.freeze()),
                _ => break,
            }
        }
        self.file = None;
        self.say(&Notice::Empty);
        if let Some(agent) = &mut self.agent {
            agent.flush(GOODBYE).await;
        }
        // A disk that is slower than this loses the last lines, not the shutdown.
        let _ = timeout(GOODBYE, &mut self.thread.written).await;
    }

    fn say(&mut self, notice: &Notice) {
        if let Some(agent) = &mut self.agent {
            agent.say(notice);
        }
    }
}

async fn accepted(listener: Option<&UnixListener>) -> io::Result<UnixStream> {
    let Some(listener) = listener else { return pending().await };
    let accepted = listener.accept().await;
    if accepted.is_err() {
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
    accepted.map(|(stream, _)| stream)
}

async fn printed(output: Option<&mut pipe::Receiver>, chunk: &mut BytesMut) -> io::Result<usize> {
    match output {
        Some(output) => output.read_buf(chunk).await,
        None => pending().await,
    }
}

/// An agent that connects. Its directory is closed to others already; this is for a directory that somebody has opened.
fn connected(accepted: io::Result<UnixStream>) -> Step {
    let Ok(stream) = accepted else { return Step::Nothing };
    match stream.peer_cred() {
        Ok(peer) if peer.uid() == geteuid().as_raw() => Step::Connected(Peer::of(stream)),
        _ => Step::Nothing,
    }
}

/// Restricts this process, and with it all that it starts, to these CPUs. The memory of each process then comes from the nearest node by
/// itself, because Linux takes it where it is first touched; there is no safe way to set a memory policy, nor a need.
fn bind(cpus: &[u32]) -> io::Result<()> {
    if cpus.is_empty() {
        return Ok(());
    }
    let mut set = CpuSet::new();
    for cpu in cpus.iter().map(|cpu| *cpu as usize).filter(|cpu| *cpu < CpuSet::MAX_CPU) {
        set.set(cpu);
    }
    Ok(sched_setaffinity(None, &set)?)
}

/// Creates the engine through `exec`, with a group of its own but in the agent's session: a batch system's clean-up must still reach it.
fn spawn(order: &Order) -> io::Result<(Leader, pipe::Receiver)> {
    let (reader, writer) = io::pipe()?;
    let mut command = std::process::Command::new(&order.keeper);
    command.args([OsStr::new("keeper"), OsStr::new("exec"), OsStr::new(&std::process::id().to_string())]);
    command.args([&order.directory, &order.program]).args(&order.arguments);
    for name in &order.unset {
        command.env_remove(name);
    }
    command.env_remove(KEEPER_OF).env_remove(super::THRIFT.0).envs(order.set.iter().map(|(name, value)| (name, value)));
    // Also takes signals back to their defaults, except those that the agent was started to ignore.
    let child = command.process_group(0).stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer).spawn()?;
    // Our copies of the writing end live in the command; with them gone, the pipe ends when the engine does.
    drop(command);
    // Our child, and not yet reaped, so it is there even if it has ended.
    let record = Record::of(child.id().cast_signed())?;
    record.write(Path::new(&order.directory))?;
    Ok((record.leader(), pipe::Receiver::from_owned_fd(reader.into())?))
}

pub(super) fn cannot_start(program: &OsStr, error: &io::Error) -> String {
    format!("cannot start {}: {error}", program.display())
}
