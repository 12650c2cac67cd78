//! A spare: a process that has imported vLLM and waits at a gate, to become an engine when one is
//! to start.
//!
//! The gate is a socket, the spare's standard input. A byte comes from the spare once it has
//! imported everything. An order goes to it, in fields that each end with a zero byte:
//! `vllm/warm_start/hostler_start.py` reads it.

use std::future::pending;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream as StdStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};

use bytes::{Bytes, BytesMut};
use rustix::process::{Pid, Signal, WaitOptions, kill_process_group, waitpid};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::net::unix::pipe;

use super::exec_error_path;
use super::launch::{bind_to_cpus, spawn};
use super::wire::{LaunchSpec, ProcessSpec};
use crate::process::record::ProcessRecord;

/// Bytes of a waiting spare's output that are kept for the engine's log; imports print some lines.
const MAX_PRINTED_BYTES: usize = 64 * 1024;

#[derive(Debug)]
pub(super) struct Spare {
    record: ProcessRecord,
    directory: PathBuf,
    gate: UnixStream,
    output: pipe::Receiver,
    printed: BytesMut,
    has_imported: bool,
}

/// The first process of an engine.
pub(super) struct FirstProcess {
    pub(super) record: ProcessRecord,
    pub(super) output: pipe::Receiver,
    /// Output from before it became an engine.
    pub(super) printed: Bytes,
    /// Socket at which it has waited, if it was a spare.
    pub(super) gate: Option<StdStream>,
}

impl Spare {
    pub(super) fn spawn(spec: &ProcessSpec) -> io::Result<Self> {
        let (gate, theirs) = StdStream::pair()?;
        gate.set_nonblocking(true)?;
        let (record, output) = spawn(spec, Stdio::from(OwnedFd::from(theirs)))?;
        let directory = PathBuf::from(&spec.directory);
        Ok(Self { record, directory, gate: UnixStream::from_std(gate)?, output, printed: BytesMut::new(), has_imported: false })
    }

    /// Reads what the spare prints, until it has imported everything. Loses nothing when dropped.
    pub(super) async fn imported(spare: Option<&mut Self>) {
        let Some(spare) = spare else { return pending().await };
        loop {
            spare.printed.truncate(MAX_PRINTED_BYTES);
            let mut signal = [0; 1];
            tokio::select! {
                Ok(1..) = spare.output.read_buf(&mut spare.printed) => {}
                Ok(1..) = spare.gate.read(&mut signal), if !spare.has_imported => {
                    spare.has_imported = true;
                    return;
                }
                // Its end is about to be seen.
                else => pending().await,
            }
        }
    }

    /// Why the spare has ended; `None` while it lives.
    pub(super) fn end(&self) -> Option<String> {
        let (_, status) = waitpid(Some(self.group()), WaitOptions::NOHANG).ok()??;
        let refusal = std::fs::read_to_string(exec_error_path(&self.directory));
        Some(refusal.unwrap_or_else(|_| ExitStatus::from_raw(status.as_raw()).to_string()))
    }

    /// Makes the spare the engine, on its CPUs.
    ///
    /// If that fails, it is killed, and nothing of it remains.
    pub(super) fn start(self, order: &LaunchSpec) -> io::Result<FirstProcess> {
        let group = self.group();
        let tasks = std::fs::read_dir(format!("/proc/{}/task", group.as_raw_nonzero()))?;
        let threads = tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok());
        for thread in threads.filter_map(Pid::from_raw) {
            // The keeper has warned of CPUs that cannot be used.
            let _ = bind_to_cpus(Some(thread), &order.cpus);
        }
        let (order, gate) = (encode(order), self.gate.into_std()?);
        match (&gate).write(&order) {
            // Closing would discard what the spare reads next, if it has written meanwhile.
            Ok(length) if length == order.len() => gate.shutdown(Shutdown::Write)?,
            partly => {
                let _ = kill_process_group(group, Signal::KILL);
                return Err(partly.err().unwrap_or_else(|| io::ErrorKind::WriteZero.into()));
            }
        }
        Ok(FirstProcess {
            record: self.record.begun_in(self.directory),
            output: self.output,
            printed: self.printed.freeze(),
            gate: Some(gate),
        })
    }

    fn group(&self) -> Pid {
        Pid::from_raw(self.record.leader().pid).expect("a process that was just made has an id")
    }
}

/// Fields of the order: whether to fork, the number of words of the command, these words, and each
/// variable as `NAME=VALUE`.
fn encode(order: &LaunchSpec) -> Vec<u8> {
    let LaunchSpec { process, forks, .. } = order;
    let words = std::iter::once(&process.program).chain(&process.arguments);
    let mut out = Vec::new();
    let mut field = |parts: &[&[u8]]| {
        parts.iter().for_each(|part| out.extend_from_slice(part));
        out.push(0);
    };
    field(&[if *forks { b"1" } else { b"0" }]);
    field(&[(1 + process.arguments.len()).to_string().as_bytes()]);
    words.for_each(|word| field(&[word.as_bytes()]));
    process.set.iter().for_each(|(name, value)| field(&[name.as_bytes(), b"=", value.as_bytes()]));
    out
}
