//! Exit status of a process in which an engine computes.
//!
//! The process's parent is the engine's front-end, and only a parent is notified. But the kernel
//! shows the status of an ended process until its parent reaps it. A waiter for the end sees the
//! status then, unless the parent was faster. The supervisor uses it to tell a kill from a crash.

use std::fs;
use std::future::pending;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use futures_util::future::select_all;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::activity::ProcessSnapshot;

/// A process, and the descriptor that becomes readable when it ends.
#[derive(Debug)]
struct WatchedProcess {
    pid: i32,
    started: u64,
    end: AsyncFd<OwnedFd>,
}

/// Observed end of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProcessEnd {
    Lives,
    /// The process is gone, and so is its status.
    Unknown,
    Seen(ExitStatus),
}

/// The processes in which an engine computes, while none of them has ended.
#[derive(Debug)]
pub(crate) struct CoreWatch(Vec<WatchedProcess>);

impl CoreWatch {
    /// Begins to watch the engine of this group.
    ///
    /// Empty if it has no such process, or the kernel is older than Linux 5.3.
    pub(crate) async fn begin(leader: u32) -> Self {
        let cores = ProcessSnapshot::take(Some(leader)).await.cores();
        Self(cores.into_iter().filter_map(|(pid, started)| WatchedProcess::new(pid, started).ok()).collect())
    }

    /// Waits for the first process to end, and returns its status.
    ///
    /// `None` if its parent was faster. If several have ended together, one that was not killed says
    /// most. Never resolves if there is no process.
    pub(crate) async fn first_exit(self) -> Option<ExitStatus> {
        if self.0.is_empty() {
            return pending().await;
        }
        // Read the status of all, in case others have ended as well.
        let _ = select_all(self.0.iter().map(|process| Box::pin(process.end.readable()))).await;
        let mut killed = None;
        let mut is_unknown = false;
        for process in &self.0 {
            match process.read() {
                ProcessEnd::Lives => {}
                ProcessEnd::Unknown => is_unknown = true,
                ProcessEnd::Seen(status) if status.signal() == Some(Signal::KILL.as_raw()) => killed = Some(status),
                ProcessEnd::Seen(status) => return Some(status),
            }
        }
        killed.filter(|_| !is_unknown)
    }
}

impl WatchedProcess {
    fn new(pid: i32, started: u64) -> std::io::Result<Self> {
        let process = Pid::from_raw(pid).ok_or(std::io::ErrorKind::NotFound)?;
        let end = pidfd_open(process, PidfdFlags::empty())?;
        #[expect(deprecated, reason = "what replaces it is unsafe; an OwnedFd stays open while it is here")]
        let end = AsyncFd::with_interest(end, Interest::READABLE)?;
        Ok(Self { pid, started, end })
    }

    fn read(&self) -> ProcessEnd {
        let line = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        ProcessEnd::parse(&line, self.started)
    }
}

impl ProcessEnd {
    /// Parses a line of `/proc/PID/stat`.
    ///
    /// The kernel hides the status from those who may not trace the process, and a status of zero
    /// says no more than a hidden one.
    fn parse(line: &str, started: u64) -> Self {
        let fields: Vec<&str> = line.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let number = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok());
        if number(19) != Some(started) {
            return Self::Unknown;
        }
        let status = number(49).and_then(|status| i32::try_from(status).ok()).filter(|status| *status != 0);
        match fields.first() {
            Some(&("Z" | "X")) => status.map_or(Self::Unknown, |status| Self::Seen(ExitStatus::from_raw(status))),
            _ => Self::Lives,
        }
    }
}

#[cfg(test)]
mod tests;
