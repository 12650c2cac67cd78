//! Protocol between agent and keeper: frames of a length, a kind and a body.
//!
//! Messages are JSON; the engine's output is unchanged.

use std::ffi::OsString;
use std::io;
use std::path::Path;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use crate::process::{ENGINE_OF, LeaderProcess};
use crate::vllm::CommandLine;

/// Protocol version.
///
/// It grows when an agent and a keeper of different builds would misunderstand each other; such a
/// keeper is ended, not adopted.
pub(crate) const PROTOCOL: u32 = 3;

/// Longest frame.
///
/// A launch spec with all its arguments has some kilobytes, a piece of output 16 KiB.
const MAX_FRAME_BYTES: usize = 4 * 1024 * 1024;

const MESSAGE_FRAME: u8 = 0;
const OUTPUT_FRAME: u8 = 1;

/// A process that a keeper creates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessSpec {
    /// Program that has the subcommand `keeper`, for the step before the engine.
    pub(crate) keeper: OsString,
    /// Words before the program: the runtime of a container; empty without one.
    pub(crate) container: Vec<OsString>,
    pub(crate) program: OsString,
    pub(crate) arguments: Vec<OsString>,
    pub(crate) set: Vec<(OsString, OsString)>,
    /// Variables that are not passed on unless `set` names them.
    pub(crate) unset: Vec<OsString>,
    /// The engine's directory, which exists.
    pub(crate) directory: OsString,
}

impl ProcessSpec {
    pub(crate) fn new(keeper: &Path, line: &CommandLine, directory: &Path) -> Self {
        Self {
            keeper: keeper.into(),
            container: line.container.clone(),
            program: line.program.clone().into(),
            arguments: line.arguments.clone(),
            set: line.set.iter().map(|(name, value)| ((*name).into(), value.clone())).collect(),
            unset: line.unset.iter().map(Into::into).collect(),
            directory: directory.into(),
        }
    }

    /// Gives the process a name of its own in its environment, which is that of no directory.
    pub(crate) fn mark(&mut self, number: u32) {
        self.directory.push(format!(".{number}"));
        for (_, value) in self.set.iter_mut().filter(|(name, _)| name == ENGINE_OF) {
            value.clone_from(&self.directory);
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LaunchSpec {
    pub(crate) process: ProcessSpec,
    /// A spare that becomes the engine forks the engine's other processes.
    pub(crate) forks: bool,
    pub(crate) log: OsString,
    /// How many seconds the engine lives on without an agent; `None` means that it ends with the
    /// agent.
    pub(crate) wait_seconds: Option<u64>,
    /// CPUs for the whole process tree; empty leaves the choice to the kernel.
    pub(crate) cpus: Vec<u32>,
    /// Folder of files with KV blocks, removed after an engine that has outlived its agent.
    pub(crate) file_pool: Option<OsString>,
    /// Record for the next agent.
    pub(crate) life: LifeRecord,
}

/// One life of an engine, recorded for the next agent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LifeRecord {
    pub(crate) node: String,
    pub(crate) index: u32,
    /// Identifies the command and how it is run, see `fingerprint`.
    pub(crate) fingerprint: String,
    pub(crate) epoch: u64,
    /// Number of lives so far, including this one.
    pub(crate) lives: u32,
    /// Time until the engine was ready; `None` while it is not.
    pub(crate) ready_in_ms: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum KeeperRequest {
    /// Create a spare for the engine that is to start later.
    Prepare(Box<ProcessSpec>),
    Start(Box<LaunchSpec>),
    /// This agent takes the running engine over.
    Adopt {
        /// Same meaning as in `LaunchSpec`, from now on.
        wait_seconds: Option<u64>,
    },
    /// The life's record has changed.
    Note(LifeRecord),
    Terminate,
    /// Kill every process, send `Empty`, and end.
    Kill,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum KeeperNotice {
    /// First notice of all.
    Hello {
        protocol: u32,
        /// Running engine, if there is one.
        running: Option<(LeaderProcess, LifeRecord)>,
    },
    /// The spare has imported everything, and waits.
    Prepared,
    /// The spare has ended, and the engine will start without it.
    SpareEnded(String),
    Started(LeaderProcess),
    StartFailed(String),
    /// Something differs from the request, but the engine runs all the same.
    Warning(String),
    /// Bytes of output that this agent does not get, because it read too slowly.
    Lost(usize),
    /// The first process has ended with this wait status.
    Exited(i32),
    /// These processes were killed but do not die.
    Stuck(Vec<i32>),
    Empty,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum KeeperFrame {
    Notice(KeeperNotice),
    Output(Bytes),
}

pub(crate) fn write_message(words: &impl Serialize, out: &mut BytesMut) {
    let body = serde_json::to_vec(words).expect("these types have no map with keys other than strings");
    write_frame(MESSAGE_FRAME, &body, out);
}

pub(crate) fn write_output(piece: &[u8], out: &mut BytesMut) {
    write_frame(OUTPUT_FRAME, piece, out);
}

fn write_frame(kind: u8, body: &[u8], out: &mut BytesMut) {
    let length = u32::try_from(body.len() + 1).expect("no body comes near 4 GiB");
    out.put_u32(length);
    out.put_u8(kind);
    out.put_slice(body);
}

/// Takes the next whole frame, if there is one, as a request.
pub(crate) fn parse_request(buffer: &mut BytesMut) -> io::Result<Option<KeeperRequest>> {
    match split_frame(buffer)? {
        Some((MESSAGE_FRAME, body)) => parse_message(&body).map(Some),
        Some(_) => Err(malformed("an agent prints nothing")),
        None => Ok(None),
    }
}

/// Takes the next whole frame, if there is one, as a keeper's frame.
pub(crate) fn parse_keeper_frame(buffer: &mut BytesMut) -> io::Result<Option<KeeperFrame>> {
    match split_frame(buffer)? {
        Some((MESSAGE_FRAME, body)) => parse_message(&body).map(|notice| Some(KeeperFrame::Notice(notice))),
        Some((OUTPUT_FRAME, body)) => Ok(Some(KeeperFrame::Output(body))),
        Some(_) => Err(malformed("a frame of an unknown kind")),
        None => Ok(None),
    }
}

fn split_frame(buffer: &mut BytesMut) -> io::Result<Option<(u8, Bytes)>> {
    let Some(head) = buffer.first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_be_bytes(*head) as usize;
    if length == 0 || length > MAX_FRAME_BYTES {
        return Err(malformed("a frame of an impossible length"));
    }
    if buffer.len() < 4 + length {
        return Ok(None);
    }
    buffer.advance(4);
    let mut frame = buffer.split_to(length).freeze();
    let kind = frame.get_u8();
    Ok(Some((kind, frame)))
}

fn parse_message<'a, T: Deserialize<'a>>(body: &'a [u8]) -> io::Result<T> {
    serde_json::from_slice(body).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests;
