//! The traces of an engine on this host: its directory, emptied before each life, and the record in it that lets an agent find the engine's processes when neither their keeper nor the agent that started them lives any more.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::command::temporary_in;
use super::plugin;
use super::proc::{self, Process};
use crate::keeper::MARK;
use crate::keeper::wire::Leader;

/// How long one wait for the end of killed processes lasts before they are called stuck. A process inside a GPU driver call can take seconds to die.
pub(crate) const STUCK_AFTER: Duration = Duration::from_secs(10);

/// Empties the directory: sockets of an earlier life would make vLLM fail, and its temporary files are never removed by itself. What an engine finds in it
/// is a place for new ones, and the plugin, should its environment name that.
pub(crate) fn prepare(directory: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut builder = fs::DirBuilder::new();
    builder.mode(0o700).create(directory)?;
    builder.create(temporary_in(directory))?;
    plugin::write(directory)
}

/// What the engine's directory says about its group, for an agent that did not start it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    leader: i32,
    started: u64,
    session: i32,
    birthplace: String,
}

impl Record {
    /// The record of a first process that is there, even if it has ended.
    pub(crate) fn of(leader: i32) -> io::Result<Self> {
        let process = Process::read(leader).ok_or_else(|| io::Error::other("cannot read /proc, which an agent needs"))?;
        Ok(Self { leader, started: process.started, session: process.session, birthplace: proc::birthplace() })
    }

    fn path(directory: &Path) -> PathBuf {
        directory.join("engine.pid")
    }

    pub(crate) fn write(&self, directory: &Path) -> io::Result<()> {
        let text = format!("{} {} {} {}\n", self.leader, self.started, self.session, self.birthplace);
        fs::write(Self::path(directory), text)
    }

    pub(crate) fn read(directory: &Path) -> Option<Self> {
        let text = fs::read_to_string(Self::path(directory)).ok()?;
        let mut words = text.split_whitespace();
        Some(Self {
            leader: words.next()?.parse().ok()?,
            started: words.next()?.parse().ok()?,
            session: words.next()?.parse().ok()?,
            birthplace: words.next()?.to_owned(),
        })
    }

    /// The first process.
    pub(crate) fn leader(&self) -> Leader {
        Leader { pid: self.leader, started: self.started }
    }

    /// Whether this is the record of a first process that lives here and now.
    pub(crate) fn is_of(&self, leader: Leader) -> bool {
        let lives = Process::read(leader.pid).is_some_and(|process| process.started == leader.started && !process.ended);
        lives && self.leader() == leader && !self.is_elsewhere()
    }

    /// Whether its ids mean nothing here: of an earlier run of the machine, or of another container.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.birthplace != proc::birthplace()
    }

    /// The living members of the recorded group, and nothing else that may have its id by now.
    fn members(&self) -> Vec<Process> {
        if self.is_elsewhere() {
            return Vec::new();
        }
        // The id of a group is not reused while it has members: another process under the leader's id proves that the group ended.
        match Process::read(self.leader) {
            Some(leader) if leader.started != self.started => return Vec::new(),
            _ => {}
        }
        let mut members = proc::members(self.leader);
        members.retain(|member| member.session == self.session && member.started >= self.started);
        members
    }
}

/// The living processes of an engine whose agent is dead, found by the record in its directory and by the environment that every engine is given.
pub(crate) fn orphans(directory: &Path) -> Vec<i32> {
    let mut found = Record::read(directory).map_or_else(Vec::new, |record| record.members());
    let mark = format!("VLLM_RPC_BASE_PATH={}", directory.display());
    let mut marked = Process::all();
    marked.retain(|process| !process.ended && process.has_environment(&mark));
    found.append(&mut marked);
    let mut ids: Vec<i32> = found.into_iter().map(|process| process.pid).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// The keepers of the engine with this directory; there should be one at most.
pub(crate) fn keepers_of(directory: &Path) -> Vec<i32> {
    let mark = format!("{MARK}={}", directory.display());
    let mut marked = Process::all();
    marked.retain(|process| !process.ended && process.has_environment(&mark));
    marked.into_iter().map(|process| process.pid).collect()
}

/// Kills the processes of an engine whose agent or keeper is dead, and its keeper. Blocks until none lives, ten seconds at most; returns how many it found, keepers apart, or those that are left.
#[expect(clippy::disallowed_methods, reason = "it runs where blocking is allowed, before the agent has any engine")]
pub(crate) fn end_orphans(directory: &Path) -> Result<usize, Vec<i32>> {
    let deadline = std::time::Instant::now() + STUCK_AFTER;
    let mut found = 0;
    loop {
        let orphans = orphans(directory);
        let keepers = keepers_of(directory);
        if orphans.is_empty() && keepers.is_empty() {
            return Ok(found);
        }
        if std::time::Instant::now() >= deadline {
            return Err([orphans, keepers].concat());
        }
        found = found.max(orphans.len());
        // The engine first: a keeper that goes takes only the first process with it.
        for pid in orphans.into_iter().chain(keepers) {
            if let Some(pid) = Pid::from_raw(pid) {
                // One that is already gone is what was wanted.
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests;
