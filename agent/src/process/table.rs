//! Process data from Linux's `/proc`: group, session, state, start time.
//!
//! Used to see whether an engine's processes are really gone and to recognise an engine whose agent
//! died.

use std::io::Read;
use std::{fs, process};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessStat {
    pub(crate) pid: i32,
    pub(crate) parent: i32,
    pub(crate) group: i32,
    pub(crate) session: i32,
    /// Start time in clock ticks since boot.
    ///
    /// Together with the id it identifies one process for as long as the machine is up.
    pub(crate) started: u64,
    /// The process has ended and waits to be reaped.
    ///
    /// If nothing reaps orphans, as in some containers, it stays so forever.
    pub(crate) is_zombie: bool,
    /// A signal has stopped the process (state T).
    ///
    /// A stop by a debugger or strace (state t) does not count, because it lasts only for the
    /// moment of each system call.
    pub(crate) is_stopped: bool,
}

impl ProcessStat {
    pub(crate) fn read(pid: i32) -> Option<Self> {
        Self::parse(pid, &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    pub(crate) fn all() -> Vec<Self> {
        let Ok(entries) = fs::read_dir("/proc") else {
            return Vec::new();
        };
        entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).filter_map(Self::read).collect()
    }

    /// Parses a line of `/proc/PID/stat`.
    ///
    /// The name in parentheses may contain anything, so fields count from the last parenthesis.
    pub(crate) fn parse(pid: i32, line: &str) -> Option<Self> {
        let fields: Vec<&str> = line[line.rfind(')')? + 1..].split_whitespace().collect();
        let state = *fields.first()?;
        let threads: u32 = fields.get(17)?.parse().ok()?;
        Some(Self {
            pid,
            parent: fields.get(1)?.parse().ok()?,
            group: fields.get(2)?.parse().ok()?,
            session: fields.get(3)?.parse().ok()?,
            started: fields.get(19)?.parse().ok()?,
            // A first thread that ended while others live looks the same except for the count.
            is_zombie: matches!(state, "Z" | "X") && threads <= 1,
            is_stopped: state == "T",
        })
    }

    /// Whether the process was started with this environment entry, `NAME=value`. A process that
    /// rewrote its title may have overwritten it.
    pub(crate) fn has_environment(&self, entry: &str) -> bool {
        let mut environment = Vec::new();
        let read = fs::File::open(format!("/proc/{}/environ", self.pid)).and_then(|file| file.take(1 << 20).read_to_end(&mut environment));
        read.is_ok() && environment.split(|byte| *byte == 0).any(|found| found == entry.as_bytes())
    }
}

/// When a process began, in clock ticks since boot; `None` if there is none of this number. With
/// the number it names one process for as long as the machine is up.
#[must_use]
pub fn process_start(pid: i32) -> Option<u64> {
    Some(ProcessStat::read(pid)?.started)
}

/// The session of this process, 0 if its leader is outside this container.
///
/// `rustix::process::getsid` takes that 0 for impossible and panics.
pub(crate) fn own_session() -> Option<i32> {
    Some(ProcessStat::read(process::id().cast_signed())?.session)
}

/// Living processes of a session.
pub(crate) fn session(session: i32) -> Vec<ProcessStat> {
    let mut processes = ProcessStat::all();
    processes.retain(|process| process.session == session && !process.is_zombie);
    processes
}

/// Living processes of a group, and all descendants of its leader.
pub(crate) fn tree(leader: i32) -> Vec<ProcessStat> {
    let mut processes = ProcessStat::all();
    let family = with_descendants(leader, &processes);
    processes.retain(|process| !process.is_zombie && (process.group == leader || family.contains(&process.pid)));
    processes
}

/// Living descendants of this process.
pub(crate) fn descendants(of: i32) -> Vec<ProcessStat> {
    let mut processes = ProcessStat::all();
    let family = with_descendants(of, &processes);
    processes.retain(|process| process.pid != of && !process.is_zombie && family.contains(&process.pid));
    processes
}

/// Ids of a process and its descendants among these.
fn with_descendants(of: i32, processes: &[ProcessStat]) -> Vec<i32> {
    let mut family = vec![of];
    // A child may have a smaller id than its parent, because ids wrap around. So each generation
    // needs a pass.
    loop {
        let before = family.len();
        for process in processes {
            if family.contains(&process.parent) && !family.contains(&process.pid) {
                family.push(process.pid);
            }
        }
        if family.len() == before {
            return family;
        }
    }
}

/// Identifies this boot of the machine and this process-id namespace.
///
/// Ids and start times mean nothing outside of them.
pub(crate) fn boot_and_namespace() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{}/{}", boot.trim(), namespace.display())
}

#[cfg(test)]
mod tests;
