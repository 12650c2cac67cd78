//! Record in an engine's directory by which an agent finds the engine's processes when neither
//! their keeper nor the agent that started them lives any more.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::LeaderProcess;
use super::table::{self, ProcessStat};

/// Record of an engine's process group, for an agent that did not start it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessRecord {
    pub(super) leader: i32,
    pub(super) started: u64,
    pub(super) session: i32,
    pub(super) boot_and_namespace: String,
}

impl ProcessRecord {
    /// Creates the record of an existing first process, even if it has ended.
    pub(crate) fn of(leader: i32) -> io::Result<Self> {
        let process = ProcessStat::read(leader).ok_or_else(|| io::Error::other("cannot read /proc, which an agent needs"))?;
        Ok(Self { leader, started: process.started, session: process.session, boot_and_namespace: table::boot_and_namespace() })
    }

    fn path(directory: &Path) -> PathBuf {
        directory.join("engine.pid")
    }

    pub(crate) fn write(&self, directory: &Path) -> io::Result<()> {
        let text = format!("{} {} {} {}\n", self.leader, self.started, self.session, self.boot_and_namespace);
        fs::write(Self::path(directory), text)
    }

    pub(crate) fn read(directory: &Path) -> Option<Self> {
        let text = fs::read_to_string(Self::path(directory)).ok()?;
        let mut words = text.split_whitespace();
        Some(Self {
            leader: words.next()?.parse().ok()?,
            started: words.next()?.parse().ok()?,
            session: words.next()?.parse().ok()?,
            boot_and_namespace: words.next()?.to_owned(),
        })
    }

    pub(crate) fn leader(&self) -> LeaderProcess {
        LeaderProcess { pid: self.leader, started: self.started }
    }

    /// Whether this is the record of a first process that lives here and now.
    pub(crate) fn is_of(&self, leader: LeaderProcess) -> bool {
        let lives = ProcessStat::read(leader.pid).is_some_and(|process| process.started == leader.started && !process.is_zombie);
        lives && self.leader() == leader && !self.is_foreign()
    }

    /// Whether the ids mean nothing here, because they are from an earlier boot or another
    /// container.
    pub(crate) fn is_foreign(&self) -> bool {
        self.boot_and_namespace != table::boot_and_namespace()
    }

    /// Living members of the recorded group, without unrelated processes that may have its id by
    /// now.
    pub(super) fn members(&self) -> Vec<ProcessStat> {
        if self.is_foreign() {
            return Vec::new();
        }
        // A group's id is not reused while it has members. So another process under the leader's id
        // proves that the group ended.
        match ProcessStat::read(self.leader) {
            Some(leader) if leader.started != self.started => return Vec::new(),
            _ => {}
        }
        let mut members = table::members(self.leader);
        members.retain(|member| member.session == self.session && member.started >= self.started);
        members
    }
}
