//! The agent's end of the connection to a keeper: starts a keeper, finds one that a dead agent
//! left, sends it requests and reads its notices.

use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::process::Command;

use super::wire::{self, KeeperFrame, KeeperNotice, KeeperRequest, LaunchSpec, LifeRecord, PROTOCOL, ProcessSpec};
use super::{ALLOCATOR_SETTING, AgentDeathPolicy, KeeperSource, fingerprint, socket_path};
use crate::process::orphans::end_orphans;
use crate::process::record::ProcessRecord;
use crate::process::{KEEPER_OF, LeaderProcess};
use crate::vllm::directory::socket_path as engine_socket_in;
use crate::vllm::{CommandLine, VllmVersion};

/// Time limit for a keeper to identify itself. It does nothing else that takes time.
const HELLO_TIMEOUT: Duration = Duration::from_secs(1);

/// Time limit for sending the launch spec, which fits into the socket's buffer.
const LAUNCH_SPEC_TIMEOUT: Duration = Duration::from_secs(5);

/// Bytes read from a keeper at once.
const READ_CHUNK_BYTES: usize = 64 * 1024;

/// Sends requests to a keeper, from anywhere and without waiting.
///
/// Once the last clone and the `KeeperNotices` are gone, the keeper considers its agent dead.
#[derive(Debug, Clone)]
pub(crate) struct KeeperClient {
    stream: Arc<StdStream>,
    keeper: Option<Pid>,
}

#[derive(Debug)]
pub(crate) struct KeeperNotices {
    stream: UnixStream,
    input: BytesMut,
}

impl KeeperClient {
    /// Sends a request.
    ///
    /// Requests are few and short. The socket's buffer holds thousands, so it fills up only if the
    /// keeper does not run.
    pub(crate) fn send(&self, request: &KeeperRequest) {
        let mut out = BytesMut::new();
        wire::write_message(request, &mut out);
        if let Err(error) = (&*self.stream).write_all(&out) {
            tracing::debug!(%error, "an engine's keeper does not listen");
        }
    }

    /// Kills the keeper itself, which takes the engine's first process with it.
    pub(crate) fn end_keeper(&self) {
        if let Some(keeper) = self.keeper {
            let _ = kill_process(keeper, Signal::KILL);
        }
    }
}

impl KeeperNotices {
    /// Next frame from the keeper; `None` once the keeper is gone.
    ///
    /// Cancel safe: dropping it loses nothing.
    pub(crate) async fn next(&mut self) -> io::Result<Option<KeeperFrame>> {
        loop {
            if let Some(frame) = wire::parse_keeper_frame(&mut self.input)? {
                return Ok(Some(frame));
            }
            self.input.reserve(READ_CHUNK_BYTES);
            if self.stream.read_buf(&mut self.input).await? == 0 {
                return Ok(None);
            }
        }
    }
}

fn connect(stream: StdStream, input: BytesMut, keeper: Option<Pid>) -> io::Result<(KeeperClient, KeeperNotices)> {
    stream.set_nonblocking(true)?;
    let reader = UnixStream::from_std(stream.try_clone()?)?;
    Ok((KeeperClient { stream: Arc::new(stream), keeper }, KeeperNotices { stream: reader, input }))
}

/// Starts a keeper, and makes it start the engine.
pub(crate) fn start(source: &KeeperSource, order: LaunchSpec) -> io::Result<(KeeperClient, KeeperNotices)> {
    #[cfg(feature = "engines-in-process")]
    if let KeeperSource::InProcess(engines) = source {
        let (ours, theirs) = StdStream::pair()?;
        engines.start(theirs, order)?;
        return connect(ours, BytesMut::new(), None);
    }
    let (stream, keeper) = spawn_keeper(source, &order.process.directory)?;
    write_request(&stream, &KeeperRequest::Start(Box::new(order)))?;
    connect(stream, BytesMut::new(), keeper)
}

/// A keeper that waits with a spare for the engine that it will keep.
#[derive(Debug)]
pub(crate) struct PreparedKeeper {
    stream: StdStream,
    keeper: Option<Pid>,
    input: BytesMut,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SpareState {
    Importing,
    Waiting,
    /// The spare is of no use any more, for this reason.
    Ended(String),
}

/// Starts a keeper, and makes it create a spare.
pub(crate) fn prepare(source: &KeeperSource, process: ProcessSpec) -> io::Result<PreparedKeeper> {
    let (stream, keeper) = spawn_keeper(source, &process.directory)?;
    write_request(&stream, &KeeperRequest::Prepare(Box::new(process)))?;
    Ok(PreparedKeeper { stream, keeper, input: BytesMut::new() })
}

impl PreparedKeeper {
    /// Reads the keeper's notices so far, without waiting: what has become of a spare that was in
    /// this state.
    pub(crate) fn state(&mut self, mut state: SpareState) -> SpareState {
        let mut chunk = [0; 4096];
        loop {
            match wire::parse_keeper_frame(&mut self.input) {
                Ok(Some(KeeperFrame::Notice(KeeperNotice::Prepared))) => state = SpareState::Waiting,
                Ok(Some(KeeperFrame::Notice(KeeperNotice::SpareEnded(cause)))) => return SpareState::Ended(cause),
                Ok(Some(_)) => {}
                Ok(None) => match recv(&self.stream, &mut chunk[..], RecvFlags::DONTWAIT) {
                    Ok((_, 0)) => return SpareState::Ended("its keeper is gone".to_owned()),
                    Ok((_, length)) => self.input.extend_from_slice(&chunk[..length]),
                    Err(Errno::AGAIN | Errno::INTR) => return state,
                    Err(error) => return SpareState::Ended(error.to_string()),
                },
                Err(error) => return SpareState::Ended(error.to_string()),
            }
        }
    }

    /// Makes the spare the engine.
    pub(crate) fn start(self, order: LaunchSpec) -> io::Result<(KeeperClient, KeeperNotices)> {
        write_request(&self.stream, &KeeperRequest::Start(Box::new(order)))?;
        connect(self.stream, self.input, self.keeper)
    }
}

/// Starts a keeper for an engine in this directory.
fn spawn_keeper(source: &KeeperSource, directory: &OsStr) -> io::Result<(StdStream, Option<Pid>)> {
    let (ours, theirs) = StdStream::pair()?;
    ours.set_write_timeout(Some(LAUNCH_SPEC_TIMEOUT))?;
    let mut command = Command::new(source.program());
    command.arg("keeper").env(KEEPER_OF, directory).env(ALLOCATOR_SETTING.0, ALLOCATOR_SETTING.1);
    // The keeper leaves this session by itself, which the leader of a process group could not.
    command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn()?;
    // Dropping the command drops the agent's copy of the keeper's end. The runtime reaps the child
    // whenever it ends.
    drop(command);
    Ok((ours, child.id().and_then(|id| Pid::from_raw(id.cast_signed()))))
}

/// Writes a request to a keeper that has just been started or waits for one.
fn write_request(mut stream: &StdStream, request: &KeeperRequest) -> io::Result<()> {
    let mut out = BytesMut::new();
    wire::write_message(request, &mut out);
    stream.write_all(&out)
}

/// An engine whose agent has died and whose keeper waits for the next one.
#[derive(Debug)]
pub(crate) struct SurvivingEngine {
    /// Directory of the engine, which stays where it is.
    pub(crate) directory: PathBuf,
    pub(crate) leader: LeaderProcess,
    /// The dead agent's record about the engine.
    pub(crate) life_record: LifeRecord,
    stream: StdStream,
    input: BytesMut,
    keeper: Option<Pid>,
}

/// Why an engine cannot be taken over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AdoptionError {
    /// No keeper answers for the engine.
    #[error("it has no keeper that answers: {0}")]
    NoKeeper(String),
    /// The engine belongs to another node.
    #[error("it belongs to node {0}")]
    OtherNode(String),
    /// The keeper answers, but the engine's processes cannot be seen from here.
    #[error("it lives in another container")]
    OtherPidNamespace,
    /// The keeper is of another build.
    #[error("its keeper speaks protocol {0}, and this agent {PROTOCOL}")]
    OtherProtocol(u32),
    /// Keeper, record and kernel do not agree.
    #[error("its first process is not the one that was recorded")]
    OtherProcess,
    /// The engine was ready, but nothing listens on its socket now.
    #[error("nobody listens at its socket")]
    NoSocket,
}

impl SurvivingEngine {
    /// Finds the keeper in an engine's directory.
    ///
    /// The keeper is believed only if it belongs to this node, and the record in the directory, the
    /// kernel and the engine's socket agree. Blocks for a second at most.
    pub(crate) fn find(directory: &Path, node: &str) -> Result<Self, AdoptionError> {
        let no_keeper = |error: io::Error| AdoptionError::NoKeeper(error.to_string());
        let stream = StdStream::connect(socket_path(directory)).map_err(no_keeper)?;
        stream.set_read_timeout(Some(HELLO_TIMEOUT)).map_err(no_keeper)?;
        let mut input = BytesMut::new();
        let (leader, life) = match read_hello(&stream, &mut input).map_err(no_keeper)? {
            // Check this first: an engine that cannot be verified is ended, but only by its own
            // node.
            (_, Some((_, life))) if life.node != node => return Err(AdoptionError::OtherNode(life.node)),
            (PROTOCOL, Some(running)) => running,
            (PROTOCOL, None) => return Err(AdoptionError::NoKeeper("it keeps no engine".to_owned())),
            (other, _) => return Err(AdoptionError::OtherProtocol(other)),
        };
        match ProcessRecord::read(directory) {
            Some(record) if record.is_foreign() => return Err(AdoptionError::OtherPidNamespace),
            Some(record) if record.is_of(leader) => {}
            _ => return Err(AdoptionError::OtherProcess),
        }
        if life.ready_in_ms.is_some() && StdStream::connect(engine_socket_in(directory)).is_err() {
            return Err(AdoptionError::NoSocket);
        }
        let keeper = rustix::net::sockopt::socket_peercred(&stream).ok().map(|peer| peer.pid);
        Ok(Self { directory: directory.to_owned(), leader, life_record: life, stream, input, keeper })
    }

    /// Whether the engine is the one that this agent would start.
    ///
    /// `Some(true)` means with the second command line.
    pub(crate) fn matches_command(
        &self,
        command: &CommandLine,
        fallback: Option<&CommandLine>,
        version: Option<VllmVersion>,
    ) -> Option<bool> {
        let is = |line: &CommandLine| fingerprint(line, version) == self.life_record.fingerprint;
        if is(command) {
            return Some(false);
        }
        fallback.is_some_and(is).then_some(true)
    }

    /// Takes the engine over.
    ///
    /// `fate` decides what happens when this agent dies, whatever the previous agent chose.
    pub(crate) fn adopt(self, fate: AgentDeathPolicy) -> io::Result<(KeeperClient, KeeperNotices)> {
        let (link, notices) = connect(self.stream, self.input, self.keeper)?;
        link.send(&KeeperRequest::Adopt { wait_seconds: fate.wait_seconds() });
        Ok((link, notices))
    }

    /// Ends the engine. Like `end_orphans`, blocks until none of its processes lives.
    pub(crate) fn end(self) -> Result<usize, Vec<i32>> {
        end_orphans(&self.directory)
    }
}

/// Reads the keeper's first message: its protocol, and the engine it keeps.
fn read_hello(mut stream: &StdStream, input: &mut BytesMut) -> io::Result<(u32, Option<(LeaderProcess, LifeRecord)>)> {
    let mut chunk = [0; 4096];
    loop {
        match wire::parse_keeper_frame(input)? {
            Some(KeeperFrame::Notice(KeeperNotice::Hello { protocol, running })) => return Ok((protocol, running)),
            Some(_) => return Err(io::ErrorKind::InvalidData.into()),
            None => {}
        }
        match stream.read(&mut chunk)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            length => input.extend_from_slice(&chunk[..length]),
        }
    }
}
